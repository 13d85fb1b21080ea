"""Thresholds for continuous integration, checked for each arm of a comparison."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ampcompare.analysis.comparability import accuracy_incomparable_reason, time_incomparable_reason
from ampcompare.analysis.learning import idle_verdict
from ampcompare.analysis.time_validity import invalid_reason
from ampcompare.errors import ConfigError
from ampcompare.records.comparison import ArmSummary, Comparison
from ampcompare.records.run import RunRecord

__all__ = ["Check", "Gate", "check_gates", "parse_gate"]

GRAMMAR = re.compile(r"(accuracy|time|memory|diverged|failed)\s*([<>])\s*([-+]?\d+(?:\.\d+)?)\s*(x|%)?")
EXAMPLES = '"accuracy<-0.5" (points), "time>1.10x", "memory>5%", "diverged>0" or "failed>0"'
RATIOS = ("time", "memory")
Measured = tuple[float | None, str]  # a value, or why there is none


@dataclass(frozen=True)
class Check:
    """The outcome of a gate for one arm.

    Attributes:
        failure: what was seen; "" if the gate passed.
        skipped: why it could not be checked; "" if it was.
    """

    arm: str
    gate: str
    failure: str = ""
    skipped: str = ""


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
        """Return whether a value exceeds the limit."""
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

    A gate compares means and ignores verdicts, since the limit is the user's. What cannot be measured because a run
    failed or diverged fails; a time that is invalid or from another machine is skipped, with the reason.

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
                exceeded = f"{gate.measure} {_shown(gate, value)}, and {gate.text} fails"
                checks.append(Check(row.arm, gate.text, failure=exceeded if gate.fails(value) else ""))
            elif gate.measure == "time" and row.completed:
                checks.append(Check(row.arm, gate.text, skipped=why))
            else:
                checks.append(Check(row.arm, gate.text, failure=f"{gate.measure} is unknown: {why}"))
    return checks


def _base(row: ArmSummary, comparison: Comparison, baseline: Comparison | None) -> list[RunRecord] | None:
    """Return the runs that an arm is compared with, if any."""
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
    runs = [record for record in comparison.records if record.arm == row.arm and record.status == "completed"]
    base_runs = [record for record in base if record.status == "completed"]
    if not runs or not base_runs:
        return None, f"no run of {'the arm' if not runs else 'the baseline'} was completed"
    seeds = {record.config.recipe.seed for record in runs} & {record.config.recipe.seed for record in base_runs}
    if seeds:  # paired where possible; a baseline of other seeds is still a baseline
        runs = [record for record in runs if record.config.recipe.seed in seeds]
        base_runs = [record for record in base_runs if record.config.recipe.seed in seeds]
    reason = accuracy_incomparable_reason(runs[0], base_runs[0])
    if reason and gate.measure != "time":
        return None, f"not comparable ({reason})"
    if gate.measure == "accuracy":
        idle = idle_verdict(runs) or idle_verdict(base_runs)
        if idle:
            return None, idle
        return _points(runs, base_runs)
    return _time(runs, base_runs) if gate.measure == "time" else _memory(runs, base_runs)


def _points(runs: Sequence[RunRecord], base_runs: Sequence[RunRecord]) -> Measured:
    top1 = [value for record in runs if (value := record.summary.top1_final) is not None]
    base_top1 = [value for record in base_runs if (value := record.summary.top1_final) is not None]
    if not top1 or not base_top1:
        return None, "it was not evaluated"
    return 100 * (statistics.fmean(top1) - statistics.fmean(base_top1)), ""


def _time(runs: Sequence[RunRecord], base_runs: Sequence[RunRecord]) -> Measured:
    reason = time_incomparable_reason(runs[0], base_runs[0])
    if reason:
        return None, f"not comparable ({reason})"
    seconds = [record.summary.step_seconds_median for record in runs if not invalid_reason(record)]
    base_seconds = [record.summary.step_seconds_median for record in base_runs if not invalid_reason(record)]
    if not any(seconds) or not any(base_seconds):
        invalid = next(filter(None, map(invalid_reason, [*runs, *base_runs])), "no times")
        return None, f"invalid measurement ({invalid})"
    return statistics.geometric_mean(filter(None, seconds)) / statistics.geometric_mean(filter(None, base_seconds)), ""


def _memory(runs: Sequence[RunRecord], base_runs: Sequence[RunRecord]) -> Measured:
    peak = max((record.summary.peak_bytes or 0 for record in runs), default=0)
    base_peak = max((record.summary.peak_bytes or 0 for record in base_runs), default=0)
    return (peak / base_peak, "") if peak and base_peak else (None, "it was not measured")


def _shown(gate: Gate, value: float) -> str:
    if gate.measure == "accuracy":
        return f"{value:+.2f} points"
    return f"{value:.3f}x" if gate.measure in RATIOS else f"{value:g}"
