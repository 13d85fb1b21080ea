"""Signals to a command."""

from __future__ import annotations

import os
import signal

import pytest

from ampcompare.cli.launching import ended_by_signals
from ampcompare.errors import Ended


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_the_block_as_an_error(number: signal.Signals) -> None:
    """What the block has started is ended by its own cleanup, and the handlers are those of before."""
    before = signal.getsignal(number)
    is_clean = False
    with pytest.raises(Ended, match=f"ended by {number.name}"), ended_by_signals():
        try:
            os.kill(os.getpid(), number)
            signal.pause()
        finally:
            is_clean = True
    assert is_clean
    assert signal.getsignal(number) == before
