"""The cause of divergence, if the records prove it; no guess otherwise."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ampcompare.runs.records.run import RunRecord

__all__ = ["divergence_cause", "first_divergence"]

FP16_HALF_OF_LEAST = 2.0**-25  # half of fp16's least number above 0: up to this, rounding gives 0
FIRST_STEPS = 3  # an eps of 0 divides by 0 at the first update; the loss shows it one step later
EPS = "docs/examples/divergence.md"
NAN = "docs/troubleshooting.md"


def first_divergence(records: Sequence[RunRecord]) -> str:
    """Return the step at which diverged runs went bad: `at step 1`, or `first at step 1` of several; "" if unknown."""
    known = [record.summary.diverged_step for record in records if record.status == "diverged"]
    steps = sorted(step for step in known if step is not None)
    if not steps:
        return ""
    return f"at step {steps[0]}" if steps[0] == steps[-1] else f"first at step {steps[0]}"


def divergence_cause(records: Sequence[RunRecord]) -> str:
    """Return the proven cause of all diverged runs of an arm, with the page that explains it; "" if not proven."""
    causes = {_cause(record) for record in records if record.status == "diverged"}
    return causes.pop() if len(causes) == 1 else ""


def _cause(record: RunRecord) -> str:
    summary = record.summary
    optimizer = record.config.recipe.optimizer
    if summary.first_nonfinite_loss_step == 0:
        return f"the loss is not finite before the first update ({NAN})"
    if (
        optimizer.name in ("adam", "adamw")
        and optimizer.implementation != "fused"  # it computes in fp32
        and optimizer.eps <= FP16_HALF_OF_LEAST
        and trains_fp16_weights(record)
        and summary.diverged_step is not None
        and summary.diverged_step <= FIRST_STEPS
    ):
        name = "AdamW" if optimizer.name == "adamw" else "Adam"
        return f"{name}'s eps of {optimizer.eps:.0e} is 0 in fp16 ({EPS})"
    scale = summary.final_loss_scale
    if scale is not None and math.isfinite(scale) and scale < 1 and summary.skipped_steps:
        return f"gradients overflow at any loss scale, down to {scale:.3g} ({NAN})"
    return ""


def trains_fp16_weights(record: RunRecord) -> bool:
    """Return whether the optimizer of a run steps fp16 weights, without an fp32 copy."""
    arm = record.config.parsed_arm
    memory = arm.spec.memory
    if memory is None or str(arm.options.get("dtype", "float16")) != "float16":
        return False
    held = memory(arm.options)
    return held.weight == 2 and not held.master
