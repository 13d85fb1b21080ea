"""A terminal that is closed while a command runs in it."""

import contextlib
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ampcompare.base.errors import Ended
from ampcompare.cli.launching import save_and_end_at_signals
from ampcompare.cli.progress_display import ProgressDisplay
from ampcompare.experiment.launch.contract import Launcher, Progress
from ampcompare.results.records.run import RunRecord, read_record
from ampcompare.results.records.step import iter_steps
from ampcompare.settings.config import RunConfig

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="this system has no SIGHUP")


class Idle(Launcher):
    """Runs nothing, and counts how often it is asked to end."""

    def __init__(self, *, has_cell: bool) -> None:
        self.has_cell, self.asked = has_cell, 0

    def launch(self, *words: Any) -> RunRecord:
        raise AssertionError

    def ask_cell_to_stop(self) -> bool:
        self.asked += 1
        return self.has_cell


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_both_signals_reach_the_cell(number: signal.Signals) -> None:
    """SIGHUP does as SIGTERM does: a cell that runs is asked to save, and between cells the command ends."""
    inherited = signal.signal(number, signal.SIG_DFL)  # ignored, where the tests run under nohup
    launcher = Idle(has_cell=True)
    try:
        with save_and_end_at_signals(launcher):
            os.kill(os.getpid(), number)
            assert launcher.asked == 1
        with pytest.raises(Ended, match=number.name), save_and_end_at_signals(Idle(has_cell=False)):
            os.kill(os.getpid(), number)
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, inherited)


def test_nohup_is_respected() -> None:
    """A command under nohup goes on when its terminal is closed."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    launcher = Idle(has_cell=True)
    try:
        with save_and_end_at_signals(launcher):
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert launcher.asked == 0


def test_a_display_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress that cannot be written any more does not end the run."""

    def closed(*words: Any, **options: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("click.echo", closed)
    monkeypatch.setattr("ampcompare.cli.progress_display.discard_output_of_closed_terminal", lambda: None)
    with ProgressDisplay(quiet=False, bar=False, notify_seconds=0.0) as display:
        display.begin(RunConfig(), 1, 2)
        display.progress(1, Progress(1, 2, 0))
        display.note("a note")
        display.end(RunRecord(cell="a", arm="fp32", status="completed", config=RunConfig()), reused=False)


ENDLESS = [
    *("run", "--data", "synthetic", "--train-size", "64"),
    *("--val-size", "32", "--image-size", "8", "--arch", "mlp"),
    *("--epochs", "1000000", "--batch-size", "8", "--device", "cpu"),
]


@pytest.mark.slow
def test_a_run_in_a_terminal_that_is_closed(tmp_path: Path, forked_python: Any) -> None:
    """Its cell is saved, with as many steps as its checkpoint counts, and the exit code is 143."""
    # The terminal of standard input is made that of the new session. Under `nohup` the signal would be ignored, and
    # the run would rightly go on without end.
    (tmp_path / "in_terminal.py").write_text(
        "import fcntl, signal, sys, termios\nsignal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
        "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\nfrom ampcompare.cli import main\nsys.exit(main(sys.argv[1:]))\n"
    )
    command = [sys.executable, "in_terminal.py", *ENDLESS, "-o", str(tmp_path)]
    ours, theirs = os.openpty()
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    process = forked_python.popen(command, cwd=tmp_path, start_new_session=True, **streams)
    os.close(theirs)
    try:
        deadline = time.monotonic() + 100
        while time.monotonic() < deadline and not any(
            path.stat().st_size for path in tmp_path.glob("cells/*/steps.jsonl")
        ):
            if select.select([ours], [], [], 0.1)[0]:
                os.read(ours, 65536)
        os.close(ours)
        assert process.wait(60) == 143
    finally:
        with contextlib.suppress(ProcessLookupError):  # the session has ended, as it should have
            os.killpg(process.pid, signal.SIGKILL)
    (folder,) = tmp_path.glob("cells/*")
    record = read_record(folder / "record.json")
    assert record.status == "interrupted"
    assert (folder / "checkpoints" / f"step-{record.summary.num_steps:08d}.pt").exists()
    assert sum(1 for _ in iter_steps(folder / "steps.jsonl")) == record.summary.num_steps
