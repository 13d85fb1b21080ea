"""Per-image results of paired runs: for which images a verdict holds, and what two single models differ in.

A verdict is about the images of the validation set, over seeds. The interval for new images treats images and seeds as
crossed random effects (`crossed_effects`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ampcompare.analysis.crossed_effects import images_needed, mean_squares, new_images_error
from ampcompare.analysis.pairs import Pair
from ampcompare.analysis.statistics import MIN_PAIRS, Effect, Margin, Verdict, interval
from ampcompare.errors import RecordError
from ampcompare.records.comparison import ArmSummary, ImageComparison, ModelPair
from ampcompare.records.images import unpack_images
from ampcompare.records.run import RunRecord

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["compare_images", "image_sentences", "mcnemar", "two_digits"]

MAX_NAMED = 4


def compare_images(
    pairs: Sequence[Pair], effect: Effect | None, verdict: Verdict, margin: Margin
) -> ImageComparison | None:
    """Compare paired runs image by image; None where no run keeps per-image results.

    Args:
        pairs: of an arm and the reference.
        effect: on top-1 over the pairs, as a share.
        verdict: on that effect.
        margin: of equivalence, as a share.
    """
    kept = [result for pair in pairs for run in pair for result in run.summary.epochs[-1:] if result.images]
    if not kept:
        return None
    try:
        differences = _differences(pairs)
    except RecordError as fault:
        return ImageComparison(images=kept[0].samples, unusable=str(fault))
    models = [_models(arm, difference) for (arm, _), difference in zip(pairs, differences, strict=True)]
    result = ImageComparison(images=kept[0].samples, models=models)
    if effect is None or verdict.confidence is None or len(pairs) < MIN_PAIRS or result.images < 2:
        return result
    squares = mean_squares(differences)
    error, freedom = (float(value) for value in new_images_error(squares))
    low, high = _wider(effect, Effect(effect.mean, effect.spread, error, freedom, len(pairs)), verdict.confidence)
    return result.model_copy(
        update={
            "low": low,
            "high": high,
            "holds": _holds(verdict.word, low, high, margin.size),
            "needed": images_needed(squares, margin.size, (1 - verdict.confidence) / 2),
        }
    )


def _wider(one: Effect, other: Effect, confidence: float) -> tuple[float, float]:
    """Return the wider interval: more is not known of new images than of these, whatever the degrees of freedom."""
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


def _differences(pairs: Sequence[Pair]) -> NDArray[Any]:
    """Return by seed and image what the arm has more than the reference: (pairs, images) int8 of -1, 0 and 1.

    Raises:
        RecordError: the results of a run are missing or damaged, or the runs saw other images.
    """
    import numpy as np

    bits = [[_bits(run) for run in pair] for pair in pairs]
    missing = sum(each is None for pair in bits for each in pair)
    if missing:
        raise RecordError(f"{missing} of {2 * len(pairs)} runs keep no per-image results")
    results = [run.summary.epochs[-1].images for pair in pairs for run in pair]
    if len({result.labels_sha256 for result in results if result is not None}) > 1:
        raise RecordError("the runs were evaluated on other images, or in another order: their labels differ")
    arm, reference = np.array(bits).astype(np.int8).swapaxes(0, 1)
    difference: NDArray[Any] = arm - reference
    return difference


def _bits(run: RunRecord) -> NDArray[Any] | None:
    try:
        return unpack_images(run.summary.epochs[-1]) if run.summary.epochs else None
    except RecordError as fault:
        who = f"{run.arm}, seed {run.config.recipe.seed}"
        raise RecordError(f"the per-image results of {who} are damaged: {fault}") from None


def _models(arm: RunRecord, difference: NDArray[Any]) -> ModelPair:
    arm_only, reference_only = int((difference > 0).sum()), int((difference < 0).sum())
    return ModelPair(
        seed=arm.config.recipe.seed,
        arm_only=arm_only,
        reference_only=reference_only,
        p=mcnemar(arm_only, reference_only),
    )


def mcnemar(one_only: int, other_only: int) -> float:
    """Return the p value of McNemar's exact test: whether two models are right on equally many images of a population.

    It says nothing about what trained them: another seed of the same arm often differs as much.

    Args:
        one_only: images that only one model classified correctly; `other_only` likewise.
    """
    from scipy.stats import binomtest

    disagreeing = one_only + other_only
    return float(binomtest(one_only, disagreeing).pvalue) if disagreeing else 1.0


def image_sentences(rows: Sequence[ArmSummary], margin: Margin) -> Iterable[str]:
    """Yield which verdicts need not hold for new images, and which per-image results could not be used."""
    doubtful: list[str] = []
    unusable: dict[str, list[str]] = {}
    for row in rows:
        if row.images is not None and row.images.low is not None and row.images.high is not None:
            if row.images.holds is False:
                bounds = f"{100 * row.images.low:+.2f} to {100 * row.images.high:+.2f} pp"
                word = row.accuracy_verdict.partition(" (")[0]
                doubtful.append(
                    f"{row.arm} ({word} here, {bounds} for new ones; {_settled(row.images.needed, margin)})"
                )
        elif row.images is not None and row.images.unusable:
            unusable.setdefault(row.images.unusable, []).append(row.arm)
    if doubtful:
        more = f" and {len(doubtful) - MAX_NAMED} more" if len(doubtful) > MAX_NAMED else ""
        yield f"Shown for these validation images, not for new ones: {', '.join(doubtful[:MAX_NAMED])}{more}."
    for reason, arms in unusable.items():
        yield f"Not compared image by image: {', '.join(arms)} ({reason})."


def _settled(needed: int | None, margin: Margin) -> str:
    if needed is None:
        return "more seeds are needed first"
    return f"about {two_digits(needed):,} images would settle ±{margin.shown} pp"


def two_digits(count: int) -> int:
    """Return an estimated number without the digits that it does not have."""
    return round(count, 2 - len(str(count))) if count > 100 else count
