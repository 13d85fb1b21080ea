"""Watch a training script for the usual mistakes in mixed precision, with file and line of the script.

    import ampcompare.guards

    ampcompare.guards.install()

`ampcompare exec` does this by itself. `docs/guards.md` lists the guards and what they cannot see.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ampcompare.guards.arrival import Arrivals
from ampcompare.guards.catalog import GUARDS, Guard
from ampcompare.guards.reporting import Finding, GuardWarning, Reporter, warn

if TYPE_CHECKING:
    from ampcompare.guards.watch import Watch

__all__ = ["GUARDS", "Finding", "Guard", "GuardWarning", "Guards", "install"]

AMP_MODULES = ("ampcompare.apex.amp", "apex.amp")


class Guards:
    """The guards that are on. As a context manager they are removed at the end of the block."""

    def __init__(self, reporter: Reporter, passes: int | None) -> None:
        self._reporter = reporter
        self._passes = passes
        self._watch: Watch | None = None
        amps = {name: functools.partial(self._watch_amp, name) for name in AMP_MODULES}
        self._arrivals = Arrivals({"torch": self._begin, **amps})
        self._arrivals.begin()

    def _begin(self) -> None:
        if self._watch is None:
            self._watch = importlib.import_module("ampcompare.guards.watch").Watch(self._reporter, self._passes)

    def _watch_amp(self, name: str) -> None:
        self._begin()
        assert self._watch is not None
        self._watch.watch_amp(sys.modules[name])

    def remove(self) -> None:
        """Put back everything that was replaced."""
        self._arrivals.end()
        if self._watch is not None:
            self._watch.end()
            self._watch = None

    def __enter__(self) -> Guards:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.remove()


def install(*, strict: bool = False, say: Callable[[Finding], None] = warn, passes: int | None = None) -> Guards:
    """Watch torch, and Apex's `amp` or ours, in this process; torch itself is not imported for that.

    Args:
        strict: raise `ampcompare.errors.GuardError` instead of warning.
        say: what to do with a finding; by default a `GuardWarning` at the user's line.
        passes: end by themselves with the step that follows so many backward passes; None for never.

    Returns:
        The guards, whose `remove()` puts everything back.
    """
    return Guards(Reporter(say, strict=strict), passes)
