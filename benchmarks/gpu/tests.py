"""The tests on this machine: those that need a GPU, the contract of the arms on it, and the suites of the engine.

Tests of the engine and of checkpoints make their tensors on the CPU, with the torch of this machine. They run a second
time with CUDA as the default device; tests that were written for a CPU may fail then, so these failures are listed, and
not judged.
"""

import importlib.util
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu import ROOT
from benchmarks.gpu.context import Context
from benchmarks.gpu.report import Report


@dataclass(frozen=True)
class Suite:
    """Some words for pytest.

    Attributes:
        rehearsed: the words of a rehearsal.
        judged: a failure is a failed check.
        seconds: most that it may take.
    """

    name: str
    words: tuple[str, ...]
    rehearsed: tuple[str, ...]
    judged: bool = True
    seconds: float = 120.0


ON_CUDA = ("-p", "benchmarks.gpu.default_device")
SUITES = (
    Suite(
        "tests that need a GPU", ("tests", "-m", "requires"), ("tests/training/test_meters.py",), seconds=90.0
    ),
    Suite(
        "contract on the device",
        ("tests/training/precision",),
        ("tests/training/precision/test_half_cast.py",),
    ),
    Suite("engine on the CPU", ("tests/apex", "-m", "not slow"), ("tests/apex/parallel/test_larc.py",)),
    Suite(
        "checkpoints on the CPU",
        ("tests/training/checkpoint", "-m", "not slow"),
        ("tests/checkpoints/store/test_folder.py",),
        seconds=90.0,
    ),
    Suite(
        "engine and checkpoints with CUDA as the default device",
        (*ON_CUDA, "tests/apex", "tests/training/checkpoint", "-m", "not slow"),
        (*ON_CUDA, "tests/apex/parallel/test_larc.py"),
        judged=False,
        seconds=80.0,
    ),
)


def run(context: Context, report: Report) -> None:
    """Run each suite in a process of its own, and read what pytest wrote."""
    passed = 0
    for suite in SUITES:
        file = context.scratch / f"{suite.name.replace(' ', '-')}.xml"
        words = [*(suite.rehearsed if context.rehearse else suite.words), "-q", "-p", "no:cacheprovider"]
        if not context.rehearse and importlib.util.find_spec("xdist") is not None:
            words += ["-n", str(context.jobs)]
        command = [sys.executable, "-m", "pytest", *words, f"--junit-xml={file}"]
        done = context.program(command, most=suite.seconds, folder=ROOT)
        if not file.is_file():
            report.check(f"{suite.name}: pytest ran to its end", False, done.reason)
            continue
        counts, failed = read_junit(file)
        report.figures[suite.name] = {**counts, "exit_code": done.code, "failures": failed}
        if suite.judged:
            passed += counts["passed"]
            seen = f"{len(failed)} failed, such as {', '.join(failed[:3])}" if failed else done.reason
            # 5: pytest found no test, which is no success.
            report.check(f"{suite.name} pass", done.code == 0 and counts["passed"] > 0, seen)
        else:
            report.leave_out(f"{suite.name}: {counts['passed']} passed, {len(failed)} failed (not judged)")
        if counts["skipped"]:
            report.leave_out(f"{suite.name}: {counts['skipped']} tests skipped")
    report.says = f"{passed} tests passed"


def read_junit(file: Path) -> tuple[dict[str, int], list[str]]:
    """Return how many tests passed, failed and were skipped, and the names of those that failed."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failed = []
    for case in ElementTree.parse(file).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            counts["failed"] += 1
            failed.append(f"{case.get('classname')}.{case.get('name')}")
        else:
            counts["skipped" if "skipped" in kinds else "passed"] += 1
    return counts, failed
