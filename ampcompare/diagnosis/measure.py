"""One run of a loop under an arm, watched."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from ampcompare.backends.arm import Arm
from ampcompare.diagnosis.observation import Observation
from ampcompare.diagnosis.observed import Enough, Observed
from ampcompare.diagnosis.step_watch import StepWatch
from ampcompare.precision.base import Precision
from ampcompare.precision.cpu_half import cpu_half
from ampcompare.precision.factory import make_precision

__all__ = ["Conditions", "Loop", "measure", "trained_under"]

Loop = Callable[[Precision], Any]


@dataclass(frozen=True)
class Conditions:
    """How a loop is run and watched.

    Attributes:
        steps: updates.
        at: steps to watch; None for all.
        reference: type of the wide run; None for ranges alone.
        half: how 16-bit arithmetic is computed on a CPU.
    """

    steps: int = 8
    at: Sequence[int] | None = None
    reference: torch.dtype | None = torch.float32
    device: str = "cpu"
    half: str = "auto"
    seed: int = 0


def measure(loop: Loop, arm: Arm, conditions: Conditions, lines: Sequence[str] = ()) -> Observation:
    """Run `loop` under `arm` from its beginning and return what was seen.

    Args:
        lines: file:line of calls that run in fp32.
    """
    observation = Observation()
    watch = StepWatch(
        observation, steps=conditions.steps, at=conditions.at, reference=conditions.reference, kept_lines=lines
    )
    with trained_under(arm, conditions) as precision:
        with Observed(precision, watch) as observed, suppress(Enough):
            loop(observed)
    return observation


@contextmanager
def trained_under(arm: Arm, conditions: Conditions) -> Iterator[Precision]:
    """Yield the precision of an arm with torch seeded and warnings off; at the end torch is as it was before."""
    torch.manual_seed(conditions.seed)
    precision = make_precision(arm, device=conditions.device)
    _, arithmetic = cpu_half(conditions.half, precision.half_dtype, torch.device(conditions.device))
    try:
        with arithmetic, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield precision
    finally:
        _release(precision)


def _release(precision: Precision) -> None:
    """Undo the patches of O1, so that the next run begins with torch as it is."""
    amp = getattr(precision, "amp", None)
    close = getattr(getattr(amp, "_amp_state", None), "close", None)
    if close is not None:
        close()
