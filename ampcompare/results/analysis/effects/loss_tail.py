"""The final training loss from pairs of runs: an effect and a verdict for each arm.

The loss of a run is the mean over the last fifth of its steps. Both runs of a pair made the same steps on the same
batches, so the difference of two means is the mean of the differences step by step. Steps of one run are correlated, so
the test is over seeds.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

from ampcompare.results.analysis.inference.effect import (
    least_spread_of_float32,
    paired_effect,
    two_stage_effect,
    unpaired_effect,
)
from ampcompare.results.analysis.inference.verdict import Evidence
from ampcompare.results.analysis.pairing.comparability import start_difference_reason
from ampcompare.results.analysis.pairing.learning import (
    pairs_learned_nothing_verdict,
    unjudgeable_quality_verdict,
)
from ampcompare.results.analysis.pairing.pairs import IDENTICAL, Pair, Pairing, have_pairs_equal_losses
from ampcompare.results.records.run import RunRecord
from ampcompare.results.records.verdict import Verdict


def tail_loss_evidence_of_pairs(pairs: Sequence[Pair], pilot: Collection[int] = ()) -> Evidence:
    """Return the effect over pairs, or why their losses cannot be compared; neither for records that keep none.

    Args:
        pilot: seeds whose spread determined the number of pairs, as for `quality_effect`.
    """
    known = [pair for pair in pairs if all(run.summary.loss_tail is not None for run in pair)]
    if not known:
        return Evidence()
    if any(_have_different_steps(*pair) for pair in known):
        return _make_not_comparable_evidence("the runs have no steps in common to pair by")
    losses = [[run.summary.loss_tail or 0.0 for run in pair] for pair in known]
    if not all(math.isfinite(loss) and loss > 0 for pair in losses for loss in pair):
        return _make_not_comparable_evidence("a mean loss is not a number above 0")
    # The logarithm of a loss, negative so that larger is better.
    here, there = ([-math.log(loss) for loss in side] for side in zip(*losses, strict=True))
    floor = least_spread_of_float32([1.0])
    whole = (unpaired_effect if any(start_difference_reason(*pair) for pair in known) else paired_effect)(
        here, there, floor
    )
    if not pilot:
        return Evidence(whole, mean=whole.mean)
    early = [reference.config.recipe.seed in pilot for _, reference in known]
    return Evidence(two_stage_effect(here, there, early, floor) if any(early) else None, mean=whole.mean)


def tail_loss_evidence_of_arm(pairing: Pairing, pilot: Collection[int] = ()) -> Evidence:
    """Return what pairs say of the loss, and the verdict of an arm that needs no test; nothing without such a loss."""
    tail = tail_loss_evidence_of_pairs(pairing.pairs, pilot)
    if tail.effect is None and not tail.untested:
        return tail
    untested = (
        unjudgeable_quality_verdict(pairing, tail.untested)
        or pairs_learned_nothing_verdict(pairing.pairs)
        or (IDENTICAL if have_pairs_equal_losses(pairing.pairs) else Verdict())
    )
    return replace(
        tail,
        untested=untested,
        survivors=pairing.surviving_and_common_seed_counts,
        updates=pairing.differing_mean_updates,
    )


def _make_not_comparable_evidence(why: str) -> Evidence:
    return Evidence(untested=Verdict(kind="not comparable", why=why))


def _have_different_steps(arm: RunRecord, reference: RunRecord) -> bool:
    here, there = arm.summary, reference.summary
    return here.num_steps != there.num_steps or bool(here.rollbacks or there.rollbacks)
