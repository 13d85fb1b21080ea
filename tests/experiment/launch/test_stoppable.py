"""A process that one thread starts and another stops: pretended ones, in every order of events."""

import pytest

from ampcompare.experiment.launch.contract import LauncherClosed, Stoppable


def test_nothing_starts_after_the_end() -> None:
    """Closing ends the process once, and a thread that comes later gets an error instead of a process."""
    ended: list[str] = []
    held = Stoppable(ended.append)
    assert held.start(lambda: "first") == "first"
    held.drop()
    held.start(lambda: "second")
    held.check()
    held.close()
    held.close()
    assert ended == ["first", "second"]
    with pytest.raises(LauncherClosed):
        held.start(lambda: pytest.fail("it was started"))


def test_a_cell_is_asked_before_its_process_is_there() -> None:
    """The launcher finds out as soon as it looks; the next cell was not asked, and nobody is asked between cells."""
    held: Stoppable[str] = Stoppable(lambda process: None)
    assert not held.ask()
    with held.busy():
        assert not held.is_asked
        assert held.ask()
        assert held.is_asked
    assert held.is_asked, "the launcher still decides what the end of the cell means"
    with held.busy():
        assert not held.is_asked
