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
