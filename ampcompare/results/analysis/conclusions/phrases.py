"""Names of arms, differences and shares, as written in sentences."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ampcompare.results.records.metric import Metric

__all__ = ["Quality", "count_of", "names_of", "sentence_start", "with_verb"]

MAX_NAMED = 4
MAX_LEFT = 2
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


@dataclass(frozen=True)
class Quality:
    """How the metric of a comparison and its differences are written in sentences."""

    metric: Metric

    @property
    def name(self) -> str:
        """What is kept or lost: accuracy, or the name of another metric."""
        return self.metric.quality

    @property
    def unit(self) -> str:
        """After a difference, with its space; "" if there is none."""
        unit = self.metric.difference_unit
        return f" {unit}" if unit else ""

    def signed(self, difference: float) -> str:
        """Return a difference without its unit, such as +0.09."""
        return self.metric.signed(difference)

    def with_unit(self, difference: float) -> str:
        """Return a difference with its unit, such as `+0.09 pp`."""
        return f"{self.signed(difference)}{self.unit}"


def names_of(arms: Sequence[str], everyone: Sequence[str] = (), said: Collection[str] = ()) -> str:
    """Return arms as the subject of a sentence: `a`, `a and b`, `a, b, c and 4 more`, or of many what they are.

    Which is `all five arms`, `all but a`, and `the other five arms` after sentences on all the others.

    Args:
        everyone: the arms that there are besides the reference; with none, all are named up to the limit.
        said: arms of which sentences before have said something. They are not in `all but a`, which denies it of `a`.
    """
    if group := _group_of(arms, everyone, said):
        return group
    if len(arms) > MAX_NAMED:
        arms = [*arms[: MAX_NAMED - 1], f"{len(arms) - MAX_NAMED + 1} more"]
    *first, last = arms
    return f"{', '.join(first)} and {last}" if first else last


def _group_of(arms: Sequence[str], everyone: Sequence[str], said: Collection[str]) -> str:
    """Return what many arms are among all; "" where they are to be named."""
    if len(arms) > 2 and set(arms) == set(everyone):
        return f"all {count_of(len(arms))} arms"
    left = [arm for arm in everyone if arm not in arms]
    if len(arms) > MAX_NAMED and left:
        if set(left) <= set(said):
            return f"the other {count_of(len(arms))} arms"
        if len(left) <= MAX_LEFT and not set(left) & set(said):
            return f"all but {names_of(left)}"
    return ""


def with_verb(
    arms: Sequence[str], everyone: Sequence[str], one: str, several: str, *, said: Collection[str] = ()
) -> str:
    """Return arms with a verb in the right number, as the beginning of a sentence."""
    group = _group_of(arms, everyone, said)
    subject = f"{group[0].upper()}{group[1:]}" if group else names_of(arms)
    return f"{subject} {one if len(arms) == 1 else several}"


def sentence_start(words: str) -> str:
    """Return words with a capital letter, unless a later letter is one, as in mAP."""
    return words if any(letter.isupper() for letter in words) else words[:1].upper() + words[1:]


def count_of(number: int) -> str:
    """Return a small number as a word."""
    return NUMBERS[number] if 0 < number < len(NUMBERS) else str(number)
