"""What pairs of runs say about accuracy: an effect on top-1 and a verdict for each arm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ampcompare.analysis.comparability import accuracy_reason
from ampcompare.analysis.criteria import Criteria
from ampcompare.analysis.pairs import Pair, divergence_verdict, pairs_by_seed
from ampcompare.analysis.statistics import Effect, Verdict, decide, min_resolvable_spread, paired
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
    arms: Mapping[str, tuple[Sequence[RunRecord], Sequence[Pair]]], terms: Criteria, *, same_software: bool = True
) -> dict[str, Verdict]:
    """Return the verdict of each arm; one that diverged in some runs or did other work has no test and no interval."""
    closed: dict[str, Verdict] = {}
    for arm, (records, pairs) in arms.items():
        differs = accuracy_reason(pairs, same_software=same_software)
        word = divergence_verdict(records) or (f"not comparable ({differs})" if differs else "")
        if word:
            closed[arm] = Verdict(word)
    tested = [arm for arm in arms if arm not in closed]
    verdicts = decide([accuracy_effect(arms[arm][1]) for arm in tested], terms.accuracy())
    return {**closed, **dict(zip(tested, verdicts, strict=True))}


def accuracy_effects(records: Sequence[RunRecord], arms: Sequence[str], reference: str) -> dict[str, Effect]:
    """Return the effect on top-1, as a share, of every arm that has pairs with the reference."""
    theirs = [record for record in records if record.arm == reference]
    found = {
        arm: accuracy_effect(pairs_by_seed([record for record in records if record.arm == arm], theirs))
        for arm in arms
        if arm != reference
    }
    return {arm: effect for arm, effect in found.items() if effect is not None}
