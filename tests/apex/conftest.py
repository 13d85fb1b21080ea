"""For tests of `ampcompare.apex`: a closed amp session after each, and what the golden comparison checked."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

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
    folder, declared = f"{HERE}{os.sep}", pytest.mark.filterwarnings("ignore::ampcompare.apex.DeprecatedFeatureWarning")
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
def replayed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of all golden scenarios, from one child process."""
    output = tmp_path_factory.mktemp("golden") / "results.json"
    files = [*sorted(map(str, (GOLDEN / "apex-25.05").glob("*.json"))), str(GOLDEN / "rocm-apex.json.xz")]
    command = [sys.executable, str(HERE / "golden_replay.py"), str(output), ",".join(STRICT_SCENARIOS), *files]
    # Processors with fp16 instructions sum in half precision; the recording's had none. An interpreter of its own, as
    # oneDNN reads the variable once.
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}
    subprocess.run(command, check=True, env=environment)
    results: dict[str, Any] = json.loads(output.read_text())
    return results


@pytest.fixture(scope="session")
def exact(replayed: dict[str, Any]) -> bool:
    """Whether this machine computes plain torch convolutions and products as the one of the recording."""
    recorded = json.loads((GOLDEN / "arithmetic.json").read_text())
    same = replayed["arithmetic"] in recorded["digests"]
    _CHECKED.append(
        "bit for bit (plain torch arithmetic equals the recording's)"
        if same
        else "within tolerances, dtypes and scales exactly (plain torch arithmetic differs from the recording's)"
    )
    return same


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how the golden trajectories were compared."""
    for how in _CHECKED:
        terminalreporter.write_line(f"golden trajectories of Apex: compared {how}")
