"""Learning rates as a pure function of the step.

torch's schedulers count calls, warn when a first step was skipped, and cost about 15 microseconds a step; a function of
the step gives every arm the same rate at the same step, and resumes without state.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ampcompare.settings.recipe import ScheduleConfig

__all__ = ["make_schedule"]


def make_schedule(config: ScheduleConfig, *, steps_per_epoch: int, total_steps: int) -> Callable[[int], float] | None:
    """Return the factor on the base learning rate at each step, as LambdaLR takes it; None if it is always 1.

    Args:
        config: name and parameters of the schedule.
        steps_per_epoch: updates in one epoch.
        total_steps: updates in the whole run, where the cosine reaches 0.
    """
    warmup = round(config.warmup_epochs * steps_per_epoch)
    if config.name == "constant" and warmup == 0:
        return None

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if config.name == "step":
            return float(config.gamma ** (step // (config.step_epochs * steps_per_epoch)))
        if config.name == "cosine":
            progress = (step - warmup) / max(1, total_steps - warmup)
            return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        return 1.0

    return factor
