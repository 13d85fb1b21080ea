"""torch.amp as a user would write it: autocast around the forward pass, and GradScaler for fp16."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampcompare.precision.base import Precision, StepOutcome, all_applied, owned_params, refuse_wrapped

__all__ = ["Native"]

MOST_PENDING = 1024
FLOAT32_MAX = torch.finfo(torch.float32).max


class _ScaleReplay:
    """The scale after each update, worked out from the overflow flags by GradScaler's own rule, in order.

    `GradScaler.get_scale` would wait for the device at every step; the flags can be read together, much later.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self.scaler = scaler
        self.scale = scaler.get_scale()
        self.tracker = int(scaler._get_growth_tracker())
        self.pending: list[_ReplayedOutcome] = []

    def add(self, flags: list[Tensor | None]) -> StepOutcome:
        outcome = _ReplayedOutcome(self, flags)
        self.pending.append(outcome)
        if len(self.pending) > MOST_PENDING:  # a loop that never reads its outcomes must not hold them for ever
            self.resolve()
        return outcome

    def resolve(self) -> None:
        """Read all pending flags in one transfer and settle the outcomes."""
        tensors = [flag for outcome in self.pending for flag in outcome.flags if flag is not None]
        values = iter(torch.stack(tensors).tolist() if tensors else ())
        for outcome in self.pending:
            overflows = [flag is not None and next(values) != 0 for flag in outcome.flags]
            self._update(any(overflows))
            outcome.settle(tuple(not overflow for overflow in overflows), (self.scale,))
        self.pending.clear()

    def _update(self, overflow: bool) -> None:
        if overflow:
            self.scale = _rounded(self.scale * self.scaler.get_backoff_factor())
            self.tracker = 0
            return
        self.tracker += 1
        if self.tracker == self.scaler.get_growth_interval():
            grown = self.scale * self.scaler.get_growth_factor()
            self.scale = _rounded(grown) if grown <= FLOAT32_MAX else self.scale
            self.tracker = 0


def _rounded(value: float) -> float:
    """Round to fp32, in which GradScaler keeps its scale."""
    return struct.unpack("f", struct.pack("f", value))[0]  # type: ignore[no-any-return]


class _ReplayedOutcome(StepOutcome):
    __slots__ = ("_applied", "_loss_scales", "_replay", "flags")

    def __init__(self, replay: _ScaleReplay, flags: list[Tensor | None]) -> None:
        self._replay: _ScaleReplay | None = replay
        self.flags = flags

    def settle(self, applied: tuple[bool, ...], loss_scales: tuple[float, ...]) -> None:
        self._applied, self._loss_scales = applied, loss_scales
        self._replay = None
        self.flags = []

    @property
    def applied(self) -> tuple[bool, ...]:
        if self._replay is not None:
            self._replay.resolve()
        return self._applied

    @property
    def loss_scales(self) -> tuple[float, ...]:
        if self._replay is not None:
            self._replay.resolve()
        return self._loss_scales


class Native(Precision):
    """`torch.autocast` in fp16 or bf16; the loss is scaled in fp16 only, since bf16 has the range of fp32.

    Args:
        device: the device type to autocast for, with or without an index.
        dtype: float16 or bfloat16.
        init_scale, growth_factor, backoff_factor, growth_interval: as in `torch.amp.GradScaler`.
    """

    key = "scaler"

    def __init__(
        self,
        *,
        device: str = "cpu",
        dtype: str = "float16",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        self.half_dtype: torch.dtype = getattr(torch, dtype)
        self.device_type = torch.device(device).type
        self.scaler = torch.amp.GradScaler(
            self.device_type,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=dtype == "float16",
        )
        self._enabled = self.scaler.is_enabled()
        self._replay = _ScaleReplay(self.scaler) if self._enabled else None
        self._unscaled: set[int] = set()

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> tuple[list[nn.Module], list[Optimizer]]:
        refuse_wrapped(models)
        return list(models), list(optimizers)

    def autocast(self) -> AbstractContextManager[None]:
        return torch.autocast(self.device_type, dtype=self.half_dtype)

    def scale_loss(
        self, loss: Tensor, optimizers: Sequence[Optimizer], *, loss_id: int = 0, delay_unscale: bool = False
    ) -> AbstractContextManager[Tensor]:
        return nullcontext(self.scaler.scale(loss) if self._enabled else loss)

    def backward(self, loss: Tensor, optimizers: Sequence[Optimizer], **options: Any) -> None:
        (self.scaler.scale(loss) if self._enabled else loss).backward()

    def unscale(self, optimizer: Optimizer) -> list[Tensor]:
        if self._enabled and id(optimizer) not in self._unscaled:
            self.scaler.unscale_(optimizer)
            self._unscaled.add(id(optimizer))
        return owned_params(optimizer)

    def step(self, *optimizers: Optimizer) -> StepOutcome:
        if self._replay is None:
            for optimizer in optimizers:
                optimizer.step()
            return all_applied(len(optimizers))
        for optimizer in optimizers:
            self.scaler.step(optimizer)
        flags = [self._overflow_flag(optimizer, shared=len(optimizers) > 1) for optimizer in optimizers]
        self.scaler.update()  # once: an update between two steps would unscale the second by the wrong scale
        self._unscaled.clear()
        return self._replay.add(flags)

    def _overflow_flag(self, optimizer: Optimizer, *, shared: bool) -> Tensor | None:
        """Return the device scalar that is not 0 where a gradient of `optimizer` overflowed, without reading it."""
        flags: list[Tensor] = list(self.scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())
        if not flags:
            return None
        if len(flags) > 1:
            return torch.stack([flag.to(flags[0].device) for flag in flags]).amax()
        return flags[0].clone() if shared else flags[0]  # with several, update() sums them up in the first, in place

    def loss_scales(self) -> tuple[float, ...]:
        return (self.scaler.get_scale(),) if self._enabled else ()

    def state_dict(self) -> dict[str, Any]:
        return self.scaler.state_dict() if self._enabled else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._enabled:
            self.scaler.load_state_dict(dict(state))
            self._replay = _ScaleReplay(self.scaler)
