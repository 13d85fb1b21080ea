"""Accuracy from pairs of runs: an effect on the metric and a verdict for each arm."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import sqrt

from ampcompare.analysis.inference.criteria import Criteria
from ampcompare.analysis.inference.effect import FLOAT32_STEP, Effect, paired, two_stage, unpaired
from ampcompare.analysis.inference.granularity import in_steps
from ampcompare.analysis.inference.looks import Design
from ampcompare.analysis.inference.margins import AccuracyMargin, margin_error, resolve_margin
from ampcompare.analysis.inference.verdict import Verdict, decide
from ampcompare.analysis.runs.comparability import accuracy_reason
from ampcompare.analysis.runs.identity import IDENTICAL, identical
from ampcompare.analysis.runs.learning import NO_VERDICT, idle_pairs, idle_verdict, no_number, no_ratio
from ampcompare.analysis.runs.pairs import Pair, divergence_verdict, pairs_by_seed
from ampcompare.analysis.runs.scores import has_score, metric_of, spread_floor, step_of, step_of_scores
from ampcompare.analysis.runs.script_pairs import began_apart
from ampcompare.records.metric import Metric
from ampcompare.records.run import RunRecord

__all__ = ["accuracy_effect", "accuracy_effects", "accuracy_margin", "accuracy_verdicts", "failure_verdict"]


def accuracy_margin(records: Sequence[RunRecord], reference: str, terms: Criteria, metric: Metric) -> AccuracyMargin:
    """Return the margin of the metric that the rule gives for the runs of the reference.

    Raises:
        ConfigError: the rule does not apply to this metric.
    """
    runs = [record for record in records if record.status == "completed" and record.summary.epochs]
    values = [value for run in runs if has_score(value := run.summary.metric_final, metric)]
    return resolve_margin(
        terms.rule,
        [metric.factor * value for value in values],
        metric=metric,
        resolution=_resolution(metric, runs, values),
        reference=reference,
    )


def _resolution(metric: Metric, runs: Sequence[RunRecord], values: Sequence[float]) -> float:
    """Return the least difference of two values, in the unit of shown differences."""
    step = step_of_scores(step_of(runs), metric, values)
    if metric.difference != "points":
        return 100 * max(FLOAT32_STEP, step)
    if metric.counts:
        return metric.factor * (step or 1.0)
    return metric.factor * max(FLOAT32_STEP * max(map(abs, values), default=1.0), step)


def accuracy_effect(pairs: Sequence[Pair], error_share: float = 0.0, pilot: Collection[int] = ()) -> Effect | None:
    """Return the effect on the scores of the metric: positive where the arm is better.

    Args:
        error_share: share of the reference's errors that the margin is, where it moves with them.
        pilot: seeds whose spread determined the number of pairs, if any: the test then uses their spread.
    """
    metric = metric_of([reference for _, reference in pairs])
    whole = [
        (metric.score(here), metric.score(there), arm.summary.epochs[-1].samples, arm.config.recipe.seed)
        for arm, reference in pairs
        if has_score(here := arm.summary.metric_final, metric)
        and has_score(there := reference.summary.metric_final, metric)
        and arm.summary.epochs
    ]
    if not whole:
        return None
    arm, reference = [here for here, *_ in whole], [there for _, there, *_ in whole]
    samples = min(samples for _, _, samples, _ in whole)
    runs = [run for pair in pairs for run in pair]
    values = [value for run in runs if has_score(value := run.summary.metric_final, metric)]
    step = step_of_scores(step_of(runs), metric, values)
    floor = spread_floor(metric, samples, [*arm, *reference], step)
    if not pilot:
        if any(began_apart(*pair) for pair in pairs):
            return unpaired(arm, reference, floor, rounded=True)
        effect = paired(arm, reference, floor, rounded=True)
        moved = margin_error(arm, reference, error_share) if metric.counts else None
        return replace(effect, margin_error=moved, step=step) if metric.counts else in_steps(effect, step)
    early = [seed in pilot for *_, seed in whole]
    if not any(early):
        return None
    effect = two_stage(arm, reference, early, floor, rounded=True)
    if not metric.counts:
        return in_steps(effect, step)
    first_arm, first_reference = (
        [value for value, is_early in zip(side, early, strict=True) if is_early] for side in (arm, reference)
    )
    moved = margin_error(first_arm, first_reference, error_share) * sqrt(sum(early) / len(early))
    return replace(effect, margin_error=moved, step=step)


def accuracy_verdicts(
    arms: Mapping[str, tuple[Sequence[RunRecord], Sequence[Pair]]],
    margin: AccuracyMargin,
    design: Design,
    *,
    same_software: bool = True,
) -> dict[str, Verdict]:
    """Return the verdict of each arm; one that needs no test has no interval and takes no share of the error rate."""
    words = {arm: _untested(records, pairs, same_software) for arm, (records, pairs) in arms.items()}
    untested = {arm: Verdict(word) for arm, word in words.items() if word}
    tested = [arm for arm in arms if arm not in untested]
    effects = [accuracy_effect(arms[arm][1], margin.error_share, design.pilot) for arm in tested]
    verdicts = decide(effects, margin.of_scores(), design.error_rate, design.next_error_rate)
    return {**untested, **dict(zip(tested, verdicts, strict=True))}


def failure_verdict(records: Sequence[RunRecord]) -> str:
    """Return the verdict that an arm has by itself, also for the reference: diverged or learned nothing; "" if
    neither."""
    return divergence_verdict(records) or idle_verdict(records)


def _untested(records: Sequence[RunRecord], pairs: Sequence[Pair], same_software: bool) -> str:
    """Return the verdict of an arm that needs no test: why it cannot be judged, or that it is identical."""
    differs = accuracy_reason(pairs, same_software=same_software)
    return (
        divergence_verdict(records)
        or (f"not comparable ({differs})" if differs else "")
        or no_ratio([*records, *(reference for _, reference in pairs)])
        or idle_verdict(records)
        or (NO_VERDICT if idle_verdict([reference for _, reference in pairs]) else "")
        or no_number(pairs)
        or idle_pairs(pairs)
        or (IDENTICAL if identical(pairs) else "")
    )


def accuracy_effects(
    records: Sequence[RunRecord], arms: Sequence[str], reference: str, error_share: float = 0.0
) -> dict[str, Effect]:
    """Return the effect on the scores of every arm that has pairs with the reference."""
    theirs = [record for record in records if record.arm == reference]
    found = {
        arm: accuracy_effect(pairs_by_seed([record for record in records if record.arm == arm], theirs), error_share)
        for arm in arms
        if arm != reference
    }
    return {arm: effect for arm, effect in found.items() if effect is not None}
