"""What pairs of runs say about accuracy: an effect on top-1 and a verdict for each arm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ampcompare.analysis.comparability import accuracy_incomparable_reason
from ampcompare.analysis.criteria import Criteria
from ampcompare.analysis.identity import IDENTICAL, identical
from ampcompare.analysis.learning import NO_VERDICT, idle_verdict
from ampcompare.analysis.pairs import Pair, divergence_verdict, pairs_by_seed
from ampcompare.analysis.statistics import Effect, Verdict, decide, min_resolvable_spread, paired
from ampcompare.records.run import RunRecord

__all__ = ["accuracy_effect", "accuracy_effects", "accuracy_verdicts", "failure_verdict"]


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
) -> dict[str, Verdict]:
    """Return the verdict of each arm; one that needs no test has no interval and takes no share of the error rate."""
    untested = {arm: Verdict(word) for arm, (records, pairs) in arms.items() if (word := _untested(records, pairs))}
    tested = [arm for arm in arms if arm not in untested]
    verdicts = decide([accuracy_effect(arms[arm][1]) for arm in tested], terms.accuracy())
    return {**untested, **dict(zip(tested, verdicts, strict=True))}


def failure_verdict(records: Sequence[RunRecord]) -> str:
    """Return what an arm shows of itself, the reference too: that it diverged or learned nothing; "" if neither."""
    return divergence_verdict(records) or idle_verdict(records)


def _untested(records: Sequence[RunRecord], pairs: Sequence[Pair]) -> str:
    """Return the word for an arm that no test decides: why it cannot be judged, or that it is identical."""
    differs = next(filter(None, (accuracy_incomparable_reason(*pair) for pair in pairs)), "")
    return (
        divergence_verdict(records)
        or (f"not comparable ({differs})" if differs else "")
        or idle_verdict(records)
        or (NO_VERDICT if idle_verdict([reference for _, reference in pairs]) else "")
        or (IDENTICAL if identical(pairs) else "")
    )


def accuracy_effects(records: Sequence[RunRecord], arms: Sequence[str], reference: str) -> dict[str, Effect]:
    """Return the effect on top-1, as a share, of every arm that has pairs with the reference."""
    theirs = [record for record in records if record.arm == reference]
    found = {
        arm: accuracy_effect(pairs_by_seed([record for record in records if record.arm == arm], theirs))
        for arm in arms
        if arm != reference
    }
    return {arm: effect for arm, effect in found.items() if effect is not None}
