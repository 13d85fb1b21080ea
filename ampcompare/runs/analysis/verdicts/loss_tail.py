"""The final training loss from pairs of runs: an effect and a verdict for each arm.

The loss of a run is the mean over the last fifth of its steps. Both runs of a pair made the same steps on the same
batches, so the difference of two means is the mean of the differences step by step. Steps of one run are correlated, so
the test is over seeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ampcompare.runs.analysis.inference.criteria import Criteria
from ampcompare.runs.analysis.inference.effect import Effect, float_spread, paired, two_stage, unpaired
from ampcompare.runs.analysis.inference.looks import Design
from ampcompare.runs.analysis.inference.verdict import Verdict, decide
from ampcompare.runs.analysis.runs.comparability import accuracy_reason, began_apart
from ampcompare.runs.analysis.runs.identity import IDENTICAL, equal_losses
from ampcompare.runs.analysis.runs.learning import NO_VERDICT, idle_pairs, idle_verdict
from ampcompare.runs.analysis.runs.pairs import Pair, divergence_verdict
from ampcompare.runs.records.run import RunRecord

__all__ = ["TailLoss", "loss_verdicts", "tail_loss"]


@dataclass(frozen=True)
class TailLoss:
    """What the losses of pairs say.

    Attributes:
        effect: on the logarithm, positive where the arm's loss is lower; None where there is none.
        why_not: why the losses of pairs that have some cannot be compared.
    """

    effect: Effect | None = None
    why_not: str = ""


def tail_loss(pairs: Sequence[Pair], pilot: frozenset[int] = frozenset()) -> TailLoss:
    """Return the effect over pairs; none for records of versions that kept no such loss.

    Args:
        pilot: seeds whose spread determined the number of pairs, as for `accuracy_effect`.
    """
    known = [pair for pair in pairs if all(run.summary.loss_tail is not None for run in pair)]
    if not known:
        return TailLoss()
    if any(_other_steps(*pair) for pair in known):
        return TailLoss(why_not="the runs have no steps in common to pair by")
    losses = [[run.summary.loss_tail or 0.0 for run in pair] for pair in known]
    if not all(math.isfinite(loss) and loss > 0 for pair in losses for loss in pair):
        return TailLoss(why_not="a mean loss is not a number above 0")
    # The logarithm of a loss, negative so that larger is better.
    here, there = ([-math.log(loss) for loss in side] for side in zip(*losses, strict=True))
    floor = float_spread([1.0])
    if pilot:
        early = [reference.config.recipe.seed in pilot for _, reference in known]
        return TailLoss(two_stage(here, there, early, floor) if any(early) else None)
    return TailLoss((unpaired if any(began_apart(*pair) for pair in known) else paired)(here, there, floor))


def loss_verdicts(
    arms: Mapping[str, tuple[Sequence[RunRecord], Sequence[Pair]]],
    terms: Criteria,
    design: Design,
    *,
    same_software: bool = True,
) -> dict[str, Verdict]:
    """Return the verdict of each arm: its own Holm family, apart from those of the metric and of time.

    An empty verdict is that of an arm whose runs, or those of the reference, keep no such loss.
    """
    tails = {arm: tail_loss(pairs, design.pilot) for arm, (_, pairs) in arms.items()}
    words = {arm: _untested(*arms[arm], tails[arm], same_software) for arm in arms}
    tested = [arm for arm in arms if not words[arm]]
    verdicts = decide([tails[arm].effect for arm in tested], terms.loss(), design.error_rate, design.next_error_rate)
    return {**{arm: Verdict(word) for arm, word in words.items() if word}, **dict(zip(tested, verdicts, strict=True))}


def _untested(records: Sequence[RunRecord], pairs: Sequence[Pair], tail: TailLoss, same_software: bool) -> str:
    """Return the verdict of an arm that needs no test; "" if a test decides, or if there is nothing to test."""
    if tail.effect is None and not tail.why_not:
        return ""
    differs = accuracy_reason(pairs, same_software=same_software) or tail.why_not
    return (
        divergence_verdict(records)
        or (f"not comparable ({differs})" if differs else "")
        or idle_verdict(records)
        or (NO_VERDICT if idle_verdict([reference for _, reference in pairs]) else "")
        or idle_pairs(pairs)
        or (IDENTICAL if equal_losses(pairs) else "")
    )


def _other_steps(arm: RunRecord, reference: RunRecord) -> bool:
    here, there = arm.summary, reference.summary
    return here.num_steps != there.num_steps or bool(here.rollbacks or there.rollbacks)
