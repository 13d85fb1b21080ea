"""How the check of a GPU reads waits, replays and pytest's results, on made-up ones: these branches need no GPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import tests as suites
from benchmarks.gpu.golden import difference, unlike
from benchmarks.gpu.report import Report
from benchmarks.gpu.syncs import count_syncs


@pytest.mark.parametrize(
    "step, reads",
    [
        (lambda: torch.ones(2).sum().item(), 1),
        (lambda: torch.ones(2).tolist(), 1),
        (lambda: bool(torch.ones(1) > 0), 1),
        (lambda: torch.ones(2).sum(), 0),
    ],
)
def test_syncs_of_a_rehearsal(step: Any, reads: int) -> None:
    """A CPU counts what would make the host wait for a GPU: numbers, lists and decisions from tensors."""
    assert count_syncs(step, "cpu") == reads


def test_syncs_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA each wait that the debug mode names is a sync, its other warnings are none, and it is off afterwards."""
    modes = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def step() -> None:
        import warnings

        prototype = "Synchronization debug mode is a prototype and does not yet detect all synchronizing operations"
        for text in (prototype, *["called a synchronizing CUDA operation"] * 2, "other"):
            warnings.warn(text, stacklevel=1)

    assert count_syncs(step, "cuda") == 2
    assert modes == ["warn", "default"]


def _replayed(loss: float, dtype: str = "f") -> dict[str, Any]:
    step = {
        **dict.fromkeys(("out_dtypes", "grad_dtypes", "master_dtypes", "master_grad_dtypes", "buffer_dtypes"), ""),
        **{"step": 0, "loss": [loss], "loss_dtypes": dtype, "param_dtypes": "h", "skipped": [False], "scalers": []},
        "params": [["sha", [1.0]]],
    }
    return {"initial": [], "steps": [step], "final": {"amp_state_dict": {}}}


def test_bits_that_differ() -> None:
    """Replays of equal bits differ nowhere; others where the first value does."""
    assert difference(_replayed(1.0), _replayed(1.0)) == ""
    assert difference(_replayed(1.0), _replayed(1.0 + 2 * 2.0**-23)) == "step 0: loss"


def test_a_skip_that_was_not_recorded() -> None:
    """A step that is skipped where the recording applied it is named."""
    ours = _replayed(1.0)
    ours["steps"][0]["skipped"] = [True]
    assert unlike(_replayed(9.0), _replayed(1.0)) == ""
    assert unlike(_replayed(1.0), ours) == "step 0: skipped is [True], recorded [False]"
    assert "no kernel" in unlike(_replayed(1.0), {"error": "Traceback\nRuntimeError: no kernel"})


def test_results_of_pytest(tmp_path: Path) -> None:
    """Failed, skipped and passed tests are counted, and the failed ones named."""
    file = tmp_path / "junit.xml"
    file.write_text(
        '<testsuites><testsuite><testcase classname="a" name="one"/><testcase classname="a" name="two"><failure/>'
        '</testcase><testcase classname="a" name="three"><skipped/></testcase></testsuite></testsuites>'
    )
    assert suites.read_junit(file) == ({"passed": 1, "failed": 1, "skipped": 1}, ["a.two"])


def test_the_last_line(tmp_path: Path) -> None:
    """The line is one line, and numbers that JSON lacks are strings."""
    report = Report("syncs", says="none waits")
    report.check("a", True)
    report.leave_out("genuine Apex\n(no sources)")
    report.figures["x"] = float("nan")
    line = report.line("CPU")
    assert re.fullmatch(
        r"gpu-check syncs: held 1 of 1 checks in \d+ s on CPU: none waits \| left out: genuine Apex \(no sources\)",
        line,
    )
    assert '"x": "nan"' in report.write(tmp_path, {}).read_text()
