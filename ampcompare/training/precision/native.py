"""torch.amp as a user would write it: autocast around the forward pass, and GradScaler for fp16."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampcompare.base.tensors.cuda_casts import AS_IT_IS, TwoNestedContexts, cast_as_on_cuda
from ampcompare.base.tensors.loss_scale import FLOAT32_MAX, next_scale_and_good_steps
from ampcompare.base.tensors.skippable_step import is_step_skippable
from ampcompare.training.parallel.replication import request_reduction_type
from ampcompare.training.precision.base import (
    LateStepOutcomes,
    Precision,
    Prepared,
    StepOutcome,
    UnscaleOnce,
    applied_outcome,
)
from ampcompare.training.precision.half import Half
from ampcompare.training.precision.half_casts import cast_weights
from ampcompare.training.precision.keep_fp32 import kept_in_fp32, make_autocast_off_factory
from ampcompare.training.precision.optimizer_state import hold_state_in_type


class _ScaleTracker:
    """The scale after each update, computed from the overflow flags by GradScaler's own rule, in order.

    `GradScaler.get_scale` would wait for the device at every step; the flags of many steps can be read together, later.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self.scaler = scaler
        self.scale = scaler.get_scale()
        self.tracker = int(scaler._get_growth_tracker())
        self._outcomes = LateStepOutcomes()

    def outcome_of_step_flags(self, flags: list[Tensor | None]) -> StepOutcome:
        """Return the outcome of a step, from a scalar for each optimizer that is not 0 after an overflow."""
        on_device = [flag for flag in flags if flag is not None]

        def resolve(values: list[float]) -> tuple[tuple[bool, ...], tuple[float, ...]]:
            overflow_values = iter(values)
            overflows = [flag is not None and next(overflow_values) != 0 for flag in flags]
            self._move_scale(any(overflows))
            return tuple([not overflow for overflow in overflows]), (self.scale,)

        return self._outcomes.outcome_of_step(on_device, resolve)

    def _move_scale(self, overflow: bool) -> None:
        moved, self.tracker = next_scale_and_good_steps(
            self.scale,
            self.tracker,
            overflow=overflow,
            growth_interval=self.scaler.get_growth_interval(),
            growth_factor=self.scaler.get_growth_factor(),
            backoff_factor=self.scaler.get_backoff_factor(),
        )
        if moved <= FLOAT32_MAX:  # as GradScaler, which keeps a scale that would become infinite
            self.scale = float(np.float32(moved))  # in which GradScaler keeps its scale


class Native(UnscaleOnce):
    """`torch.autocast` in fp16 or bf16; the loss is scaled in fp16 only, since bf16 has the range of fp32."""

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
        keep_fp32: str = "",
        state: str | None = None,
        reduce: str | None = None,
    ) -> None:
        super().__init__()
        self.state_dtype = None if state is None else getattr(torch, state)
        self._reduce: torch.dtype | None = None if reduce is None else getattr(torch, reduce)
        self.keep_fp32 = keep_fp32
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
        self._replay = _ScaleTracker(self.scaler) if self._enabled else None
        self._recording = False
        self._recorded: list[Tensor | None] = []  # the overflow flags of the recorded step

    def _prepare(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> Prepared:
        """Change what autocast does not: modules that stay in fp32, the type of reductions, and that of states."""
        with kept_in_fp32(
            models, self.keep_fp32, None, make_autocast_off_factory(self.device_type)
        ) as self.kept_fp32:
            for model in models:
                if self._reduce is not None:
                    request_reduction_type(model, self._reduce)
        if self.state_dtype is not None:
            for optimizer in optimizers:
                hold_state_in_type(optimizer, self.state_dtype)
        return list(models), list(optimizers)

    def autocast(self) -> AbstractContextManager[None]:
        return _autocast_block(self)

    def scale_loss(
        self, loss: Tensor, optimizers: Sequence[Optimizer], *, loss_id: int = 0, delay_unscale: bool = False
    ) -> AbstractContextManager[Tensor]:
        return _block_with_casts_as_on_cuda(
            self, nullcontext(self.scaler.scale(loss) if self._enabled else loss)
        )

    def _unscale(self, optimizer: Optimizer) -> None:
        if self._enabled:
            self.scaler.unscale_(optimizer)

    def step(self, *optimizers: Optimizer) -> StepOutcome:
        if self._replay is None:
            self._note_optimizers_were_stepped(optimizers)
            return super().step(*optimizers)
        for optimizer in optimizers:
            # One pass over the gradients: else the scaler checks them, and `step` unscales.
            if is_step_skippable(optimizer):
                self.unscale(optimizer)
            self.scaler.step(optimizer)
        shared = len(self.scaler._per_optimizer_states) > 1
        flags = [self._overflow_flag(optimizer, shared=shared) for optimizer in optimizers]
        self.scaler.update()  # once: an update between two steps would unscale the second by the wrong scale
        self._unscaled.clear()
        if self._recording:
            self._recorded = flags
            return applied_outcome(len(optimizers))
        return self._replay.outcome_of_step_flags(flags)

    def why_no_cuda_graph(self, optimizers: Sequence[Optimizer]) -> str | None:
        return (
            None if self.state_dtype is None else "the state changes its type, and its memory, at each step"
        )

    @contextmanager
    def capturing(self) -> Iterator[None]:
        self._recording = True
        try:
            yield
        finally:
            self._recording = False

    def replayed_outcome(self) -> StepOutcome:
        if self._replay is None:
            return super().replayed_outcome()
        return self._replay.outcome_of_step_flags(
            [None if flag is None else flag.clone() for flag in self._recorded]
        )

    def _overflow_flag(self, optimizer: Optimizer, *, shared: bool) -> Tensor | None:
        """Return the device scalar that is not 0 if a gradient of `optimizer` overflowed, without reading it."""
        flags: list[Tensor] = list(
            self.scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
        )
        if not flags:
            return None
        if len(flags) > 1:
            return torch.stack([flag.to(flags[0].device) for flag in flags]).amax()
        # with several, update() adds them to the first, in place
        return flags[0].clone() if shared else flags[0]

    def loss_scales(self) -> tuple[float, ...]:
        return (self.scaler.get_scale(),) if self._enabled else ()

    def state_dict(self) -> dict[str, Any]:
        return self.scaler.state_dict() if self._enabled else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._enabled:
            self.scaler.load_state_dict(dict(state))
            self._replay = _ScaleTracker(self.scaler)


def make_native(
    *,
    device: str = "cpu",
    dtype: str = "float16",
    weights: str = "float32",
    masters: str = "none",
    **options: Any,
) -> Precision:
    """Build the backend of a `native` arm: over fp32 weights, or over bfloat16 ones."""
    if weights == "float32":
        return Native(device=device, dtype=dtype, **options)
    return _AutocastOverBf16Weights(device=device, master_weights=masters == "float32", **options)


class _AutocastOverBf16Weights(Half):
    """`torch.autocast` in bfloat16 over weights that are stored in it, except those of batch norm."""

    key = "scaler"

    def __init__(self, *, device: str = "cpu", **options: Any) -> None:
        super().__init__(dtype="bfloat16", bn_fp32=True, **options)
        self.device_type = torch.device(device).type

    def _cast_models(self, models: Sequence[nn.Module]) -> None:
        with kept_in_fp32(
            models, self.keep_fp32, None, make_autocast_off_factory(self.device_type)
        ) as self.kept_fp32:
            for model in models:
                cast_weights(model, self.half_dtype, bn_fp32=self.bn_fp32)

    def autocast(self) -> AbstractContextManager[None]:
        return _autocast_block(self)

    def backward(
        self, loss: Tensor, optimizers: Sequence[Optimizer], *, loss_id: int = 0, delay_unscale: bool = False
    ) -> None:
        with cast_as_on_cuda(self.device_type, self.autocast_lists):
            super().backward(loss, optimizers, loss_id=loss_id, delay_unscale=delay_unscale)

    def scale_loss(
        self, loss: Tensor, optimizers: Sequence[Optimizer], *, loss_id: int = 0, delay_unscale: bool = False
    ) -> AbstractContextManager[Tensor]:
        return _block_with_casts_as_on_cuda(
            self, super().scale_loss(loss, optimizers, loss_id=loss_id, delay_unscale=delay_unscale)
        )


def _autocast_block(precision: Native | _AutocastOverBf16Weights) -> AbstractContextManager[None]:
    return _block_with_casts_as_on_cuda(
        precision, torch.autocast(precision.device_type, dtype=precision.half_dtype)
    )


def _block_with_casts_as_on_cuda(
    precision: Native | _AutocastOverBf16Weights, block: AbstractContextManager[Any]
) -> AbstractContextManager[Any]:
    """Return a context in which casts are those of CUDA; in a backward pass, of what it computes again."""
    casts = cast_as_on_cuda(precision.device_type, precision.autocast_lists)
    return block if casts is AS_IT_IS else TwoNestedContexts(casts, block)
