"""Results of single samples of paired runs: for which samples a verdict holds, and what two single models differ in.

A verdict is about the samples of the validation set, over seeds. The interval for new samples treats samples and seeds
as crossed random effects (`crossed_effects`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ampcompare.analysis.inference.crossed_effects import mean_squares, new_samples_error, samples_needed
from ampcompare.analysis.inference.effect import MIN_PAIRS, Effect, interval
from ampcompare.analysis.inference.verdict import Margin, Verdict
from ampcompare.analysis.runs.pairs import Pair
from ampcompare.analysis.runs.scores import metric_of, spread_floor
from ampcompare.base.errors import RecordError
from ampcompare.records.comparison import ArmSummary, ModelPair, SampleComparison
from ampcompare.records.evaluation import unpack_samples
from ampcompare.records.metric import Metric
from ampcompare.records.run import RunRecord

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["compare_samples", "mcnemar", "sample_sentences", "samples_noun", "two_digits"]

MAX_NAMED = 4


def samples_noun(records: Iterable[RunRecord]) -> str:
    """Return what validation samples are called: images where runs count these, else samples."""
    return "images" if next((record.unit for record in records), "images") == "images" else "samples"


def compare_samples(
    pairs: Sequence[Pair], effect: Effect | None, verdict: Verdict, margin: Margin
) -> SampleComparison | None:
    """Compare paired runs sample by sample; None where no run keeps results of single samples.

    Args:
        pairs: of an arm and the reference.
        effect: on the scores over the pairs.
        verdict: on that effect.
        margin: of equivalence, of scores.
    """
    kept = [result for pair in pairs for run in pair for result in run.summary.epochs[-1:] if result.per_sample]
    if not kept:
        return None
    metric, count = metric_of(run for _, run in pairs), kept[0].samples
    try:
        arm, reference = _by_side(pairs)
    except RecordError as fault:
        return SampleComparison(samples=count, unusable=str(fault))
    models = [_models(*each) for each in zip(pairs, arm, reference, strict=True)] if arm.dtype == bool else []
    result = SampleComparison(samples=count, models=models)
    if effect is None or verdict.confidence is None or len(pairs) < MIN_PAIRS or count < 2:
        return result
    differences = _differences(arm, reference, metric)
    floor = None if arm.dtype == bool else spread_floor(metric, count, [float(abs(reference).mean())])
    squares = mean_squares(differences, floor)
    error, freedom = (float(value) for value in new_samples_error(squares))
    bounds = _wider(effect, Effect(effect.mean, effect.spread, error, freedom, len(pairs)), verdict.confidence)
    low, high = sorted(map(metric.difference_of, bounds))
    return result.model_copy(
        update={
            "low": low,
            "high": high,
            "holds": _holds(verdict.word, *bounds, margin.size),
            "needed": samples_needed(squares, margin.size, (1 - verdict.confidence) / 2),
        }
    )


def _wider(one: Effect, other: Effect, confidence: float) -> tuple[float, float]:
    """Return the wider interval: more is not known of new samples than of these, whatever the degrees of freedom."""
    intervals = [bounds for effect in (one, other) if (bounds := interval(effect, confidence)) is not None]
    return max(intervals, key=lambda bounds: bounds[1] - bounds[0])


def _holds(word: str, low: float, high: float, margin: float) -> bool | None:
    """Return whether an interval shows what a verdict says; None for a verdict that says nothing."""
    claims = {
        "equivalent": -margin < low and high < margin,
        "better": low > 0,
        "non-inferior": low > -margin,
        "worse": high < 0,
    }
    return next((shown for claim, shown in claims.items() if word.startswith(claim)), None)


def _by_side(pairs: Sequence[Pair]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the results of the arm and of the reference, each (pairs, samples): bool, or float64.

    Raises:
        RecordError: the results of a run are missing or damaged, or the runs saw other samples.
    """
    import numpy as np

    found = [[_results(run) for run in pair] for pair in pairs]
    missing = sum(each is None for pair in found for each in pair)
    noun = samples_noun(run for pair in pairs for run in pair)
    if missing:
        raise RecordError(f"{missing} of {2 * len(pairs)} runs keep no per-{noun.removesuffix('s')} results")
    results = [run.summary.epochs[-1].per_sample for pair in pairs for run in pair]
    if len({result.labels_sha256 for result in results if result is not None}) > 1:
        raise RecordError(f"the runs were evaluated on other {noun}, or in another order: their labels differ")
    arm, reference = np.array(found).swapaxes(0, 1)
    return arm, reference


def _differences(arm: NDArray[Any], reference: NDArray[Any], metric: Metric) -> NDArray[Any]:
    """Return by seed and sample how much better the arm is: (pairs, samples), with the scores' differences as means.

    A ratio of means is linearized: a sample moves its logarithm by how far it lies from each mean, over that mean.
    """
    import numpy as np

    if arm.dtype == bool:
        gains: NDArray[Any] = arm.astype(np.int8) - reference.astype(np.int8)
    elif metric.difference == "points":
        gains = arm - reference
    else:
        means, others = (side.mean(-1, keepdims=True) for side in (arm, reference))
        gains = np.log(means / others) + (arm / means - 1) - (reference / others - 1)
    return gains if metric.better == "higher" else -gains


def _results(run: RunRecord) -> NDArray[Any] | None:
    try:
        return unpack_samples(run.summary.epochs[-1]) if run.summary.epochs else None
    except RecordError as fault:
        who = f"{run.arm}, seed {run.config.recipe.seed}"
        noun = samples_noun([run]).removesuffix("s")
        raise RecordError(f"the per-{noun} results of {who} are damaged: {fault}") from None


def _models(pair: Pair, arm: NDArray[Any], reference: NDArray[Any]) -> ModelPair:
    arm_only, reference_only = int((arm & ~reference).sum()), int((reference & ~arm).sum())
    return ModelPair(
        seed=pair[0].config.recipe.seed,
        arm_only=arm_only,
        reference_only=reference_only,
        p=mcnemar(arm_only, reference_only),
    )


def mcnemar(one_only: int, other_only: int) -> float:
    """Return the p value of McNemar's exact test: whether two models are right on equally many samples of a population.

    It says nothing about what trained them: another seed of the same arm often differs as much.

    Args:
        one_only: samples that only one model has right; `other_only` likewise.
    """
    from scipy.stats import binomtest

    disagreeing = one_only + other_only
    return float(binomtest(one_only, disagreeing).pvalue) if disagreeing else 1.0


def sample_sentences(rows: Sequence[ArmSummary], margin: float, metric: Metric, noun: str) -> Iterable[str]:
    """Yield which verdicts need not hold for new samples, and which results of single samples could not be used.

    Args:
        margin: in the unit of shown differences.
        noun: what samples are called.
    """
    unit = f" {metric.difference_unit}" if metric.difference_unit else ""
    doubtful: list[str] = []
    unusable: dict[str, list[str]] = {}
    for row in rows:
        its = row.samples
        if its is not None and its.low is not None and its.high is not None:
            if its.holds is False:
                bounds = f"{metric.signed(its.low)} to {metric.signed(its.high)}{unit}"
                word = row.accuracy_verdict.partition(" (")[0]
                settled = (
                    "more seeds are needed first"
                    if its.needed is None
                    else f"about {two_digits(its.needed):,} {noun} would settle ±{margin:g}{unit}"
                )
                doubtful.append(f"{row.arm} ({word} here, {bounds} for new ones; {settled})")
        elif its is not None and its.unusable:
            unusable.setdefault(its.unusable, []).append(row.arm)
    if doubtful:
        more = f" and {len(doubtful) - MAX_NAMED} more" if len(doubtful) > MAX_NAMED else ""
        yield f"Shown for these validation {noun}, not for new ones: {', '.join(doubtful[:MAX_NAMED])}{more}."
    for reason, arms in unusable.items():
        yield f"Not compared {noun.removesuffix('s')} by {noun.removesuffix('s')}: {', '.join(arms)} ({reason})."


def two_digits(count: int) -> int:
    """Return an estimated number without the digits that it does not have."""
    return round(count, 2 - len(str(count))) if count > 100 else count
