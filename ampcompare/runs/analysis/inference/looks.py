"""Looking at the same comparison more than once: the error rate of each look, and what changed between them.

A test at 5 % that is repeated as runs come in is wrong more than 5 % of the time. So the looks at one run directory
share the 5 %: what all of them spend is at most that (Bonferroni), however many runs each one adds, and however that is
decided.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ampcompare.runs.analysis.inference.effect import ERROR_RATE
from ampcompare.runs.records.comparison import Look

__all__ = ["Design", "changed_terms", "changes_sentence", "error_rate_of_next", "look_sentences"]

FIRST_SHARE = 0.8
# Of several planned looks. The pairs that are added follow from the spread so far, which then looks a bit too small at
# the end: with all of the 5 %, 5.4 % of equal arms had a winner in two looks.
PLANNED_SHARE = 0.9
MAX_NAMED = 5


@dataclass(frozen=True)
class Design:
    """The error rates at which a comparison is tested, and the notes about them.

    Attributes:
        error_rate: of each claim over all arms; 0 tests nothing.
        next_error_rate: of the look after this one.
        pilot: seeds whose spread determined the number of seeds.
        look: its number among `looks`; None where looks are not counted.
        looks: all looks at the run directory, this one included.
        warnings: the first sentences of the headline.
        notes: the last details.
    """

    error_rate: float = ERROR_RATE
    next_error_rate: float = ERROR_RATE
    pilot: frozenset[int] = frozenset()
    look: int | None = None
    looks: tuple[Look, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def error_rate_of_next(looks: Sequence[Look], planned: int | None) -> float:
    """Return what the look after these may spend; all together spend at most `ERROR_RATE`.

    Left open, the first look spends 80 % of it, since most comparisons are looked at once, and each later one half of
    what is left. A single planned look spends all; of several the last spends most, by the square of the share of looks
    that are done.

    Source: error spending of the power family (Kim and DeMets 1987).
    """
    spent = [look.error_rate for look in looks if look.number]
    number, left = len(spent) + 1, max(0.0, ERROR_RATE - math.fsum(spent))
    if planned is None:
        return left / 2 if spent else FIRST_SHARE * ERROR_RATE
    if number > planned:
        return 0.0
    share = PLANNED_SHARE if planned > 1 else 1.0
    return min(left, share * ERROR_RATE * (number**2 - (number - 1) ** 2) / planned**2)


def changed_terms(look: Look, others: Sequence[Look], left_out: Sequence[int] = ()) -> list[str]:
    """Return which choices were changed after runs were seen, in words.

    Args:
        others: the other looks at the same run directory. The reference of one at a single arm, which compared
            nothing, does not count.
        left_out: seeds of which the run directory holds runs that this look does not use.
    """
    words = []
    mine = _terms(look)
    for name, value in mine.items():
        earlier = [_terms(other)[name] for other in others if name != "reference" or len(other.arms) > 1]
        different = list(dict.fromkeys(term for term in earlier if term != value))
        if different:
            words.append(f"{name} {value} instead of {_named(different)}")
    again = [
        cell for cell, digest in look.cells.items() if any(other.cells.get(cell, digest) != digest for other in others)
    ]
    if again:
        words.append(f"ran again: {_named(again)}")
    seeds = sorted({seed for other in others for seed in other.seeds}.union(left_out).difference(look.seeds))
    if seeds:
        words.append(f"left out: seed{'s' if len(seeds) > 1 else ''} {_named([str(seed) for seed in seeds])}")
    arms = [arm for other in others for arm in other.arms if arm not in look.arms]
    if arms:
        words.append(f"left out: {_named(list(dict.fromkeys(arms)))}")
    return words


def changes_sentence(changes: Sequence[str]) -> list[str]:
    """Return the warning that terms were changed, which stands above every claim; none without changes."""
    return [f"Changed after runs were seen: {'; '.join(changes)}."] if changes else []


def _terms(look: Look) -> dict[str, str]:
    return {
        "margin": look.margin if isinstance(look.margin, str) else f"{look.margin:g} {look.margin_unit}".strip(),
        "time margin": f"{100 * look.time_margin:g} %",
        "loss margin": f"{100 * look.loss_margin:g} %",
        "reference": look.reference,
        "seeds": "auto" if look.pilot else "given",
        "planned looks": "open" if look.planned is None else f"{look.planned}",
    }


def look_sentences(look: Look, looks: Sequence[Look], next_error_rate: float) -> list[str]:
    """Return which look this is and what it may spend, for the details."""
    if not look.number:
        return []
    before = [other for other in looks if other.number and other.number != look.number]
    level = f"Look {look.number} at these arms, tested at an error rate of {_percent(look.error_rate)}"
    if before:
        earlier = ", ".join(
            f"look {other.number} at {_percent(other.error_rate)} with {len(other.seeds)} seeds" for other in before
        )
        return [f"{level}; {earlier}. Together they spend at most {_percent(ERROR_RATE)}."]
    if next_error_rate > 0:
        return [f"{level}; the rest of {_percent(ERROR_RATE)} is kept for further looks."]
    return [f"{level}, the only one that was planned."]


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _named(items: Sequence[str]) -> str:
    return ", ".join([*items[:MAX_NAMED], *([f"{len(items) - MAX_NAMED} more"] if len(items) > MAX_NAMED else [])])
