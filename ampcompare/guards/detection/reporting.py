"""Report what a guard detected: once for each line, as a warning or as an error."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

from ampcompare.base.environment.ranks import rank_in_process_group, rank_of_process
from ampcompare.base.errors import GuardError
from ampcompare.base.location import Location, user_location


class GuardWarning(UserWarning):
    """A mistake in the use of mixed precision."""


@dataclass(frozen=True)
class Violation:
    """One mistake of a guard at one line: what happened there, and what to write instead."""

    guard: str
    location: Location
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"guard {self.guard}: {self.location}: {self.what}; {self.remedy}"


def warn_of_violation(violation: Violation) -> None:
    """Emit a `GuardWarning` at the line, which Python's own filters obey."""
    text = f"{violation.guard}: {violation.what}; {violation.remedy}"
    warnings.warn_explicit(text, GuardWarning, violation.location.file, violation.location.line)


class ViolationSink:
    """Passes violations on, each guard and line once: to `say` on the first rank, or raised on all if `strict`."""

    def __init__(self, say: Callable[[Violation], None], *, strict: bool) -> None:
        self._say = say
        self._strict = strict
        self._reported: set[tuple[str, str, int]] = set()

    def report(self, guard: str, what: str, remedy: str, location: Location | None = None) -> None:
        """Report what happened, in words that follow the line, and what to write instead, by default at this line.

        Raises:
            GuardError: reporting is strict.
        """
        location = location or user_location()
        key = (guard, location.file, location.line)
        if key in self._reported:
            return
        self._reported.add(key)
        violation = Violation(guard, location, what, remedy)
        if self._strict:
            raise GuardError(str(violation))
        if _rank_of_process() == 0:
            self._say(violation)


def _rank_of_process() -> int:
    place = rank_in_process_group()
    return rank_of_process() if place is None else place.rank
