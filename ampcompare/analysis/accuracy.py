"""What pairs of runs say about accuracy: an effect on top-1 and a verdict for each arm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ampcompare.analysis.comparability import accuracy_incomparable_reason
from ampcompare.analysis.criteria import Criteria
from ampcompare.analysis.pairs import Pair, divergence_verdict, pairs_by_seed
from ampcompare.analysis.statistics import Effect, decide, min_resolvable_spread, paired
from ampcompare.records.run import RunRecord

__all__ = ["accuracy_effect", "accuracy_effects", "accuracy_verdicts"]


def accuracy_effect(pairs: Sequence[Pair]) -> Effect | None:
    """Return the effect on top-1, as a share."""
    both = [
        (arm.summary.top1_final, reference.summary.top1_final, arm.summary.epochs[-1].samples)
        for arm, reference in pairs
        if arm.summary.top1_final is not None and arm.summary.epochs
    ]
    whole = [(here, there, samples) for here, there, samples in both if there is not None]
    if not whole:
        return None
    samples = min(samples for *_, samples in whole)
    return paired([here for here, *_ in whole], [there for _, there, _ in whole], min_resolvable_spread(samples))


def accuracy_verdicts(
    arms: Mapping[str, tuple[Sequence[RunRecord], Sequence[Pair]]], terms: Criteria
) -> dict[str, str]:
    """Return the verdict of each arm; the accuracy of an arm that diverged in some runs cannot be judged."""
    verdicts: dict[str, str] = {}
    for arm, (records, pairs) in arms.items():
        differs = next(filter(None, (accuracy_incomparable_reason(*pair) for pair in pairs)), "")
        verdicts[arm] = divergence_verdict(records) or (f"not comparable ({differs})" if differs else "")
    open_arms = [arm for arm in arms if not verdicts[arm]]
    words = decide([accuracy_effect(arms[arm][1]) for arm in open_arms], terms.accuracy())
    return {**verdicts, **dict(zip(open_arms, words, strict=True))}


def accuracy_effects(records: Sequence[RunRecord], arms: Sequence[str], reference: str) -> dict[str, Effect]:
    """Return the effect on top-1, as a share, of every arm that has pairs with the reference."""
    theirs = [record for record in records if record.arm == reference]
    found = {
        arm: accuracy_effect(pairs_by_seed([record for record in records if record.arm == arm], theirs))
        for arm in arms
        if arm != reference
    }
    return {arm: effect for arm, effect in found.items() if effect is not None}
