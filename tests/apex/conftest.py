"""For tests of `ampcompare.apex`: a closed amp session after each, and what the golden comparison checked."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.apex.golden_replay import compact, recordings

HERE = Path(__file__).resolve().parent
GOLDEN = HERE / "golden"

# Strict mode reproduces an optimizer state that was rounded to 16 bits on the way (deviation 5), and accumulated
# gradients of fp32 parameters that are lost at a static scale of 1 (deviation 4).
STRICT_SCENARIOS = (
    "resume-init-then-load-O2-convnet-sgd",
    "resume-load-then-init-O2-mlp-adam",
    "resume-init-then-load-O5-convnet-sgd",
    "resume-load-then-init-O5-mlp-adam",
    "accumulate-plain-O5-convnet-sgd",
)

_CHECKED: list[str] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the tests of this folder use what Apex itself declared deprecated."""
    folder, declared = (
        f"{HERE}{os.sep}",
        pytest.mark.filterwarnings("ignore::ampcompare.apex.DeprecatedFeatureWarning"),
    )
    for item in items:
        if str(item.path).startswith(folder):
            item.add_marker(declared)


@pytest.fixture(autouse=True)
def _closed_session() -> Iterator[None]:
    """Take back O1's patches and forget scalers after each test."""
    yield
    amp = sys.modules.get("ampcompare.apex.amp")
    if amp is not None:
        amp._amp_state.close()


@pytest.fixture(scope="session")
def replays(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `golden_replay.py` writes about all golden scenarios, from one child process."""
    output = tmp_path_factory.mktemp("golden") / "results.json"
    files = [*sorted(map(str, (GOLDEN / "apex-25.05").glob("*.json"))), str(GOLDEN / "rocm-apex.json.xz")]
    command = [
        sys.executable,
        str(HERE / "golden_replay.py"),
        str(output),
        ",".join(STRICT_SCENARIOS),
        *files,
    ]
    # Processors with fp16 instructions sum in half precision; the recording's had none. An interpreter of its own, as
    # oneDNN reads the variable once.
    environment = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", **os.environ}
    subprocess.run(command, check=True, env=environment)
    results: dict[str, Any] = json.loads(output.read_text())
    return results


@pytest.fixture(scope="session")
def replayed(replays: dict[str, Any]) -> dict[str, Any]:
    """Results of ampcompare's engine by the name of the scenario."""
    return replays["replayed"]


@pytest.fixture(scope="session")
def by_hand(replays: dict[str, Any]) -> dict[str, Any]:
    """Results of the levels in plain torch, of the scenarios that `amp_by_hand` can train."""
    return replays["by_hand"]


@pytest.fixture(scope="session")
def exact(replays: dict[str, Any]) -> Callable[[dict[str, Any]], bool]:
    """Return whether this machine has the arithmetic that a scenario's recording used.

    Of Apex's, in fp32 and fp16, by a digest of plain torch operations. Of ROCm's, in bfloat16, where scenarios of the
    same level and models, trained by hand on this machine, have the bits of their recordings: processors differ in
    more ways there, with bf16 instructions, with AMX, or with neither. The plain scenarios are asked; where the digest
    is that of no machine that is known, all are, since some of them agree by chance.
    """
    digests = json.loads((GOLDEN / "arithmetic.json").read_text())["digests"]
    same = replays["arithmetic"] in digests
    plain: dict[str, bool] = {}
    for recording in recordings([GOLDEN / "rocm-apex.json.xz"]):
        scenario = recording["scenario"]
        is_asked = scenario["name"].startswith(("basic-", "shared-weight-")) if same else True
        if is_asked and scenario["name"] in replays["by_hand"]:
            got = compact(replays["by_hand"][scenario["name"]])
            for key in _level_and_models(scenario):
                plain[key] = plain.get(key, True) and got == {name: recording[name] for name in got}
    _CHECKED.append(
        f"to the bit with the levels by hand ({len(replays['by_hand'])} of {len(replays['replayed'])})"
    )
    if same:
        _CHECKED.append("to the bit with Apex's recordings (plain torch arithmetic equals theirs)")
    else:
        _CHECKED.append(
            "with Apex's recordings within tolerances, dtypes and scales exactly (plain torch arithmetic differs)"
        )
    equal = ", ".join(key for key, holds in plain.items() if holds) or "no model"
    _CHECKED.append(f"with ROCm's to the bit for {equal}, else within tolerances, dtypes and scales exactly")

    def is_exact(scenario: dict[str, Any]) -> bool:
        if scenario["amp"]["opt_level"] not in ("O4", "O5"):
            return same
        return all(plain[key] for key in _level_and_models(scenario))

    return is_exact


def _level_and_models(scenario: dict[str, Any]) -> list[str]:
    return [
        f"{scenario['amp']['opt_level']} {kind}"
        for kind in sorted({spec["type"] for spec in scenario["models"]})
    ]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how the golden trajectories were compared."""
    for how in _CHECKED:
        terminalreporter.write_line(f"golden trajectories of Apex: compared {how}")
