"""Manual `.half()`: 16-bit weights, gradients and optimizer state, as scripts without any amp do it.

Without options there are no master weights and no overflow check: small updates round to nothing, and infinities reach
the weights. Options add masters, a dynamic loss scale, other types, other roundings. With masters, as in fp16_utils and
DeepSpeed, the optimizer holds fp32 copies instead of the 16-bit parameters: gradients are converted to fp32 and
unscaled once per step; after it the masters are rounded into the model. Without them a step may run on fp32 copies that
do not outlive it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampcompare.base.tensors.backward import run_backward
from ampcompare.base.tensors.lists import group_tensors_by_type
from ampcompare.base.tensors.loss_scale import (
    DeviceLossScale,
    is_loss_scale_exact_on_device,
    next_scale_and_good_steps,
)
from ampcompare.base.tensors.skippable_step import is_step_skippable
from ampcompare.training.parallel.replication import request_reduction_type
from ampcompare.training.precision.base import (
    FixedOutcome,
    LateStepOutcomes,
    Precision,
    Prepared,
    StepOutcome,
    applied_outcome,
    owned_params,
)
from ampcompare.training.precision.half_casts import cast_model_with_inputs_outputs
from ampcompare.training.precision.keep_fp32 import kept_in_fp32
from ampcompare.training.precision.optimizer_state import hold_state_in_type
from ampcompare.training.precision.stepped_weights import (
    COMPENSATION,
    Fp32CopiesPerStep,
    MastersWithFp32Gradients,
    MasterWeights,
    OptimizerWeights,
)
from ampcompare.training.precision.stochastic_rounding import StochasticRounding

MIN_SCALE = 1.0
# On a CPU reading a flag is free, and arithmetic on tensors costs more than on Python floats.
_DEVICE_TYPES = frozenset({"cuda"})


class Half(Precision):
    """16-bit weights in the model; inputs are cast to their type, and outputs to fp32.

    A static scale is divided out without an overflow check. With a dynamic scale a step with a non-finite gradient is
    skipped and halves the scale, down to 1, as in fp16_utils and DeepSpeed. With optimizers that obey an overflow flag
    on a GPU, scale and flags stay there.

    Args:
        device: where the model trains.
        dtype: of the weights, "float16" or "bfloat16"; the other types below are names of torch's too.
        bn_fp32: whether batch norm keeps fp32 weights and statistics.
        master_weights: whether optimizers step fp32 copies, which are kept between steps.
        loss_scale: a number for a static scale, "dynamic", or None for none.
        init_scale: the first dynamic scale.
        growth_interval: consecutive good steps that double a dynamic scale.
        keep_fp32: patterns of modules that keep fp32 weights; "" for none.
        state: type of the optimizer's state; None for that of what it steps.
        grads: "float32" to add the gradients of several backward passes in fp32, for masters; None to do so in 16 bits.
        reduce: type in which gradients are averaged over ranks; None for that of the weights.
        rounding: "nearest", or "stochastic" when steps write bfloat16 weights, without masters.
        kahan: whether each weight has a 16-bit compensation of what its steps have rounded away.
    """

    def __init__(
        self,
        *,
        device: str = "cpu",
        dtype: str = "float16",
        bn_fp32: bool = False,
        master_weights: bool = False,
        loss_scale: float | str | None = None,
        init_scale: float = 2.0**16,
        growth_interval: int = 1000,
        keep_fp32: str = "",
        state: str | None = None,
        grads: str | None = None,
        reduce: str | None = None,
        rounding: str = "nearest",
        kahan: bool = False,
    ) -> None:
        self.keep_fp32 = keep_fp32
        self.state_dtype = None if state is None else getattr(torch, state)
        self.added_state = (COMPENSATION,) if kahan else ()
        self._reduce: torch.dtype | None = None if reduce is None else getattr(torch, reduce)
        self._collects = grads is not None
        self._kahan = kahan
        self._stochastic = StochasticRounding(0) if rounding == "stochastic" else None
        self._is_wide = not master_weights and (kahan or rounding == "stochastic" or state is not None)
        self.steps_copies = master_weights or self._is_wide
        self.half_dtype: torch.dtype = getattr(torch, dtype)
        self.bn_fp32 = bn_fp32
        self.master_weights = master_weights
        self.dynamic = isinstance(loss_scale, str)
        self.growth_interval = growth_interval
        self._scale = init_scale if isinstance(loss_scale, str) else loss_scale
        self._good_steps = 0
        self._on_device: DeviceLossScale | None = None
        self._outcomes = LateStepOutcomes()
        self._inverses: dict[torch.device, tuple[float, Tensor]] = {}
        self._optimizers: list[Optimizer] = []
        self._weights: dict[int, OptimizerWeights] = {}
        # overflow flags of the optimizers whose gradients are unscaled
        self._flags: dict[int, list[Tensor]] = {}

    def _prepare(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> Prepared:
        self._cast_models(models)
        if self._stochastic is not None and self._stochastic.rounds == 0:  # else loaded
            self._stochastic.seed = torch.initial_seed() % 2**31  # by now that of the run
        for model in models:
            if self._reduce is not None:
                request_reduction_type(model, self._reduce)
        for optimizer in optimizers:
            self._weights[id(optimizer)] = self._make_optimizer_weights(optimizer)
            if self.state_dtype is not None:
                hold_state_in_type(optimizer, self.state_dtype)
        self._optimizers += optimizers
        return list(models), list(optimizers)

    def _cast_models(self, models: Sequence[nn.Module]) -> None:
        """Cast the models, and what goes into them and comes out."""
        with kept_in_fp32(models, self.keep_fp32, self.half_dtype) as self.kept_fp32:
            for model in models:
                cast_model_with_inputs_outputs(model, self.half_dtype, bn_fp32=self.bn_fp32)

    def _make_optimizer_weights(self, optimizer: Optimizer) -> OptimizerWeights:
        if self._collects:
            return MastersWithFp32Gradients(optimizer, self._reduce)
        if self.master_weights:
            return MasterWeights(optimizer)
        if self._is_wide:
            return Fp32CopiesPerStep(
                optimizer, state_dtype=self.state_dtype, stochastic=self._stochastic, kahan=self._kahan
            )
        return OptimizerWeights(optimizer)

    def scale_loss(
        self, loss: Tensor, optimizers: Sequence[Optimizer], *, loss_id: int = 0, delay_unscale: bool = False
    ) -> AbstractContextManager[Tensor]:
        self.add_up_gradients(optimizers)
        if self._scale is None:
            return nullcontext(loss)
        on_device = self._find_device_scale(loss.device)
        return nullcontext(loss * self._scale if on_device is None else on_device.scale_loss(loss))

    def backward(
        self, loss: Tensor, optimizers: Sequence[Optimizer], *, loss_id: int = 0, delay_unscale: bool = False
    ) -> None:
        if self.dynamic or self._collects:
            super().backward(loss, optimizers)
        else:
            run_backward(loss if self._scale is None else loss * self._scale)

    def add_up_gradients(self, optimizers: Sequence[Optimizer]) -> None:
        """Add up the gradients of earlier micro-batches, if in fp32, before a backward pass."""
        if self._collects:
            for optimizer in optimizers:
                self._weights[id(optimizer)].add_up_gradients()

    def masters(self, optimizer: Optimizer) -> list[tuple[Tensor, Tensor]]:
        return self._weights[id(optimizer)].weight_master_pairs()

    def _find_device_scale(self, device: torch.device) -> DeviceLossScale | None:
        """Return the scale that lives on `device`; None if the host has it."""
        if self._on_device is None and self.dynamic and not self._is_wide and device.type in _DEVICE_TYPES:
            assert self._scale is not None, "a dynamic scale has a value"
            if is_loss_scale_exact_on_device(self._scale) and all(
                is_step_skippable(optimizer) for optimizer in self._optimizers
            ):
                self._on_device = DeviceLossScale(device)
                self._on_device.set_scale_and_good_steps(self._scale, self._good_steps)
        return self._on_device

    def unscale(self, optimizer: Optimizer) -> list[Tensor]:
        self._unscale_once_per_step(optimizer)
        return owned_params(optimizer)

    def _unscale_once_per_step(self, optimizer: Optimizer) -> None:
        if id(optimizer) in self._flags:
            return
        self._weights[id(optimizer)].take_gradients_from_model()
        flags: list[Tensor] = []
        if self._scale is not None:
            grads = [param.grad for param in owned_params(optimizer) if param.grad is not None]
            flags = self._divide_by_scale(grads, self._scale)
        self._flags[id(optimizer)] = flags

    def _divide_by_scale(self, grads: list[Tensor], scale: float) -> list[Tensor]:
        """Divide by the scale; if it is dynamic, return scalars that are not 0 if a gradient is not finite."""
        flags = []
        for same_type in group_tensors_by_type(grads):
            if self.dynamic:
                flags.append(
                    _unscale_and_return_flag(same_type, self._inverse_scale_like(scale, same_type[0]))
                )
            else:
                torch._foreach_div_(same_type, scale)
        return flags

    def _inverse_scale_like(self, scale: float, grad: Tensor) -> float | Tensor:
        """Return what gradients like `grad` are multiplied by; a scalar on their device is kept for the next steps."""
        if self._on_device is not None:
            return self._on_device.inverse
        if grad.dtype is torch.bfloat16:
            return 1 / scale
        kept_scale, inverse = self._inverses.get(grad.device, (None, None))
        if inverse is None or kept_scale != scale:
            inverse = torch.full((), 1 / scale, device=grad.device)
            self._inverses[grad.device] = scale, inverse
        return inverse

    def has_overflow(self, optimizer: Optimizer) -> bool:
        """Return whether a gradient that was unscaled is not finite, under a dynamic scale; waits for the device."""
        return self._read_overflow_flags([optimizer])[0]

    def _read_overflow_flags(self, optimizers: Sequence[Optimizer]) -> list[bool]:
        """Return for each optimizer whether one of its flags is set; all of them are read in one transfer."""
        flags = [self._flags[id(optimizer)] for optimizer in optimizers]
        flat = [flag for some in flags for flag in some]
        if len({flag.device for flag in flat}) > 1:
            flat = [flag.to(flat[0].device) for flag in flat]
        values = torch.stack(flat).tolist() if len(flat) > 1 else [flag.item() for flag in flat]
        ends = list(accumulate(map(len, flags)))
        return [any(values[end - len(some) : end]) for some, end in zip(flags, ends, strict=True)]

    def step(self, *optimizers: Optimizer) -> StepOutcome:
        for optimizer in optimizers:
            self._unscale_once_per_step(optimizer)
        if not self.dynamic:
            for optimizer in optimizers:
                self.step_or_skip_unscaled(optimizer, are_gradients_finite=True)
            self._outcome = applied_outcome(len(optimizers), self.loss_scales())
            return self._outcome
        if self._on_device is not None:
            return self._step_without_reading_flags(optimizers, self._on_device)
        applied = tuple([not overflow for overflow in self._read_overflow_flags(optimizers)])
        for optimizer, good in zip(optimizers, applied, strict=True):
            self.step_or_skip_unscaled(optimizer, are_gradients_finite=good)
        self._update_scale(overflow=not all(applied))
        return FixedOutcome(applied, self.loss_scales())

    def why_no_cuda_graph(self, optimizers: Sequence[Optimizer]) -> str | None:
        is_plain = not (self.dynamic or self.steps_copies)
        return None if is_plain else super().why_no_cuda_graph(optimizers)

    def step_or_skip_unscaled(self, optimizer: Optimizer, *, are_gradients_finite: bool) -> Any:
        """Step an optimizer whose gradients are unscaled, or skip it; the scale stays. Return what its step does.

        Args:
            optimizer: one of those that were prepared.
            are_gradients_finite: whether the gradients are finite; else the step is skipped.
        """
        self._forget_flags_of_stepped([optimizer])
        if not are_gradients_finite:
            self._weights[id(optimizer)].end_update_without_step()
            return None
        result = optimizer.step()
        self._weights[id(optimizer)].give_weights_to_model()
        return result

    def _step_without_reading_flags(
        self, optimizers: Sequence[Optimizer], scale: DeviceLossScale
    ) -> StepOutcome:
        """Step without reading a flag: the optimizers leave weights and state as they are where theirs is set."""
        flags = [
            _nonzero_scalar_if_any_flag(self._flags[id(optimizer)], like=scale.inverse)
            for optimizer in optimizers
        ]
        self._forget_flags_of_stepped(optimizers)
        for optimizer, flag in zip(optimizers, flags, strict=True):
            optimizer.found_inf, optimizer.grad_scale = flag, None  # type: ignore[attr-defined]
            try:
                optimizer.step()
            finally:
                del optimizer.found_inf, optimizer.grad_scale  # type: ignore[attr-defined]
            self._weights[id(optimizer)].give_weights_to_model()  # after a skip the same weights again
        scale.update(_nonzero_scalar_if_any_flag(flags, like=scale.inverse), self.growth_interval, MIN_SCALE)
        moved = scale.copy()

        def resolve(values: list[float]) -> tuple[tuple[bool, ...], tuple[float, ...]]:
            return tuple([value == 0 for value in values[:-1]]), (values[-1],)

        return self._outcomes.outcome_of_step([*flags, moved], resolve)

    def _forget_flags_of_stepped(self, optimizers: Sequence[Optimizer]) -> None:
        for optimizer in optimizers:
            self._flags.pop(id(optimizer), None)  # none where a step has failed before its first pass

    def _update_scale(self, *, overflow: bool) -> None:
        """Move the dynamic scale."""
        assert self._scale is not None
        self._scale, self._good_steps = next_scale_and_good_steps(
            self._scale,
            self._good_steps,
            overflow=overflow,
            growth_interval=self.growth_interval,
            min_scale=MIN_SCALE,
        )

    def _read_device_scale(self) -> None:
        """Read scale and count from the device, if they live there."""
        if self._on_device is not None:
            self._scale, self._good_steps = self._on_device.read_scale_and_good_steps()

    def loss_scales(self) -> tuple[float, ...]:
        self._read_device_scale()
        return () if self._scale is None else (self._scale,)

    def state_dict(self) -> dict[str, Any]:
        self._read_device_scale()
        state: dict[str, Any] = {} if self._scale is None else {"loss_scale": self._scale}
        if self.dynamic:
            state["good_steps"] = self._good_steps
        if self._stochastic is not None:
            state |= {"rounding_seed": self._stochastic.seed, "rounding_steps": self._stochastic.rounds}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "loss_scale" in state:
            self._scale = float(state["loss_scale"])
            self._good_steps = int(state.get("good_steps", 0))
            self._on_device = None
        if self._stochastic is not None and "rounding_steps" in state:
            self._stochastic.seed, self._stochastic.rounds = (
                int(state["rounding_seed"]),
                int(state["rounding_steps"]),
            )


def _nonzero_scalar_if_any_flag(flags: Sequence[Tensor], *, like: Tensor) -> Tensor:
    """Return a scalar on the device of `like` that is not 0 if one of these is not."""
    if not flags:
        return torch.zeros_like(like)
    union = flags[0].to(like.device)
    for flag in flags[1:]:
        union = torch.maximum(union, flag.to(like.device))
    return union


def _unscale_and_return_flag(grads: list[Tensor], inverse: float | Tensor) -> Tensor:
    """Multiply gradients of one dtype and device, and return a scalar that is not 0 if one is not finite.

    The inverse scale is an fp32 scalar; for bfloat16 a number, or a scalar that is a power of two.
    """
    device = grads[0].device
    if grads[0].dtype is torch.bfloat16:  # torch's own kernel does not support bfloat16 on CUDA
        filled = [grad for grad in grads if grad.numel()]  # torch raises on the maximum of no elements
        largest = (
            torch.stack(torch._foreach_norm(filled, math.inf)) if filled else torch.zeros(1, device=device)
        )
        flag = ~largest.isfinite().all()
        if isinstance(inverse, Tensor):
            inverse = inverse.to(device, torch.bfloat16)
        torch._foreach_mul_(grads, inverse)
        return flag.float()
    flag = torch.zeros((), device=device)
    assert isinstance(inverse, Tensor), "a number is for bfloat16"
    torch._amp_foreach_non_finite_check_and_unscale_(grads, flag, inverse.to(device))
    return flag
