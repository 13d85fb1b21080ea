"""Quality from pairs of runs: an effect on the metric and a verdict for each arm."""

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from math import sqrt

from ampcompare.results.analysis.inference.effect import (
    ERROR_RATE,
    FLOAT32_STEP,
    Effect,
    interval_if_testable,
    paired_effect,
    two_stage_effect,
    unpaired_effect,
    values_of_pilot,
)
from ampcompare.results.analysis.inference.terms import (
    QualityMargin,
    Terms,
    resolve_margin,
    standard_error_for_relative_margin,
)
from ampcompare.results.analysis.inference.verdict import Evidence
from ampcompare.results.analysis.pairing.comparability import start_difference_reason
from ampcompare.results.analysis.pairing.declared import not_as_declared_verdict
from ampcompare.results.analysis.pairing.learning import (
    learned_nothing_verdict,
    metric_without_ratio_verdict,
    nan_metric_verdict,
    pairs_learned_nothing_verdict,
    unjudgeable_quality_verdict,
)
from ampcompare.results.analysis.pairing.pairs import (
    IDENTICAL,
    Pair,
    Pairing,
    are_pairs_identical,
    divergence_verdict,
    pairs_by_seed,
)
from ampcompare.results.analysis.pairing.scores import (
    effect_in_spacings,
    is_score,
    least_plausible_spread_of_scores,
    metric_of_runs,
    spacing_of_final_values,
    spacing_of_scores,
)
from ampcompare.results.records.evaluation import PrecisionResult, PrecisionRow
from ampcompare.results.records.metric import Metric
from ampcompare.results.records.run import RunRecord
from ampcompare.results.records.verdict import Verdict


def quality_margin(
    records: Sequence[RunRecord], reference: str, terms: Terms, metric: Metric
) -> QualityMargin:
    """Return the margin of the metric that the rule gives for the runs of the reference.

    Args:
        records: of the reference; only completed runs with an evaluation count.
        reference: its arm as text, for messages.
        terms: whose `rule` gives the margin.
        metric: that is compared.

    Raises:
        ConfigError: the rule does not fit the metric.
    """
    runs = [record for record in records if record.status == "completed" and record.summary.epochs]
    values = [value for run in runs if is_score(value := run.summary.metric_final, metric)]
    return resolve_margin(
        terms.margin_rule,
        [metric.factor * value for value in values],
        metric=metric,
        resolution=_resolution_of_metric_differences(metric, runs, values),
        reference=reference,
    )


def _resolution_of_metric_differences(
    metric: Metric, runs: Sequence[RunRecord], values: Sequence[float]
) -> float:
    """Return the least difference of two values, in the unit of shown differences."""
    step = spacing_of_scores(spacing_of_final_values(runs), metric, values)
    if metric.difference != "points":
        return 100 * max(FLOAT32_STEP, step)
    if metric.is_count:
        return metric.factor * (step or 1.0)
    return metric.factor * max(FLOAT32_STEP * max(map(abs, values), default=1.0), step)


def quality_effect(
    pairs: Sequence[Pair], error_share: float = 0.0, pilot: Collection[int] = ()
) -> Effect | None:
    """Return the effect on the scores of the metric: positive where the arm is better.

    Args:
        error_share: share of the reference's errors that the margin is, where it moves with them.
        pilot: seeds whose spread determined the number of pairs, if any: the test then uses their spread.
    """
    metric = metric_of_runs([reference for _, reference in pairs])
    arm: list[float] = []
    reference: list[float] = []
    samples: list[int] = []
    seeds: list[int] = []
    for run, other in pairs:
        here, there = run.summary.metric_final, other.summary.metric_final
        if is_score(here, metric) and is_score(there, metric) and run.summary.epochs:
            arm.append(metric.score(here))
            reference.append(metric.score(there))
            samples.append(run.summary.epochs[-1].samples)
            seeds.append(run.config.recipe.seed)
    if not arm:
        return None
    runs = [run for pair in pairs for run in pair]
    values = [value for run in runs if is_score(value := run.summary.metric_final, metric)]
    step = spacing_of_scores(spacing_of_final_values(runs), metric, values)
    floor = least_plausible_spread_of_scores(metric, min(samples), [*arm, *reference], step)
    early = [not pilot or seed in pilot for seed in seeds]
    if not pilot and any(start_difference_reason(*pair) for pair in pairs):
        return unpaired_effect(arm, reference, floor, is_rounded=True)
    if not any(early):
        return None
    effect = two_stage_effect(arm, reference, early, floor, is_rounded=True)
    if not metric.is_count:
        return effect_in_spacings(effect, step)
    ours, theirs = values_of_pilot(arm, early), values_of_pilot(reference, early)
    moved = standard_error_for_relative_margin(ours, theirs, error_share) * sqrt(sum(early) / len(early))
    return replace(effect, margin_error=moved, step=step)


def quality_evidence(pairing: Pairing, margin: QualityMargin, pilot: Collection[int] = ()) -> Evidence:
    """Return what pairs say of the metric, and the verdict of an arm that needs no test."""
    pairs = pairing.pairs
    untested = (
        unjudgeable_quality_verdict(
            pairing, metric_without_ratio_verdict([*pairing.arm, *(reference for _, reference in pairs)])
        )
        or nan_metric_verdict(pairs)
        or pairs_learned_nothing_verdict(pairs)
        or (IDENTICAL if are_pairs_identical(pairs) else Verdict())
    )
    shown = quality_effect(pairs)
    effect = None if untested else quality_effect(pairs, margin.error_share, pilot)
    return Evidence(
        effect,
        untested,
        None if shown is None else shown.mean,
        survivors=pairing.surviving_and_common_seed_counts,
        updates=pairing.differing_mean_updates,
    )


def quality_evidence_of_reference(reference_pairing: Pairing) -> Evidence:
    """Return what runs of the reference say of the metric: no effect, and the verdict that it has by itself."""
    runs, effect = reference_pairing.arm, quality_effect(reference_pairing.pairs)
    verdict = not_as_declared_verdict(runs) or divergence_verdict(runs) or learned_nothing_verdict(runs)
    return Evidence(untested=verdict, mean=None if effect is None else effect.mean)


def quality_effects(
    records: Sequence[RunRecord], arms: Sequence[str], reference: str, error_share: float = 0.0
) -> dict[str, Effect]:
    """Return the effect on the scores of every arm that has pairs with the reference.

    Args:
        records: of all arms.
        arms: their texts; the reference among them is left out.
        reference: the text of the arm that others are compared with.
        error_share: share of the reference's errors that the margin is, where it moves with them; 0 elsewhere.
    """
    theirs = [record for record in records if record.arm == reference]
    found = {
        arm: quality_effect(
            pairs_by_seed([record for record in records if record.arm == arm], theirs), error_share
        )
        for arm in arms
        if arm != reference
    }
    return {arm: effect for arm, effect in found.items() if effect is not None}


def evaluation_precision_rows(
    by_arm: Mapping[str, Sequence[RunRecord]], metric: Metric
) -> list[PrecisionRow]:
    """Return a row for each arm and precision that its completed runs were evaluated in, each run a pair."""
    found: dict[tuple[str, bool, str], list[tuple[RunRecord, PrecisionResult]]] = {}
    for arm, records in by_arm.items():
        for record in records:
            if record.status != "completed":
                continue
            for result in record.summary.in_precisions:
                found.setdefault((arm, result.averaged, result.precision), []).append((record, result))
    return [_evaluation_precision_row(arm, evaluated, metric) for (arm, *_), evaluated in found.items()]


def _evaluation_precision_row(
    arm: str, evaluated_runs: Sequence[tuple[RunRecord, PrecisionResult]], metric: Metric
) -> PrecisionRow:
    _, first = evaluated_runs[0]
    measured: list[tuple[float, float, PrecisionResult]] = []
    for record, result in evaluated_runs:
        value = result.values.get(metric.name)
        own = _value_in_own_precision(record, uses_averaged_weights=first.averaged)
        if value is not None and own is not None:
            measured.append((value, own, result))
    errors = [result.error for _, result in evaluated_runs if result.error]
    row = PrecisionRow(
        arm=arm, precision=first.precision, averaged=first.averaged, half=first.half, runs=len(measured),
        error=errors[0] if errors else "",
    )  # fmt: skip
    if not measured:
        return row
    values, owns = [value for value, *_ in measured], [own for _, own, _ in measured]
    differences = [
        metric.difference_from_reference(value, own) for value, own in zip(values, owns, strict=True)
    ]
    low, high = _difference_interval(values, owns, min(result.samples for *_, result in measured), metric)
    return row.model_copy(
        update={
            "own_mean": statistics.fmean(owns),
            "metric_mean": statistics.fmean(values),
            "difference": statistics.fmean(differences),
            "low": low,
            "high": high,
            "disagreement": _mean_of_finite_values(
                result.differing / result.answers
                for *_, result in measured
                if result.answers and result.differing is not None
            ),
            "sample_difference": _mean_of_finite_values(result.sample_difference for *_, result in measured),
        }
    )


def _difference_interval(
    values: Sequence[float], own_values: Sequence[float], samples: int, metric: Metric
) -> list[float | None]:
    """Return the 95 % interval of the mean difference over runs; None where there is none."""
    if not all(is_score(value, metric) for value in [*values, *own_values]):
        return [None, None]
    here, there = ([metric.score(value) for value in side] for side in (values, own_values))
    effect = paired_effect(
        here,
        there,
        least_plausible_spread_of_scores(metric, samples, [*here, *there]),
        is_rounded=metric.is_count,
    )
    bounds = interval_if_testable(effect, 1 - ERROR_RATE)
    return [None, None] if bounds is None else [*sorted(map(metric.difference_from_score_difference, bounds))]


def _value_in_own_precision(record: RunRecord, *, uses_averaged_weights: bool) -> float | None:
    last = record.summary.epochs[-1] if record.summary.epochs else None
    if last is None:
        return None
    return last.ema_value if uses_averaged_weights else last.value


def _mean_of_finite_values(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return statistics.fmean(known) if known else None
