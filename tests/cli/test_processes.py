"""The command line as users start it: imports, terminals, interruption, and a script of the Python API."""

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from ampcompare.cli import main
from ampcompare.results.records.comparison import read_comparison
from ampcompare.results.report.base import FORMATS

COMMAND = [sys.executable, "-m", "ampcompare"]
TENSORBOARD = find_spec("tensorboard") is not None
SMALL = [
    *("--data", "synthetic", "--train-size", "64", "--val-size", "32", "--image-size", "8", "--arch", "mlp"),
    *("--batch-size", "16", "--device", "cpu"),
]
COMPARE = [
    "compare",
    *SMALL,
    "--seeds",
    "0",
    "--epochs",
    "1",
    "--arm",
    "fp32",
    "--arm",
    "native:bf16",
    "-o",
    "out",
]
# Calls the command line with each list of words, and names after each group of lists what has been imported so far.
IMPORTED = """
import sys
before = set(sys.modules)
from ampcompare.cli import main
for group in eval(sys.argv[1]):
    codes = []
    for words in group:
        sys.argv[1:] = words  # as a shell gives them
        codes.append(main())
    print("imported:", *sorted(name for name in set(sys.modules) - before if "." not in name), file=sys.stderr)
sys.exit(max(codes))
"""


@pytest.fixture(scope="module")
def ran(
    tmp_path_factory: pytest.TempPathFactory, forked_python: Any
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """One comparison in a process of its own, which ends by naming what it has imported, and its folder."""
    folder = tmp_path_factory.mktemp("ran")
    (folder / "imported.py").write_text(IMPORTED)
    words = [*COMPARE, *(["--tensorboard", "tb"] if TENSORBOARD else [])]
    done = forked_python.run(["imported.py", repr([[words]])], folder, os.environ)
    assert done.returncode == 0, done.stderr
    return done, folder


FIRST_PAGE = [["--help"], ["-h"], ["--version"], ["-V"]]
LOOKING_AROUND = [["run", "--help"], ["run", "-h"], ["compare", "--help"], ["list"]]
READING = [["report", "out"], ["judge", "--example"], ["lint", "."]]


def _imported(done: subprocess.CompletedProcess[str]) -> list[set[str]]:
    assert done.returncode == 0, done.stderr
    return [set(line.split()) for line in done.stderr.splitlines() if line.startswith("imported: ")]


def test_the_first_page_imports_little(tmp_path: Path) -> None:
    """It loads not even click, typing or tempfile; help and lists neither torch, numpy, scipy nor what draws
    progress."""
    command = [sys.executable, "-c", IMPORTED, repr([FIRST_PAGE, LOOKING_AROUND])]
    first, around = _imported(
        subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    )
    assert not first & {"click", "pydantic", "typing", "tempfile", "traceback"}
    assert "click" in around
    assert not around & {"torch", "torchvision", "numpy", "scipy", "sklearn", "rich"}


def test_reading_imports_no_torch(
    ran: tuple[subprocess.CompletedProcess[str], Path], forked_python: Any
) -> None:
    """Neither for results nor for scripts."""
    (reading,) = _imported(forked_python.run(["imported.py", repr([READING])], ran[1], os.environ))
    assert "scipy" in reading
    assert not reading & {"torch", "torchvision"}


def test_compare_imports_no_torch(ran: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    """The process of `compare` leaves torch to the cells, with event files for TensorBoard too."""
    imported = set(ran[0].stderr.splitlines()[-1].split())
    assert "pydantic" in imported
    assert not imported & {"torch", "torchvision", "tensorflow"}
    if not TENSORBOARD:
        pytest.skip("event files need the extra tensorboard")
    assert "tensorboard" in imported
    assert len(list(ran[1].glob("tb/fp32/seed=0/*tfevents*"))) == 1


def test_results_and_messages_are_apart(ran: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    """Headline and table are on stdout, and nothing but lines about cells and reports on stderr; no bar in a pipe."""
    done, _ = ran
    assert done.stdout.startswith("Nothing to compare: fp32 learned nothing ")
    assert "\n\narm " in done.stdout
    assert "cells" not in done.stdout
    assert "report:" not in done.stdout
    lines = [
        line for line in done.stderr.splitlines()[:-1] if line.strip() == line != "" and ", step " not in line
    ]  # as a slow machine adds
    assert [line.partition(" ")[0] for line in lines] == [
        *("2", "preflight,", "[1/2]", "[2/2]", "report:"),
        "no" if FORMATS["html"].missing_packages else "page:",  # what the extra adds, or that it is missing
    ]
    assert "\r" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_behind_stdout() -> None:
    """A table that cannot be written is one line on stderr and a fault of the environment."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, "list", "guards"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 4
    assert done.stderr == "ampcompare: cannot write the output: No space left on device\n"


@pytest.mark.slow
def test_a_reader_that_has_gone(
    ran: tuple[subprocess.CompletedProcess[str], Path], forked_python: Any
) -> None:
    """A closed pipe on stdout is no failure, and a limit that was not kept is one all the same."""
    options: dict[str, Any] = {"stderr": subprocess.PIPE, "text": True, "cwd": ran[1]}
    for start, command, code in (
        (subprocess.Popen, ["list"], 0),
        (forked_python.popen, [*COMPARE, "--fail-on", "accuracy<100"], 1),
    ):
        there, here = os.pipe()
        os.close(there)
        with open(here, "w") as closed:
            process = start([*COMMAND, *command], stdout=closed, **options)
        with process.stderr as said:
            text = said.read()
        assert process.wait() == code, text
        assert "Broken" not in text


def test_the_report_holds_the_command(ran: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    """The report says with which words it can be made again."""
    assert read_comparison(ran[1] / "out" / "report.json").command.startswith(
        "ampcompare compare --data synthetic"
    )


def test_ctrl_c_leaves_a_report_and_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], forked_python: Any
) -> None:
    """SIGINT ends with 130; what was done is in the report, and server and cell are gone."""
    words = ["compare", *SMALL, "--epochs", "15", "--arm", "fp32", "--seeds", "0-99"]
    before = forked_python.descendants()
    process = forked_python.popen(
        [*COMMAND, *words, "-o", "out"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    with process.stderr as said, process.stdout as out:
        assert said.readline().startswith("100 cells: 1 arm (fp32) x 100 seeds (0-99); on cpu, 1 thread")
        assert said.readline().startswith("preflight, ")
        while not (line := said.readline()).startswith("[1/100] fp32, seed 0: top-1"):
            assert line, "it has ended"
        family = forked_python.descendants() - before - {psutil.Process(process.pid)}
        assert family
        process.send_signal(signal.SIGINT)
        rest = said.read()
        assert process.wait(timeout=20) == 130
        _, alive = psutil.wait_procs(family, timeout=20)
        assert not alive
        assert out.read() == ""
    assert "Traceback" not in rest
    last = "ampcompare: interrupted; the same command starts with the first cell that has no record"
    assert rest.splitlines()[-1] == last
    assert "finished cells are in out/report.md" in rest
    report = read_comparison(tmp_path / "out" / "report.json")
    assert 0 in report.seeds
    assert report.arms[0].completed >= 1
    monkeypatch.chdir(tmp_path)
    assert main(["report", "out"]) == 0
    again = capsys.readouterr().out
    assert again.startswith("fp32 reached ")
    assert "\n\narm " in again


SCRIPT = """
import ampcompare
from ampcompare import Recipe, RunConfig

recipe = Recipe.model_validate({
    "data": {"name": "synthetic", "train_size": 64, "val_size": 32, "image_size": 8},
    "model": {"arch": "mlp"}, "epochs": 1, "batch_size": 16,
})
print("started")
record = ampcompare.run(RunConfig(recipe=recipe, arm="native:bf16", device="cpu"))
comparison = ampcompare.compare(["fp32", "native:bf16"], seeds=[0], recipe=recipe, device="cpu", output_dir="both")
alone = ampcompare.compare("fp32", seeds="0-1", recipe=recipe, device="cpu", output_dir="alone")
assert [(row.arm, row.seeds) for row in alone.arms] == [("fp32", [0, 1])]
print(record.status, record.arm, len(comparison.records), comparison.reference, [row.status for row in comparison.arms])
"""


@pytest.mark.slow
def test_an_unguarded_script(tmp_path: Path, forked_python: Any) -> None:
    """The Python API runs from a script without a main guard, which is not run again by any of its processes."""
    (tmp_path / "script.py").write_text(SCRIPT)
    done = forked_python.run(["script.py"], tmp_path, os.environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["started", "completed native:bf16 2 fp32 ['ok', 'ok']"]
    assert done.stderr == ""
    (path,) = tmp_path.glob("runs/run-*/cells/*/record.json")
    assert json.loads(path.read_text())["arm"] == "native:bf16"
    assert len(list(tmp_path.glob("both/cells/*/record.json"))) == 2
