"""Results of single samples of paired runs: for which samples a verdict holds, and what two single models differ in.

A verdict is about the samples of the validation set, over seeds. The interval for new samples treats samples and seeds
as crossed random effects of the difference of two models of one seed:

    d[seed, sample] = mean + sample effect + seed effect + residual.

A t interval over seeds takes the samples as given. For samples that were not drawn, the variance of the mean adds the
sample effects: with mean squares A of samples, S of seeds and E of the residual over n seeds and m samples it is
(S + max(A - E, 0)) / (n m), by the method of moments, as for readers and cases in diagnostic studies.

Sources: Satterthwaite, Biometrics Bulletin 2 (1946); Clark, J. Verbal Learning and Verbal Behavior 12 (1973), for the
error of taking materials as fixed; Hillis, Statistics in Medicine 26 (2007), for the variance that is never below that
of the seeds alone and its degrees of freedom; Bonett and Price, J. Educational and Behavioral Statistics 37 (2012), for
two pseudo-samples. How well the intervals cover: `docs/benchmarks/new_images.md`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ampcompare.base.errors import RecordError
from ampcompare.results.analysis.inference.effect import (
    ERROR_RATE,
    MIN_PAIRS,
    Effect,
    interval_if_testable,
    least_spread_of_accuracies,
)
from ampcompare.results.analysis.inference.sample_size import POWER, round_to_two_digits
from ampcompare.results.analysis.inference.verdict import Margin
from ampcompare.results.analysis.pairing.pairs import Pair
from ampcompare.results.analysis.pairing.scores import least_plausible_spread_of_scores, metric_of_runs
from ampcompare.results.records.comparison import ArmSummary, ModelPair, SampleComparison
from ampcompare.results.records.evaluation import unpack_samples
from ampcompare.results.records.metric import Metric
from ampcompare.results.records.run import RunRecord
from ampcompare.results.records.verdict import Kind, Verdict

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_NAMED = 4
MAX_SAMPLES = 10**8
STEPS = 2000  # of the search for a number of samples: one in a hundred apart


def samples_noun(records: Iterable[RunRecord]) -> str:
    """Return what validation samples are called: images where runs count these, else samples."""
    return "images" if next((record.unit for record in records), "images") == "images" else "samples"


def compare_samples(
    pairs: Sequence[Pair], effect: Effect | None, verdict: Verdict, margin: Margin
) -> SampleComparison | None:
    """Compare paired runs sample by sample; None where no run keeps results of single samples.

    Args:
        effect: on the scores over the pairs, of which `margin` is one, and `verdict` is on it.
    """
    last = [result for pair in pairs for run in pair for result in run.summary.epochs[-1:]]
    kept = [result for result in last if result.per_sample]
    if not kept:
        return None
    metric, count = metric_of_runs(run for _, run in pairs), kept[0].samples
    try:
        arm, reference = _sample_results_of_arm_and_reference(pairs)
    except RecordError as fault:
        return SampleComparison(samples=count, unusable=str(fault))
    models = (
        [_mcnemar_test_of_models(*each) for each in zip(pairs, arm, reference, strict=True)]
        if arm.dtype == bool
        else []
    )
    result = SampleComparison(samples=count, models=models)
    if effect is None or verdict.confidence is None or len(pairs) < MIN_PAIRS or count < 2:
        return result
    differences = _sample_differences(arm, reference, metric)
    floor = (
        None
        if arm.dtype == bool
        else least_plausible_spread_of_scores(metric, count, [float(abs(reference).mean())])
    )
    squares = mean_squares_of_differences(differences, floor)
    error, freedom = (float(value) for value in standard_error_and_freedom_over_new_samples(squares))
    bounds = _wider_of_intervals(
        effect, Effect(effect.mean, effect.spread, error, freedom, len(pairs)), verdict.confidence
    )
    low, high = sorted(map(metric.difference_from_score_difference, bounds))
    return result.model_copy(
        update={
            "low": low,
            "high": high,
            "holds": _interval_shows_verdict(verdict.kind, *bounds, margin.size),
            "needed": samples_needed_for_equivalence(squares, margin.size, (1 - verdict.confidence) / 2),
        }
    )


def _wider_of_intervals(one: Effect, other: Effect, confidence: float) -> tuple[float, float]:
    """Return the wider interval: more is not known of new samples than of these, whatever the degrees of freedom."""
    intervals = [
        bounds for effect in (one, other) if (bounds := interval_if_testable(effect, confidence)) is not None
    ]
    return max(intervals, key=lambda bounds: bounds[1] - bounds[0])


def _interval_shows_verdict(kind: Kind, low: float, high: float, margin: float) -> bool | None:
    """Return whether an interval shows what a verdict says; None for a verdict that says nothing."""
    claims: dict[Kind, bool] = {
        "equivalent": -margin < low and high < margin,
        "better": low > 0,
        "non-inferior": low > -margin,
        "worse": high < 0,
    }
    return claims.get(kind)


def _sample_results_of_arm_and_reference(pairs: Sequence[Pair]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the results of the arm and of the reference, each (pairs, samples): bool, or float64."""
    import numpy as np

    found = [[_sample_results_of_run(run) for run in pair] for pair in pairs]
    missing = sum(each is None for pair in found for each in pair)
    noun = samples_noun(run for pair in pairs for run in pair)
    if missing:
        raise RecordError(f"{missing} of {2 * len(pairs)} runs keep no per-{noun.removesuffix('s')} results")
    results = [run.summary.epochs[-1].per_sample for pair in pairs for run in pair]
    if len({result.labels_sha256 for result in results if result is not None}) > 1:
        raise RecordError(
            f"the runs were evaluated on other {noun}, or in another order: their labels differ"
        )
    arm, reference = np.array(found).swapaxes(0, 1)
    return arm, reference


def _sample_differences(arm: NDArray[Any], reference: NDArray[Any], metric: Metric) -> NDArray[Any]:
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


def _sample_results_of_run(run: RunRecord) -> NDArray[Any] | None:
    try:
        return unpack_samples(run.summary.epochs[-1]) if run.summary.epochs else None
    except RecordError as fault:
        who = f"{run.arm}, seed {run.config.recipe.seed}"
        noun = samples_noun([run]).removesuffix("s")
        raise RecordError(f"the per-{noun} results of {who} are damaged: {fault}") from None


def _mcnemar_test_of_models(pair: Pair, arm: NDArray[Any], reference: NDArray[Any]) -> ModelPair:
    """Return how many samples only one model of a pair has right, and McNemar's test of that.

    Args:
        pair: the runs that trained both.
        arm: bool (samples,): which the arm's has right.
        reference: the same, of the reference.
    """
    only, others = int((arm & ~reference).sum()), int((reference & ~arm).sum())
    return ModelPair(
        seed=pair[0].config.recipe.seed, arm_only=only, reference_only=others, p=mcnemar_p_value(only, others)
    )


def mcnemar_p_value(one_only: int, other_only: int) -> float:
    """Return the p value of McNemar's exact test of two models, by the samples that only one of them has right.

    It says nothing about what trained them: another seed of the same arm often differs as much.
    """
    from scipy.stats import binomtest

    disagreeing = one_only + other_only
    return float(binomtest(one_only, disagreeing).pvalue) if disagreeing else 1.0


def sample_sentences(rows: Sequence[ArmSummary], margin: float, metric: Metric, noun: str) -> Iterable[str]:
    """Yield which verdicts need not hold for new samples, and which results of single samples could not be used."""
    unit = metric.difference_suffix
    doubtful: list[str] = []
    unusable: dict[str, list[str]] = {}
    for row in rows:
        its = row.samples
        if its is not None and its.unusable:
            unusable.setdefault(its.unusable, []).append(row.arm)
        elif its is not None and its.holds is False and its.low is not None and its.high is not None:
            low, high = map(metric.difference_text_without_unit, (its.low, its.high))
            bounds = f"{low} to {high}{unit}"
            settled = "more seeds are needed first"
            if its.needed is not None:
                settled = f"about {round_to_two_digits(its.needed):,} {noun} would settle ±{margin:g}{unit}"
            doubtful.append(f"{row.arm} ({row.quality.word} here, {bounds} for new ones; {settled})")
    if doubtful:
        more = f" and {len(doubtful) - MAX_NAMED} more" if len(doubtful) > MAX_NAMED else ""
        yield f"Shown for these validation {noun}, not for new ones: {', '.join(doubtful[:MAX_NAMED])}{more}."
    for reason, arms in unusable.items():
        yield f"Not compared {noun.removesuffix('s')} by {noun.removesuffix('s')}: {', '.join(arms)} ({reason})."


@dataclass(frozen=True)
class MeanSquaresOfDifferences:
    """The mean squares of differences by seed and sample, of which there are 2 or more: float64 arrays or numbers."""

    samples: Any
    seeds: Any
    residual: Any
    num_seeds: int
    num_samples: int


def mean_squares_of_differences(
    differences: NDArray[Any], seed_spread: float | None = None
) -> MeanSquaresOfDifferences:
    """Return the mean squares of differences.

    The spread of seeds is at least that of rounding to counts (`least_spread_of_accuracies`), or that of the caller.
    Samples that all agree do not prove that there are no others: their mean square is at least that of two that differ
    in every seed, one for each arm, which is about the rule of three.

    Args:
        differences: (..., seeds, samples), whole numbers of -1, 0 and 1, or any floats.
        seed_spread: least spread of a mean over samples; None for whole numbers.
    """
    import numpy as np

    *_, seeds, samples = differences.shape
    by_sample = differences.sum(-2, dtype=np.float64) / seeds
    by_seed = differences.sum(-1, dtype=np.float64) / samples
    mean = by_seed.mean(-1, keepdims=True)
    of_samples = seeds * ((by_sample - mean) ** 2).sum(-1)
    of_seeds = samples * ((by_seed - mean) ** 2).sum(-1)
    if seed_spread is None:
        whole = np.count_nonzero(differences, axis=(-2, -1)) - seeds * samples * mean[..., 0] ** 2
        least, seed_spread = 2 * seeds / samples, least_spread_of_accuracies(samples)
    else:
        whole = ((differences - mean[..., None]) ** 2).sum((-2, -1))
        least = 0.0
    residual = np.maximum(whole - of_samples - of_seeds, 0) / ((seeds - 1) * (samples - 1))
    return MeanSquaresOfDifferences(
        samples=np.maximum(of_samples / (samples - 1), least),
        seeds=np.maximum(of_seeds / (seeds - 1), samples * seed_spread**2),
        residual=residual,
        num_seeds=seeds,
        num_samples=samples,
    )


def standard_error_and_freedom_over_new_samples(squares: MeanSquaresOfDifferences) -> tuple[Any, Any]:
    """Return the standard error of the mean difference over new samples and new seeds, and its degrees of freedom."""
    import numpy as np

    variance = squares.seeds + np.maximum(squares.samples - squares.residual, 0)
    freedom = (squares.num_seeds - 1) * (variance / squares.seeds) ** 2
    return np.sqrt(variance / (squares.num_seeds * squares.num_samples)), freedom


def samples_needed_for_equivalence(
    squares: MeanSquaresOfDifferences, margin: float, alpha: float = ERROR_RATE
) -> int | None:
    """Return about how many samples would show equivalence on new ones with a power of 80 %, if the arms do not differ.

    Another number of samples keeps the seeds and the components of variance. None if the spread over so few seeds alone
    is too large. `alpha` is of each of the two one-sided tests.
    """
    import numpy as np
    from scipy.special import stdtrit

    seeds = squares.num_seeds
    sample_variance = max(squares.samples - squares.residual, 0) / seeds
    seed_variance = max(squares.seeds - squares.residual, 0) / squares.num_samples
    residual = min(squares.residual, squares.seeds)
    counts = np.unique(np.geomspace(2, MAX_SAMPLES, STEPS).round())
    over_seeds = (seed_variance + residual / counts) / seeds
    variance = over_seeds + sample_variance / counts
    freedom = (seeds - 1) * (variance / over_seeds) ** 2
    needed = (stdtrit(freedom, 1 - alpha) + stdtrit(freedom, 1 - (1 - POWER) / 2)) * np.sqrt(variance)
    enough = np.flatnonzero(needed <= margin)
    return int(counts[enough[0]]) if len(enough) else None
