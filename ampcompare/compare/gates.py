"""Limits that a comparison must keep, for continuous integration: each is checked for each arm."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ampcompare.compare.comparable import why_not_accuracy, why_not_time
from ampcompare.compare.validity import why_invalid
from ampcompare.comparison import ArmSummary, Comparison
from ampcompare.errors import ConfigError
from ampcompare.record import RunRecord
from ampcompare.report.junit import Check

__all__ = ["Gate", "check_gates", "parse_gate"]

GRAMMAR = re.compile(r"(accuracy|time|memory|diverged|failed)\s*([<>])\s*([-+]?\d+(?:\.\d+)?)\s*(x|%)?")
EXAMPLES = '"accuracy<-0.5" (points), "time>1.10x", "memory>5%", "diverged>0" or "failed>0"'
RATIOS = ("time", "memory")
Measured = tuple[float | None, str]  # a value, or why there is none


@dataclass(frozen=True)
class Gate:
    """A condition under which an arm fails.

    Attributes:
        text: as the user wrote it.
        measure: accuracy (points of difference), time or memory (ratio), diverged or failed (runs).
        above: whether it fails above the limit or below it.
        limit: in the unit of the measure.
    """

    text: str
    measure: str
    above: bool
    limit: float

    def fails(self, value: float) -> bool:
        """Tell whether a value is past the limit."""
        return value > self.limit if self.above else value < self.limit


def parse_gate(text: str) -> Gate:
    """Read a gate such as `accuracy<-0.5` or `time>1.10x`; a percentage of time or memory is one more than the ratio 1.

    Raises:
        ConfigError: it cannot be read, or has a unit that its measure does not have.
    """
    match = GRAMMAR.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"--fail-on {text!r} cannot be read; write {EXAMPLES}")
    measure, sign, number, unit = match.groups()
    if (unit is not None) != (measure in RATIOS):
        raise ConfigError(f"--fail-on {text!r}: {measure} has {'a ratio' if measure in RATIOS else 'a plain number'}, "
                          f"as in {EXAMPLES}")  # fmt: skip
    limit = float(number)
    return Gate(text.strip(), measure, sign == ">", 1 + limit / 100 if unit == "%" else limit)


def check_gates(gates: Sequence[Gate], comparison: Comparison, baseline: Comparison | None = None) -> list[Check]:
    """Check every gate for every arm: against the same arm of a baseline, or else against the reference.

    A gate looks at the mean, not at a verdict: it is the user's limit. What cannot be measured because a run failed or
    diverged fails; a time that is invalid or from another machine is left out, with the reason.

    Raises:
        ConfigError: the baseline has none of the arms.
    """
    if baseline is not None and not {row.arm for row in baseline.arms} & {row.arm for row in comparison.arms}:
        raise ConfigError(
            f"the baseline has none of these arms; it has {', '.join(row.arm for row in baseline.arms[:10])}"
        )
    checks = []
    for row in comparison.arms:
        base = _base(row, comparison, baseline)
        for gate in gates:
            if base is None and gate.measure not in ("diverged", "failed"):
                if baseline is not None:
                    checks.append(Check(row.arm, gate.text, skipped="the baseline has no such arm"))
                continue
            value, why = _value(gate, row, comparison, base or [])
            if value is not None:
                words = f"{gate.measure} {_shown(gate, value)}, and {gate.text} fails"
                checks.append(Check(row.arm, gate.text, failure=words if gate.fails(value) else ""))
            elif gate.measure == "time" and row.completed:
                checks.append(Check(row.arm, gate.text, skipped=why))
            else:
                checks.append(Check(row.arm, gate.text, failure=f"{gate.measure} is not known: {why}"))
    return checks


def _base(row: ArmSummary, comparison: Comparison, baseline: Comparison | None) -> list[RunRecord] | None:
    """Return the runs that an arm is held against; None where there are none to hold it against."""
    if baseline is None:
        arm = comparison.reference
        return None if row.arm == arm else [record for record in comparison.records if record.arm == arm]
    if row.arm not in {other.arm for other in baseline.arms}:
        return None
    return [record for record in baseline.records if record.arm == row.arm]


def _value(gate: Gate, row: ArmSummary, comparison: Comparison, base: Sequence[RunRecord]) -> Measured:
    if gate.measure == "diverged":
        return row.diverged, ""
    if gate.measure == "failed":
        return row.failed, ""
    mine = [record for record in comparison.records if record.arm == row.arm and record.status == "completed"]
    theirs = [record for record in base if record.status == "completed"]
    if not mine or not theirs:
        return None, f"no run of {'the arm' if not mine else 'what it is held against'} was completed"
    seeds = {record.config.recipe.seed for record in mine} & {record.config.recipe.seed for record in theirs}
    if seeds:
        mine = [record for record in mine if record.config.recipe.seed in seeds]
        theirs = [record for record in theirs if record.config.recipe.seed in seeds]
    apart = why_not_accuracy(mine[0], theirs[0])
    if apart and gate.measure != "time":
        return None, f"not comparable ({apart})"
    if gate.measure == "accuracy":
        return _points(mine, theirs)
    return _time(mine, theirs) if gate.measure == "time" else _memory(mine, theirs)


def _points(mine: Sequence[RunRecord], theirs: Sequence[RunRecord]) -> Measured:
    here = [value for record in mine if (value := record.summary.top1_final) is not None]
    there = [value for record in theirs if (value := record.summary.top1_final) is not None]
    if not here or not there:
        return None, "it was not evaluated"
    return 100 * (statistics.fmean(here) - statistics.fmean(there)), ""


def _time(mine: Sequence[RunRecord], theirs: Sequence[RunRecord]) -> Measured:
    apart = why_not_time(mine[0], theirs[0])
    if apart:
        return None, f"not comparable ({apart})"
    here = [record.summary.step_seconds_median for record in mine if not why_invalid(record)]
    there = [record.summary.step_seconds_median for record in theirs if not why_invalid(record)]
    if not any(here) or not any(there):
        return None, f"invalid measurement ({next(filter(None, map(why_invalid, [*mine, *theirs])), 'no times')})"
    return statistics.geometric_mean(filter(None, here)) / statistics.geometric_mean(filter(None, there)), ""


def _memory(mine: Sequence[RunRecord], theirs: Sequence[RunRecord]) -> Measured:
    here = max((record.summary.peak_bytes or 0 for record in mine), default=0)
    there = max((record.summary.peak_bytes or 0 for record in theirs), default=0)
    return (here / there, "") if here and there else (None, "it was not measured")


def _shown(gate: Gate, value: float) -> str:
    if gate.measure == "accuracy":
        return f"{value:+.2f} points"
    return f"{value:.3f}x" if gate.measure in RATIOS else f"{value:g}"
