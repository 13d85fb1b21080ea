"""How the `apex` backend runs backward passes and learns of skipped steps: from the real Apex, and from our engine."""

from __future__ import annotations

import abc
import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampcompare.precision.base import FixedOutcome, StepOutcome

__all__ = ["AnyEngine", "ApexSteps", "OwnEngine", "steps_of"]


class ApexSteps(abc.ABC):
    """Backward passes and steps of one implementation of `apex.amp`."""

    @abc.abstractmethod
    def backward(self, loss: Tensor, optimizers: list[Optimizer], **options: Any) -> None:
        """Back-propagate the scaled loss, and do what `scale_loss` does around it; takes its options."""

    @abc.abstractmethod
    def step(self, optimizers: Sequence[Optimizer], scalers: Sequence[Any]) -> StepOutcome:
        """Step each optimizer, and tell which steps overflow turned into skips."""


class AnyEngine(ApexSteps):
    """Anything with the surface of `apex.amp`: an overflow is known, and `step` replaced, when `scale_loss` ends."""

    def __init__(self, amp: Any) -> None:
        self.amp = amp

    def backward(self, loss: Tensor, optimizers: list[Optimizer], **options: Any) -> None:
        with self.amp.scale_loss(loss, optimizers, **options) as scaled_loss:
            scaled_loss.backward()

    def step(self, optimizers: Sequence[Optimizer], scalers: Sequence[Any]) -> StepOutcome:
        applied = tuple([not optimizer._amp_stash.already_patched for optimizer in optimizers])  # type: ignore[attr-defined]
        for optimizer in optimizers:
            optimizer.step()
        return FixedOutcome(applied, tuple([scaler.loss_scale() for scaler in scalers]))


class OwnEngine(ApexSteps):
    """`ampcompare.apex.amp`: flags and scales may stay on the device until somebody reads the outcome."""

    def __init__(self) -> None:
        self._backward = importlib.import_module("ampcompare.apex.amp._seeded").backward
        self._union = importlib.import_module("ampcompare.apex.amp._syncfree").union

    def backward(self, loss: Tensor, optimizers: list[Optimizer], **options: Any) -> None:
        self._backward(loss, optimizers, **options)

    def step(self, optimizers: Sequence[Optimizer], scalers: Sequence[Any]) -> StepOutcome:
        skips: list[bool | Tensor] = []
        for optimizer in optimizers:
            stash: Any = optimizer._amp_stash  # type: ignore[attr-defined]
            flags = stash.flags
            skips.append(self._union(flags) if flags and not stash.already_patched else stash.already_patched)
            optimizer.step()
        scales = [scaler.device_scale() if scaler.lives_on_device else scaler.loss_scale() for scaler in scalers]
        return _LateOutcome(skips, scales)


class _LateOutcome(StepOutcome):
    """An outcome that is read from the device, all of it in one transfer, at the first look."""

    __slots__ = ("_scales", "_skips")

    def __init__(self, skips: list[bool | Tensor], scales: list[float | Tensor]) -> None:
        self._skips = skips
        self._scales = scales

    def _read(self) -> None:
        entries = [*self._skips, *self._scales]
        tensors = [entry for entry in entries if isinstance(entry, Tensor)]
        if tensors:
            values = iter(torch.stack(tensors).tolist())
            self._skips = [next(values) != 0 if isinstance(entry, Tensor) else entry for entry in self._skips]
            self._scales = [next(values) if isinstance(entry, Tensor) else entry for entry in self._scales]

    @property
    def applied(self) -> tuple[bool, ...]:
        self._read()
        return tuple([not skip for skip in self._skips])

    @property
    def loss_scales(self) -> tuple[float, ...]:
        self._read()
        return tuple([float(scale) for scale in self._scales])


def steps_of(amp: Any) -> ApexSteps:
    """Return how to work with `amp`: our engine has a shorter way than its public surface."""
    return OwnEngine() if getattr(amp, "__name__", None) == "ampcompare.apex.amp" else AnyEngine(amp)
