"""What guards found in cells is said on stderr, and `list` and the options know the guards."""

import pytest

from ampcompare.cli.progress_display import ProgressDisplay
from ampcompare.results.records.run import RunRecord
from ampcompare.settings.config import RunConfig

FINDING = "guard step-twice: backend.py:7: optimizer.step() again after scaler.step(optimizer)"


def end_two_cells(display: ProgressDisplay) -> None:
    for number in (1, 2):
        config = RunConfig(arm="native:fp16")
        display.begin(config, number, 2)
        display.end(
            RunRecord(
                cell=config.digest(), arm=config.arm, status="completed", config=config, guards=[FINDING]
            ),
            reused=False,
        )


def test_a_finding_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Two cells with the same mistake give one line, and --quiet gives none."""
    with ProgressDisplay(quiet=False, bar=False) as display:
        end_two_cells(display)
    captured = capsys.readouterr()
    assert captured.err.splitlines().count(f"ampcompare {FINDING}") == 1
    assert captured.out == ""
    with ProgressDisplay(quiet=True, bar=False) as display:
        end_two_cells(display)
    assert capsys.readouterr().err == ""
