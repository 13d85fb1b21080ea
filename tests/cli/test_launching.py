"""Signals to a command."""

import signal
from contextlib import ExitStack

import pytest

from ampcompare.base.errors import Ended
from ampcompare.cli.launching import leave_block_at_signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_the_block_as_an_error(number: signal.Signals) -> None:
    """What the block has started is ended by its own cleanup, and the handlers are those of before."""
    inherited = signal.signal(number, signal.SIG_DFL)  # ignored, where the tests run under nohup
    cleanup = ExitStack()
    ends: list[bool] = []
    cleanup.callback(ends.append, True)
    try:
        with pytest.raises(Ended, match=f"ended by {number.name}"), leave_block_at_signals(), cleanup:
            signal.raise_signal(number)
        assert ends == [True]
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, inherited)
