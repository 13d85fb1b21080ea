"""What is tested of an arm: in each quantity, what pairs of runs say, the margin, and the unit of effects."""

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from ampcompare.results.analysis.effects.loss_tail import loss_evidence
from ampcompare.results.analysis.effects.quality import quality_evidence
from ampcompare.results.analysis.effects.step_time import time_evidence, time_ratio_of_log
from ampcompare.results.analysis.inference.terms import QualityMargin, Terms
from ampcompare.results.analysis.inference.verdict import Evidence, Margin, SequentialDesign, verdicts_on
from ampcompare.results.analysis.pairing.pairs import Pairing
from ampcompare.results.records.comparison import Quantity
from ampcompare.results.records.verdict import Verdict

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class QuantityTest:
    """What an arm is compared with the reference in, and tested.

    Attributes:
        evidence: what paired runs say of it.
        margin: in the unit of effects, in which more is better.
        on_rows: an effect in the unit of rows.
        of_training: whether it is what training reaches, so that a lost seed makes its verdict conditional.
    """

    evidence: Callable[[Pairing], Evidence]
    margin: Margin
    on_rows: Callable[[float], float]
    of_training: bool = True

    def verdicts(self, evidence: Mapping[Key, Evidence], design: SequentialDesign) -> dict[Key, Verdict]:
        """Return the verdict on each arm of a family of tests, with effect and interval in the unit of rows."""
        return {
            key: self._verdict_in_row_unit(verdict)
            for key, verdict in verdicts_on(evidence, self.margin, design).items()
        }

    def _verdict_in_row_unit(self, verdict: Verdict) -> Verdict:
        effect = None if verdict.effect is None else self.on_rows(verdict.effect)
        bounds = sorted(self.on_rows(bound) for bound in (verdict.low, verdict.high) if bound is not None)
        low, high = bounds if bounds else (None, None)
        return verdict.model_copy(update={"effect": effect, "low": low, "high": high})

    def as_conditional(
        self, verdict: Verdict, survivors: tuple[int, int] | None, updates: tuple[float, float] | None
    ) -> Verdict:
        """Return a verdict as one on the seeds that survived and after the updates that were made, if it rests on them.

        Args:
            verdict: on what training reaches, or on another quantity.
            survivors: as `Pairing.surviving_seed_counts`.
            updates: as `Pairing.mean_updates`.
        """
        if not self.of_training:
            return verdict
        return verdict.after_updates(updates, self.margin.shown).among_survivors(survivors)


def quantity_tests(
    margin: QualityMargin, terms: Terms, design: SequentialDesign
) -> dict[Quantity, QuantityTest]:
    """Return what is tested, under the terms of a comparison."""
    return {
        "quality": QuantityTest(
            lambda pairing: quality_evidence(pairing, margin, design.pilot),
            margin.margin_of_score_differences(),
            margin.metric.difference_of_scores,
        ),
        "time": QuantityTest(
            time_evidence, terms.log_time_margin(), lambda speed: time_ratio_of_log(-speed), of_training=False
        ),
        "loss": QuantityTest(
            lambda pairing: loss_evidence(pairing, design.pilot),
            terms.log_loss_margin(),
            lambda gain: math.expm1(-gain),
        ),
    }
