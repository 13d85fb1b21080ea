"""Why a result is not finite in the arm alone: a number of the code that fp16 lacks, or inputs that became zero."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ampcompare.diagnosis.observation import place_of
from ampcompare.diagnosis.ranges import counts_of
from ampcompare.diagnosis.walks import walked_back
from ampcompare.diagnosis.watch import FP16_LARGEST, FP16_ZERO, Event

__all__ = ["Reason", "lost_share", "reason_of"]


@dataclass(frozen=True)
class Reason:
    """What is said of a fault, and where to look first.

    Attributes:
        text: the reason.
        at: place among the events where it was made; None if that is the fault's own.
    """

    text: str
    at: int | None = None


def reason_of(events: Sequence[Event], origin: int) -> Reason | None:
    """Return why the result at `origin` is the first that is not finite; None if that is not known."""
    number = events[origin].number
    if abs(number) > FP16_LARGEST:
        return Reason(f"{number:g} is beyond the largest number of fp16")

    def before(at: int) -> list[int]:
        return [source for source in events[at].sources if source < at and lost_share(events[source])]

    zeros = sorted(set(walked_back([origin], before)) - {origin})
    if not zeros:
        return None
    small = [at for at in zeros if 0 < abs(events[at].number) <= FP16_ZERO]
    at = max(small, default=zeros[0])
    name = _named(events[at], events[origin])
    made = None if _line(events[at]) == _line(events[origin]) else at
    if small:
        return Reason(f"{events[at].number:g} in {name} is zero in fp16", made)
    return Reason(f"{100 * lost_share(events[at]):.2g} % of the results of {name} are zero in the arm alone", made)


def lost_share(event: Event) -> float:
    """Return the share of a result that is zero in the arm alone."""
    elements, _, lost = counts_of(event.row)
    return lost / elements if elements else 0.0


def _line(event: Event) -> tuple[str, str]:
    return event.key[0], event.key[2]


def _named(event: Event, other: Event) -> str:
    """Return the name of a place for a reader who knows another one."""
    place = place_of(event.key)
    if _line(event) == _line(other):
        return place.operation
    return f"{place.name} ({place.where})" if place.where else place.name
