"""What the display shows on a terminal and elsewhere while cells run, with events that tests make up."""

import contextlib
import os
import select
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ampcompare.cli.progress_display import ProgressDisplay
from ampcompare.experiment.launch.contract import Progress
from ampcompare.experiment.observer import PlanOutline
from ampcompare.results.records.run import RunRecord
from ampcompare.settings.config import RunConfig
from tests.cli.screen import Screen, open_terminal

CONFIG = RunConfig(arm="native:fp16")


class Clock:
    """A monotonic clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Terminal:
    """A pseudo-terminal as stderr, and what is seen on it."""

    def __init__(self, width: int) -> None:
        self.here, there = open_terminal(width)
        self.stream = os.fdopen(there, "w", encoding="utf-8")
        self.screen = Screen(width)
        self.raw = ""

    @contextlib.contextmanager
    def display(self, *, bar: bool = True, notify_seconds: float | None = None) -> Iterator[ProgressDisplay]:
        """A display that has this terminal as stderr."""
        with (
            contextlib.redirect_stderr(self.stream),
            ProgressDisplay(quiet=False, bar=bar, notify_seconds=notify_seconds) as display,
        ):
            yield display

    def read(self, seconds: float = 0.0) -> str:
        """Return all that is seen, after output for some time."""
        end = time.monotonic() + seconds
        while select.select([self.here], [], [], max(0.05, end - time.monotonic()))[0]:
            text = os.read(self.here, 65536).decode()
            self.raw += text
            self.screen.feed(text)
        return self.screen.text


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the display."""
    clock = Clock()
    monkeypatch.setattr("ampcompare.cli.progress_display.time", clock)
    return clock


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """A terminal of 80 columns as stderr, drawn twenty times a second."""
    terminal = Terminal(80)
    monkeypatch.setattr("ampcompare.cli.progress_display.TICK_SECONDS", 0.05)
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    yield terminal
    os.close(terminal.here)
    terminal.stream.close()


def outline(count: int, **options: int) -> PlanOutline:
    return PlanOutline([CONFIG] * count, [CONFIG.arm] * count, [None] * count, Path("runs/made"), **options)


def record(status: str = "completed") -> RunRecord:
    return RunRecord.model_validate(
        {"cell": CONFIG.digest(), "arm": CONFIG.arm, "status": status, "config": CONFIG}
    )


def progress(steps: int, phase: str = "training") -> Progress:
    return Progress(steps, 100, 0, phase, 0.5, 65536.0, 2, 0.0125)  # type: ignore[arg-type]


def test_time_left_follows_from_cells_that_ran(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """Cells that ran and the present one so far give the time of the others; cached records do not count."""
    with ProgressDisplay(quiet=False, bar=False, notify_seconds=1.0) as display:
        display.plan(outline(202))
        display.begin(CONFIG, 1, 202)
        display.end(record(), reused=True)
        display.begin(CONFIG, 2, 202)
        capsys.readouterr()

        def said(steps: int) -> str:
            display.progress(2, progress(steps))
            return capsys.readouterr().err.strip()

        assert said(0) == ""
        clock.now += 30
        assert said(0).endswith("2 skipped, epoch 1/5; 30s since the start")
        clock.now += 30
        # two minutes a cell, and 200.5 cells
        assert said(50).endswith("1m00s since the start, about 6h41m left")


def test_a_heartbeat_without_any_event(terminal: Terminal) -> None:
    """While a step lasts nobody reports anything, and the time on the screen goes on."""
    with terminal.display() as display:
        display.plan(outline(2))
        display.begin(CONFIG, 1, 2)
        display.progress(1, progress(3))
        first, later = (terminal.read(seconds).splitlines()[1:4] for seconds in (0.2, 1.1))
    cell, figures, matrix = first
    assert cell.split()[:4] == ["native:fp16,", "seed", "0", "training"]
    assert "  3/100  " in cell
    assert figures.startswith("  loss 0.5 · loss scale 65536 · 12.5 ms/step · 2 skipped")
    assert matrix.startswith("0 of 2 cells ")
    assert (cell.split()[-1], later[0].split()[-1]) == ("0s", "1s")


def test_lines_that_stay_and_a_clean_end(terminal: Terminal) -> None:
    """What will run, a line per cell and notes stay in order; bars are gone, and the cursor was never hidden."""
    with terminal.display() as display:
        display.plan(outline(2))
        for number in (1, 2):
            display.begin(CONFIG, number, 2)
            display.progress(number, progress(60))
            terminal.read(0.2)
            display.note(f"note {number}")
            display.end(record("failed"), reused=False)
    terminal.stream.write("ampcompare: an error\n")
    terminal.stream.flush()

    assert terminal.read().splitlines() == [
        "2 cells: 1 arm (native:fp16) x 1 seed (0); on cpu, 1 thread; into runs/made",
        "note: note 1",
        "[1/2] native:fp16, seed 0: failed",
        "note: note 2",
        "[2/2] native:fp16, seed 0: failed",
        "ampcompare: an error",
    ]
    assert "60/100" in terminal.raw
    assert "\x1b[?25l" not in terminal.raw
    assert not terminal.screen.wrapped


def test_a_cell_of_a_queue_that_moves(terminal: Terminal) -> None:
    """Until a cell runs the queue is named; a job that is queued again is seen at its new node, and ends there."""
    config = RunConfig(arm="half", launcher="slurm")
    with terminal.display() as display:
        display.plan(PlanOutline([config] * 2, ["half"] * 2, [None] * 2, Path("out")))
        assert "waiting in the queue" in terminal.read(0.2)
        display.begin(config, 2, 2)
        for node in ("n1", "n2"):
            display.place(2, f"job 7_1 on {node}")
            display.progress(2, progress(10))
            assert f"half, seed 0, job 7_1 on {node}  training " in terminal.read(0.2)
        display.end(
            RunRecord(cell=config.digest(), arm="half", status="completed", config=config), reused=False
        )
        assert terminal.read(0.2).splitlines()[1] == "[2/2] half, seed 0, job 7_1 on n2: completed"


@pytest.mark.parametrize(("bar", "term"), [(False, "xterm"), (True, "dumb")])
def test_a_terminal_without_bars(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, bar: bool, term: str
) -> None:
    """--no-progress and a terminal that cannot move its cursor get plain lines."""
    monkeypatch.setenv("TERM", term)
    with terminal.display(bar=bar, notify_seconds=0.05) as display:
        display.begin(CONFIG, 1, 1)
        display.progress(1, progress(50))
        terminal.read(0.3)
        display.end(record(), reused=False)
    lines = terminal.read().splitlines()
    assert lines[0].startswith("[1/1] native:fp16, seed 0: training, step 50 of 100, loss 0.5")
    assert lines[-1] == "[1/1] native:fp16, seed 0: completed"
    assert "\x1b" not in terminal.raw


def test_a_plain_line_each_minute(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal a line comes by itself each minute; --quiet has none, and no other line."""
    for quiet in (False, True):
        with ProgressDisplay(quiet=quiet, bar=True) as display:
            display.plan(outline(2))
            display.begin(CONFIG, 1, 2)
            for _ in range(120):
                clock.now += 1
                display.progress(1, progress(50))
            display.end(record(), reused=False)
            display.note("a note")
        lines = capsys.readouterr().err.splitlines()
        assert len([line for line in lines if "step 50 of 100" in line]) == (0 if quiet else 2)
        assert len(lines) == (0 if quiet else 5)
