"""Thresholds for continuous integration, checked for each arm of a comparison."""

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ampcompare.base.errors import ConfigError
from ampcompare.results.analysis.effects.quality import quality_margin
from ampcompare.results.analysis.effects.step_time import invalid_time_reason
from ampcompare.results.analysis.inference.terms import terms_of_comparison
from ampcompare.results.analysis.inference.verdict import SequentialDesign, verdicts_on
from ampcompare.results.analysis.pairing.comparability import (
    incomparable_memory_verdict,
    incomparable_quality_verdict,
    incomparable_time_verdict,
)
from ampcompare.results.analysis.pairing.learning import learned_nothing_verdict
from ampcompare.results.analysis.pairing.pairs import (
    Pairing,
    pairs_by_seed,
    pairs_by_seed_or_with_first,
    surviving_and_common_seed_counts,
)
from ampcompare.results.analysis.pairing.scores import final_metric_value
from ampcompare.results.analysis.summary import quantity_tests
from ampcompare.results.records.comparison import ArmSummary, Comparison, Quantity
from ampcompare.results.records.metric import TOP1, TOP5, Metric
from ampcompare.results.records.run import RunRecord
from ampcompare.results.records.verdict import KEPT, LOST, UNJUDGED, Kind, Verdict

NAME = r"[A-Za-z][^<>:]*?"
GRAMMAR = re.compile(rf"({NAME})\s*([<>])\s*([-+]?\d+(?:\.\d+)?)\s*(x|%)?")
VERDICT_GRAMMAR = re.compile(rf"({NAME})\s*:\s*(worse|inferior|non-inferior|not-inferior|equivalent|better)")
OLD_WORDS = {"inferior": "worse", "not-inferior": "non-inferior"}
RATIOS = ("time", "memory")
COUNTS = ("diverged", "failed")
TAIL_LOSS = "tail-loss"  # the training loss over the last fifth of the steps, which has verdicts only
# of verdicts; all other measures are metrics
QUANTITIES: dict[str, Quantity] = {"time": "time", TAIL_LOSS: "loss"}
ACCURACY, METRIC = "accuracy", "metric"  # the metric of verdicts: where it counts what is right, and any
CLASSIFICATION = (TOP1, TOP5)
EXAMPLES = (
    '"accuracy<-0.5" (points), "metric>1" (in its unit), "time>1.10x", "memory>5%", "diverged>0", "failed>0", or a '
    'verdict: "accuracy:non-inferior", "metric:worse", "time:better"'
)
# The verdicts that show what a gate asks for.
SHOWN_BY: dict[str, tuple[Kind, ...]] = {
    "non-inferior": KEPT,
    "equivalent": ("identical", "equivalent"),
    "better": ("better",),
}
UNKNOWN: tuple[Kind, ...] = ("", "no verdict", *UNJUDGED)
SAME_RUNS = "the baseline holds these same runs, so nothing has run since; choose another --output-dir"
Measured = tuple[float | None, str]  # a value, or why it is missing
Runs = Sequence[RunRecord]


@dataclass(frozen=True)
class GateOutcome:
    """The outcome of a gate for one arm: what was seen where it failed, or why it could not be checked."""

    arm: str
    gate: str
    failure: str = ""
    skipped: str = ""


@dataclass(frozen=True)
class Gate:
    """A condition under which an arm fails: a measure above, or below, a limit.

    That is a metric (difference, in the unit that is shown), time or memory (ratio), diverged or failed (runs).
    """

    text: str
    measure: str
    above: bool
    limit: float

    def is_failed_by(self, value: float) -> bool:
        """Return whether a value exceeds the limit."""
        return value > self.limit if self.above else value < self.limit


@dataclass(frozen=True)
class VerdictGate:
    """A verdict that an arm must have on the metric, time or tail-loss, or must not have.

    `worse` fails an arm that is shown to be worse, diverged or learned nothing, and is skipped where nothing could be
    compared. Every other word fails an arm for which it is not shown, so that too few seeds, an invalid time and a
    verdict on survivors alone fail too.
    """

    text: str
    measure: str
    word: str

    def is_failed_by(self, verdict: Verdict) -> bool:
        """Return whether an arm with this verdict fails."""
        return verdict.kind in LOST if self.word == "worse" else verdict.kind not in SHOWN_BY[self.word]


def parse_gate(text: str, metrics: Sequence[Metric] | None = CLASSIFICATION) -> Gate | VerdictGate:
    """Read a gate such as `accuracy<-0.5`, `time>1.10x` or `accuracy:non-inferior`.

    Args:
        text: as `--fail-on` has it.
        metrics: that runs will have; None where they are not known yet, and then `gate_outcomes` refuses other names.

    Raises:
        ConfigError: it cannot be read, has a unit that its measure does not have, or is about no such metric.
    """
    asked = VERDICT_GRAMMAR.fullmatch(text.strip())
    if asked is not None:
        measure, word = asked.groups()
        if measure in (*COUNTS, "memory"):
            raise ConfigError(f"--fail-on {text!r}: there is no verdict on {measure}; write {EXAMPLES}")
        if (
            metrics is not None
            and measure not in QUANTITIES
            and _metric_of_measure(measure, text, metrics) != metrics[0]
        ):
            raise ConfigError(
                f"--fail-on {text!r}: verdicts are about {metrics[0].name}, and {measure} has none"
            )
        return VerdictGate(text.strip(), measure, OLD_WORDS.get(word, word))
    match = GRAMMAR.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"--fail-on {text!r} cannot be read; write {EXAMPLES}")
    measure, sign, number, unit = match.groups()
    if measure == TAIL_LOSS:
        raise ConfigError(f'--fail-on {text!r}: {measure} has verdicts only, as in "{measure}:non-inferior"')
    if metrics is not None and measure not in (*RATIOS, *COUNTS):
        _metric_of_measure(measure, text, metrics)
    if (unit is not None) != (measure in RATIOS):
        raise ConfigError(f"--fail-on {text!r}: {measure} has {'a ratio' if measure in RATIOS else 'a plain number'}, "
                          f"as in {EXAMPLES}")  # fmt: skip
    limit = float(number)
    return Gate(text.strip(), measure, sign == ">", 1 + limit / 100 if unit == "%" else limit)


def _metric_of_measure(measure: str, text: str, metrics: Sequence[Metric]) -> Metric:
    """Return the metric that a gate is about."""
    first = metrics[0]
    if measure == METRIC or (measure == ACCURACY and first.has_errors):
        return first
    found = next((metric for metric in metrics if measure in (metric.name, metric.identifier)), None)
    if found is None:
        alias = [ACCURACY] if first.has_errors else []
        known = ", ".join([*alias, METRIC, *(metric.name for metric in metrics), *RATIOS, TAIL_LOSS, *COUNTS])
        raise ConfigError(
            f"--fail-on {text!r} cannot be read: nothing called {measure} is measured; write {known}, as in {EXAMPLES}"
        )
    return found


def gate_outcomes(
    gates: Sequence[Gate | VerdictGate], comparison: Comparison, baseline: Comparison | None = None
) -> list[GateOutcome]:
    """Check every gate for every arm: against the same arm of a baseline, or else against the reference.

    A limit is compared with means. What is not known because runs of the arm failed or diverged, or did other work,
    fails; times and memory of another machine, and times that are invalid, are skipped with the reason. A baseline may
    be of another version of torch, to show what it changes.

    Args:
        gates: as `parse_gate` returns them.
        comparison: whose arms are checked.
        baseline: an earlier comparison; None for none.

    Returns:
        For each arm a check of each gate: passed, failed or skipped. The reference has only those of counts.

    Raises:
        ConfigError: the baseline has none of the arms or another metric, or a gate is about something else.
    """
    metrics = comparison.records[0].metrics if comparison.records else [comparison.metric]
    for gate in gates:
        parse_gate(gate.text, metrics)
    if baseline is not None:
        _refuse_baseline_of_other_metric_or_arms(baseline, comparison)
    judged = {
        gate.measure: _verdicts_for_gate(gate.measure, comparison, baseline)
        for gate in gates
        if isinstance(gate, VerdictGate)
    }
    known = {_key_of_run(record) for record in baseline.records} if baseline is not None else set()
    checks = []
    for row in comparison.arms:
        base = _runs_to_compare_arm_with(row.arm, comparison, baseline)
        runs = [record for record in comparison.records if record.arm == row.arm]
        is_itself = any(run[1] is not None and run in known for run in map(_key_of_run, runs))
        for gate in gates:
            if gate.measure in COUNTS or not (is_itself or base is None):
                if isinstance(gate, VerdictGate):
                    verdict = judged[gate.measure].get(row.arm, Verdict())
                    checks.append(_gate_outcome_of_verdict(gate, row.arm, verdict))
                else:
                    is_metric = gate.measure not in (*RATIOS, *COUNTS)
                    metric = _metric_of_measure(gate.measure, gate.text, metrics) if is_metric else None
                    same = baseline is None
                    checks.append(
                        _gate_outcome_of_limit(gate, metric, row, runs, base or [], same_software=same)
                    )
            elif is_itself:
                failure = f"{gate.measure} is unknown: {SAME_RUNS}"
                checks.append(GateOutcome(row.arm, gate.text, failure=failure))
            elif baseline is not None:  # else the arm is the reference itself
                checks.append(GateOutcome(row.arm, gate.text, skipped="the baseline has no such arm"))
    return checks


def _refuse_baseline_of_other_metric_or_arms(baseline: Comparison, comparison: Comparison) -> None:
    """Refuse a baseline of another metric, or of other arms only."""
    if baseline.metric.name != comparison.metric.name:
        raise ConfigError(
            f"the baseline is measured by {baseline.metric.name}, and this comparison by {comparison.metric.name}"
        )
    arms = [row.arm for row in baseline.arms]
    if not set(arms) & {row.arm for row in comparison.arms}:
        raise ConfigError(f"the baseline has none of these arms; it has {', '.join(arms[:10])}")


def _runs_to_compare_arm_with(
    arm: str, comparison: Comparison, baseline: Comparison | None
) -> list[RunRecord] | None:
    """Return the runs that an arm is compared with, if any."""
    if baseline is None:
        reference = comparison.reference
        return (
            None if arm == reference else [record for record in comparison.records if record.arm == reference]
        )
    if arm not in {other.arm for other in baseline.arms}:
        return None
    return [record for record in baseline.records if record.arm == arm]


def _verdicts_for_gate(
    measure: str, comparison: Comparison, baseline: Comparison | None
) -> dict[str, Verdict]:
    """Return the verdict of each arm on what a gate is about: its own, or against its runs in a baseline."""
    by_arm, name = comparison.by_arm(), QUANTITIES.get(measure, "quality")
    if baseline is None:
        return {row.arm: row.verdict(name) for row in comparison.arms}
    terms = terms_of_comparison(comparison)
    design = SequentialDesign(
        comparison.error_rate, comparison.error_rate
    )  # that of the look: a baseline is not a second chance
    pairings = {
        row.arm: Pairing.by_seed(by_arm[row.arm], base, same_software=False)
        for row in comparison.arms
        if (base := _runs_to_compare_arm_with(row.arm, comparison, baseline)) is not None
    }
    theirs = [run for run in baseline.records if run.arm == comparison.reference]
    margin = quality_margin(theirs, comparison.reference, terms, comparison.metric)
    test = quantity_tests(margin, terms, design)[name]
    evidence = {arm: test.evidence(pairing) for arm, pairing in pairings.items()}
    return verdicts_on(evidence, test.margin, design)


def _gate_outcome_of_verdict(gate: VerdictGate, arm: str, verdict: Verdict) -> GateOutcome:
    words = f"{gate.measure} {verdict or 'has no verdict'}"
    if gate.is_failed_by(verdict):
        return GateOutcome(arm, gate.text, failure=f"{words}, and {gate.text} fails")
    return GateOutcome(
        arm, gate.text, skipped=words if gate.word == "worse" and verdict.kind in UNKNOWN else ""
    )


def _gate_outcome_of_limit(
    gate: Gate, metric: Metric | None, row: ArmSummary, runs: Runs, base: Runs, *, same_software: bool
) -> GateOutcome:
    value: float | None = row.diverged if gate.measure == "diverged" else row.failed
    why, may_skip = "", False
    if gate.measure not in COUNTS:
        value, why, may_skip = _gate_value_reason_and_is_skipped(
            gate.measure, metric, runs, base, same_software=same_software
        )
    if value is not None:
        exceeded = f"{_gate_value_text(gate, metric, value)}, and {gate.text} fails"
        return GateOutcome(row.arm, gate.text, failure=exceeded if gate.is_failed_by(value) else "")
    if may_skip:
        return GateOutcome(row.arm, gate.text, skipped=why)
    return GateOutcome(row.arm, gate.text, failure=f"{gate.measure} is unknown: {why}")


def _gate_value_reason_and_is_skipped(
    measure: str, metric: Metric | None, runs: Runs, base: Runs, *, same_software: bool
) -> tuple[float | None, str, bool]:
    """Return the difference or ratio of an arm to its base, or why there is none and whether the gate is skipped."""
    here, there = ([run for run in side if run.status == "completed"] for side in (runs, base))
    if not here or not there:
        return None, f"no run of {'the arm' if not here else 'the baseline'} was completed", False
    if metric and len(here) < len(runs):
        return None, f"it is conditional on the {len(here)} of {len(runs)} runs that were completed", False
    if metric and (survivors := surviving_and_common_seed_counts(runs, base)):
        share = "{} of {} seeds".format(*survivors)
        return (
            None,
            f"it is conditional on {share}, of which the others were not completed on the other side",
            False,
        )
    # by seed where possible; a baseline of other seeds is still a baseline
    pairs = pairs_by_seed_or_with_first(here, there)
    if pairs_by_seed(here, there):
        here, there = [arm for arm, _ in pairs], [other for _, other in pairs]
    pairing = Pairing(here, there, pairs, same_software)
    work = incomparable_quality_verdict(pairing)
    if work and measure != "time":
        return None, str(work), False
    if metric:
        idle = learned_nothing_verdict(here) or learned_nothing_verdict(there)
        return (None, str(idle), False) if idle else (*_measure_metric_difference(metric, here, there), False)
    incomparable = incomparable_time_verdict if measure == "time" else incomparable_memory_verdict
    if verdict := incomparable(pairing):
        return None, str(verdict), True
    return (
        (*_measure_time_ratio(here, there), True)
        if measure == "time"
        else (*_measure_memory_ratio(here, there), False)
    )


def _key_of_run(record: RunRecord) -> tuple[str, str | None, float | None]:
    """Return what tells a run from another run of its cell; older records lack the start."""
    return record.cell, record.started, record.summary.wall_seconds


def _measure_metric_difference(
    metric: Metric, runs: Sequence[RunRecord], base_runs: Sequence[RunRecord]
) -> Measured:

    def values_of_side(side: Sequence[RunRecord]) -> list[float]:
        return [
            value for value in (final_metric_value(run, metric.name) for run in side) if value is not None
        ]

    here, there = values_of_side(runs), values_of_side(base_runs)
    if not here or not there:
        return None, "it was not evaluated"
    difference = metric.difference_in_shown_unit(
        metric.difference_from_reference(statistics.fmean(here), statistics.fmean(there))
    )
    return (difference, "") if math.isfinite(difference) else (None, "it is not a number in some runs")


def _measure_time_ratio(runs: Sequence[RunRecord], base_runs: Sequence[RunRecord]) -> Measured:

    def seconds_of_side(side: Sequence[RunRecord]) -> list[float]:
        valid = [run.summary.step_seconds_median for run in side if not invalid_time_reason(run)]
        return [value for value in valid if value]

    here, there = seconds_of_side(runs), seconds_of_side(base_runs)
    if here and there:
        return statistics.geometric_mean(here) / statistics.geometric_mean(there), ""
    invalid = next(filter(None, map(invalid_time_reason, [*runs, *base_runs])), "no times")
    return None, str(Verdict(kind="invalid", why=invalid))


def _measure_memory_ratio(runs: Sequence[RunRecord], base_runs: Sequence[RunRecord]) -> Measured:
    here, there = (max(run.summary.peak_bytes or 0 for run in side) for side in (runs, base_runs))
    return (here / there, "") if here and there else (None, "it was not measured")


def _gate_value_text(gate: Gate, metric: Metric | None, value: float) -> str:
    if metric is None:
        return f"{gate.measure} {value:.3f}x" if gate.measure in RATIOS else f"{gate.measure} {value:g}"
    difference = metric.signed_shown_difference_text_without_unit(value)
    if gate.measure == ACCURACY:
        return f"{gate.measure} {difference} points"
    return f"{metric.name} {difference} {metric.difference_unit}".rstrip()
