"""How the `apex` backend runs backward passes and detects skipped steps: with the real Apex, and with our engine."""

from __future__ import annotations

import abc
import importlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ampcompare.precision.base import FixedOutcome, StepOutcome
from ampcompare.precision.late import LateOutcomes

__all__ = ["ApexModuleEngine", "ApexSteps", "CompatEngine", "steps_of"]


class ApexSteps(abc.ABC):
    """Backward passes and steps of one implementation of `apex.amp`."""

    @abc.abstractmethod
    def backward(self, loss: Tensor, optimizers: list[Optimizer], loss_id: int, delay_unscale: bool) -> None:
        """Back-propagate the scaled loss inside `scale_loss`."""

    @abc.abstractmethod
    def step(self, optimizers: Sequence[Optimizer], scalers: Sequence[Any]) -> StepOutcome:
        """Step each optimizer; the outcome reports which steps an overflow skipped."""

    def unrecordable(self, optimizers: Sequence[Optimizer], scalers: Sequence[Any]) -> str | None:
        """Return why a step cannot be recorded as a CUDA graph; None if it can."""
        return "the real Apex reads its overflow flag on the host"

    def recording(self) -> AbstractContextManager[None]:
        """Return the context in which a step is recorded."""
        return nullcontext()

    def repeated(self, scalers: Sequence[Any]) -> StepOutcome:
        """Return the outcome of a replay, just launched, of the recorded step."""
        raise NotImplementedError


class ApexModuleEngine(ApexSteps):
    """Anything with the API of `apex.amp`: when `scale_loss` exits, overflow is known and `step` replaced."""

    def __init__(self, amp: Any) -> None:
        self.amp = amp

    def backward(self, loss: Tensor, optimizers: list[Optimizer], loss_id: int, delay_unscale: bool) -> None:
        with self.amp.scale_loss(loss, optimizers, loss_id=loss_id, delay_unscale=delay_unscale) as scaled_loss:
            scaled_loss.backward()

    def step(self, optimizers: Sequence[Optimizer], scalers: Sequence[Any]) -> StepOutcome:
        applied = tuple([not optimizer._amp_stash.already_patched for optimizer in optimizers])  # type: ignore[attr-defined]
        for optimizer in optimizers:
            optimizer.step()
        return FixedOutcome(applied, tuple([scaler.loss_scale() for scaler in scalers]))


class CompatEngine(ApexSteps):
    """`ampcompare.apex.amp`: flags and scales may stay on the device until the outcome is read."""

    def __init__(self) -> None:
        self._backward = importlib.import_module("ampcompare.apex.amp._engine.scaled_loss").backward
        device_skip = importlib.import_module("ampcompare.apex.amp._engine.device_skip")
        self._union, self._can_do_without_host = device_skip.union, device_skip.can_do_without_host
        self._state = importlib.import_module("ampcompare.apex.amp")._amp_state
        self._is_recording = False
        self._recorded: tuple[list[bool | Tensor], list[float | Tensor]] = [], []
        self._outcomes = LateOutcomes()

    def backward(self, loss: Tensor, optimizers: list[Optimizer], loss_id: int, delay_unscale: bool) -> None:
        self._backward(loss, optimizers, loss_id, delay_unscale)

    def step(self, optimizers: Sequence[Optimizer], scalers: Sequence[Any]) -> StepOutcome:
        skips: list[bool | Tensor] = []
        for optimizer in optimizers:
            stash: Any = optimizer._amp_stash  # type: ignore[attr-defined]
            flags = stash.flags
            skips.append(self._union(flags) if flags and not stash.already_patched else stash.already_patched)
            optimizer.step()
        scales = [scaler.device_scale() if scaler.lives_on_device else scaler.loss_scale() for scaler in scalers]
        if self._is_recording:
            self._recorded = skips, scales
            return FixedOutcome((), ())
        return self._outcome(skips, scales)

    def _outcome(self, skips: list[bool | Tensor], scales: list[float | Tensor]) -> StepOutcome:
        entries = [*skips, *scales]
        on_device = [entry for entry in entries if isinstance(entry, Tensor)]

        def resolve(values: list[float]) -> tuple[tuple[bool, ...], tuple[float, ...]]:
            from_device = iter(values)
            on_host = [next(from_device) if isinstance(entry, Tensor) else float(entry) for entry in entries]
            return tuple([skip == 0 for skip in on_host[: len(skips)]]), tuple(on_host[len(skips) :])

        return self._outcomes.add(on_device, resolve) if on_device else FixedOutcome(*resolve([]))

    def unrecordable(self, optimizers: Sequence[Optimizer], scalers: Sequence[Any]) -> str | None:
        if self._state.kernels is not None:
            return "Triton's kernels read addresses that a graph cannot keep"
        if any(scaler.dynamic for scaler in scalers):
            if not all(self._can_do_without_host(optimizer) for optimizer in optimizers):
                return "a step hook, or an option of the optimizer, makes this arm read its overflow flag on the host"
            for scaler in scalers:
                scaler.record_passes()
        return None

    @contextmanager
    def recording(self) -> Iterator[None]:
        self._is_recording = True
        try:
            yield
        finally:
            self._is_recording = False

    def repeated(self, scalers: Sequence[Any]) -> StepOutcome:
        for scaler in scalers:
            scaler.pass_repeated()
        skips, scales = self._recorded
        return self._outcome([_copy(skip) for skip in skips], [_copy(scale) for scale in scales])


def _copy(entry: Any) -> Any:
    return entry.clone() if isinstance(entry, Tensor) else entry


def steps_of(amp: Any) -> ApexSteps:
    """Return the engine for `amp`: ampcompare's own has a faster path than its public API."""
    return CompatEngine() if getattr(amp, "__name__", None) == "ampcompare.apex.amp" else ApexModuleEngine(amp)
