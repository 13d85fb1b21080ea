"""What a loss scale does to the gradients of a run: which overflow, and which are lost below the range of fp16."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from ampcompare.diagnosis.observation import StepFacts
from ampcompare.diagnosis.ranges import counts_of, make_range
from ampcompare.diagnosis.shadow import HALF
from ampcompare.records.diagnosis import Headroom

__all__ = ["headroom"]

FP16_LARGEST = 65504.0
FP16_LOST = -25  # exponents below it round to zero
SCALES = (1.0, 128.0, 65536.0)


def headroom(steps: Iterable[StepFacts]) -> Headroom | None:
    """Return the headroom over all watched steps with a finite loss; None if no gradient was seen.

    Exponents are those of the gradients of weights, in the wide run where there is one, at scale 1. The largest scale
    counts what the backward pass computed on the way too.
    """
    exponents: Counter[int] = Counter()
    largest, own = 0.0, 1.0
    for facts in steps:
        loss = facts.step.loss
        if loss is not None and counts_of(facts.step.events[loss].row)[1]:
            continue  # the gradients of a loss that is not finite say nothing about a scale
        own, shift = facts.scale, round(math.log2(facts.scale))
        for event in facts.step.events:
            phase = event.key[3]
            if event.constant:
                continue
            if phase == "gradient":
                values = make_range(event.row if event.wide is None else event.wide)
                exponents.update({power - shift: count for power, count in values.exponents.items()})
            elif phase == "backward" and event.dtype in HALF:
                values = make_range(event.row)
            else:
                continue
            largest = max(largest, (values.largest or 0.0) / facts.scale)
    if not exponents:
        return None
    total = sum(exponents.values())
    lost = {
        f"{scale:g}": sum(n for power, n in exponents.items() if power + math.log2(scale) < FP16_LOST) / total
        for scale in (*SCALES, own)
    }
    fits = 2.0 ** math.floor(math.log2(FP16_LARGEST / largest)) if largest else None
    return Headroom(exponents=dict(sorted(exponents.items())), largest_scale=fits, own_scale=own, lost=lost)
