"""Signals that are raised at the end of a block, and a process that one thread starts and another stops."""

import signal
from pathlib import Path

import pytest

from ampcompare.base.errors import Ended
from ampcompare.cli.launching import save_and_end_at_signals
from ampcompare.experiment import run_plan as run
from ampcompare.experiment.launch.contract import (
    Launcher,
    LauncherClosed,
    StoppableProcess,
    record_of_failed_cell,
)
from ampcompare.experiment.launch.dispatch.dispatch import DispatchingLauncher, LauncherPool
from ampcompare.experiment.launch.stop_signal import request_stop_at_signals, stop_signals_held
from ampcompare.results.records.comparison import Comparison
from ampcompare.results.records.run import RunRecord
from ampcompare.settings.config import RunConfig
from ampcompare.training.stop_request import StopRequest
from tests.experiment.pretend import make_plan


class Fails(Launcher):
    """A cell that was ended from outside, next to which nothing runs."""

    def launch(self, config: RunConfig, *rest: object) -> RunRecord:
        return record_of_failed_cell(
            config, "the process of the cell ended with exit code 1: KeyboardInterrupt"
        )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("pool", [False, True])
def test_a_signal_does_not_cut_off_what_is_saved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: signal.Signals, pool: bool
) -> None:
    """One that comes while a comparison is summed up, as in its first import of a library, ends the command after the
    reports are written, by its own error."""
    plan = make_plan(RunConfig.model_validate({"recipe": {"epochs": 1}}), ["fp32", "native:bf16"], [0])
    launcher = LauncherPool([Fails(), Fails()]) if pool else Fails()
    sums, saved = [], []
    whole = run.summarize

    def summarize(*words: object, **options: object) -> Comparison:
        if not sums:
            signal.raise_signal(number)
        sums.append(whole(*words, **options))  # type: ignore[arg-type]
        return sums[-1]

    monkeypatch.setattr(run, "summarize", summarize)
    expected = KeyboardInterrupt if number == signal.SIGINT else Ended
    with pytest.raises(expected), launcher, save_and_end_at_signals(launcher):
        run.run_plan(
            plan, tmp_path, launcher, jobs=1 + pool, save=lambda comparison, folder: saved.append(comparison)
        )
    assert saved == sums
    assert len(saved[0].records) == 1


def test_a_signal_before_a_run_asks_it_to_stop() -> None:
    """SIGTERM while torch and data are loaded is known to the run that follows; both handlers are as they were."""
    before, stop = signal.getsignal(signal.SIGTERM), StopRequest()
    with stop_signals_held():
        signal.raise_signal(signal.SIGTERM)
        with request_stop_at_signals(stop):
            assert stop.asked
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_cell_that_had_ended_is_not_followed_by_another(tmp_path: Path) -> None:
    """A signal to a cell that was about to end anyway holds for the command: no cell starts after it."""

    class EndsAnyway(DispatchingLauncher):
        def ask_cell_to_stop(self) -> bool:
            return True

    launcher = EndsAnyway()
    with save_and_end_at_signals(launcher):
        signal.raise_signal(signal.SIGTERM)
        assert launcher.launch(RunConfig(), tmp_path).status == "interrupted"
    assert list(tmp_path.iterdir()) == []


def test_another_error_that_a_library_makes_of_a_signal() -> None:
    """A module in C that a signal interrupts says that it cannot be imported; the command was asked to end."""

    def load() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except Ended:
            raise ImportError("numpy._core.multiarray failed to import") from None

    with pytest.raises(Ended, match="ended by SIGTERM") as caught, save_and_end_at_signals(Fails()):
        load()
    assert isinstance(caught.value.__cause__, ImportError)
    with pytest.raises(ImportError), save_and_end_at_signals(Fails()):
        raise ImportError("as without a signal")


def test_nothing_starts_after_the_end() -> None:
    """Closing ends the process once, and a thread that comes later gets an error instead of a process."""
    ended: list[str] = []
    held = StoppableProcess(ended.append)
    assert held.start(lambda: "first") == "first"
    held.end_process()
    held.start(lambda: "second")
    held.raise_if_closed()
    held.close()
    held.close()
    assert ended == ["first", "second"]
    with pytest.raises(LauncherClosed):
        held.start(lambda: pytest.fail("it was started"))
