"""Say what a guard found: once for each line, as a warning or as an error."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

from ampcompare.errors import GuardError
from ampcompare.guards.catalog import GUARDS
from ampcompare.guards.place import Place, user_place

__all__ = ["Finding", "GuardWarning", "Reporter", "warn"]


class GuardWarning(UserWarning):
    """A mistake in the use of mixed precision."""


class Finding:
    """One mistake at one line.

    Attributes:
        guard: name of the guard.
        place: the line.
        what: what happened there.
    """

    def __init__(self, guard: str, place: Place, what: str) -> None:
        self.guard, self.place, self.what = guard, place, what

    def __str__(self) -> str:
        return f"guard {self.guard}: {self.place}: {self.what}; {GUARDS[self.guard].remedy}"


def warn(finding: Finding) -> None:
    """Emit a `GuardWarning` at the line, which Python's own filters obey."""
    text = f"{finding.guard}: {finding.what}; {GUARDS[finding.guard].remedy}"
    warnings.warn_explicit(text, GuardWarning, finding.place.file, finding.place.line)


class Reporter:
    """Passes findings on, each guard and line once.

    Args:
        say: receives a finding; on the first rank only.
        strict: raise instead, on every rank.
    """

    def __init__(self, say: Callable[[Finding], None], *, strict: bool) -> None:
        self._say = say
        self._strict = strict
        self._seen: set[tuple[str, str, int]] = set()

    def report(self, guard: str, what: str, place: Place | None = None) -> None:
        """Report a mistake.

        Args:
            what: what happened, in words that follow the line.
            place: None for the line of the user's code that is running.

        Raises:
            GuardError: reporting is strict.
        """
        place = place or user_place()
        key = (guard, place.file, place.line)
        if key in self._seen:
            return
        self._seen.add(key)
        finding = Finding(guard, place, what)
        if self._strict:
            raise GuardError(str(finding))
        if _rank() == 0:
            self._say(finding)


def _rank() -> int:
    distributed: Any = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdigit() else 0
