"""What the display says while cells run, with the clock in the test's hands."""

from __future__ import annotations

import pytest

from ampcompare.cli.show import Display
from ampcompare.launch.base import Progress
from ampcompare.records.run import RunRecord
from ampcompare.settings.config import RunConfig


class Clock:
    """A monotonic clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the display."""
    clock = Clock()
    monkeypatch.setattr("ampcompare.cli.show.time", clock)
    return clock


def test_time_left_follows_from_cells_that_ran(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """Cells that ran and the present one so far give the time of the others; records that were there do not count."""
    config = RunConfig()
    record = RunRecord(cell="0" * 12, arm="fp32", status="completed", config=config)
    display = Display(quiet=False, bar=False, notify_seconds=1.0)

    def said(steps: int) -> str:
        display.progress(Progress(steps, 100, 0))
        return capsys.readouterr().err.strip()

    display.begin(config, 1, 202)
    display.end(record, reused=True)
    display.begin(config, 2, 202)
    clock.now += 30
    assert said(0).endswith("0 of 100 steps, 30 s since the start")
    clock.now += 30
    assert said(50).endswith("60 s since the start, about 6h41m for all")  # two minutes a cell, and 200.5 cells
    display.end(record, reused=False)
    display.begin(config, 200, 202)
    clock.now += 60
    assert said(50).endswith(", about 3m20s for all")  # 120 seconds for one cell and a half, so 80 for each of 2.5
    display.end(record, reused=False)
    display.begin(config, 202, 202)
    clock.now += 60
    assert said(100).endswith(", about 0s for all")
