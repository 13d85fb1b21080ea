"""Manual `.half()`: 16-bit weights, gradients and optimizer state, as scripts without any amp do it.

Without options there are no master weights and no overflow check: small updates round to nothing, and infinities reach
the weights. Options add masters, a dynamic loss scale, other types, other roundings. With masters, as in fp16_utils and
DeepSpeed, the optimizer holds fp32 copies instead of the 16-bit parameters: gradients are converted to fp32 and
unscaled once per step; after it the masters are rounded into the model. Without them a step may run on fp32 copies that
do not outlive it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from ampcompare.base.tensors.backward import run_backward
from ampcompare.base.tensors.lists import copy_tensors_by_dtype, group_tensors_by_type
from ampcompare.base.tensors.loss_scale import DeviceLossScale, is_exact_on_device, next_scale_and_steps
from ampcompare.base.tensors.skippable_step import is_step_skippable
from ampcompare.base.tensors.tree import cast_floating_tensors
from ampcompare.training.parallel.replication import average_over_ranks_in, note_reduction_type
from ampcompare.training.precision.base import (
    FixedOutcome,
    LateOutcomes,
    Precision,
    Prepared,
    StepOutcome,
    applied_outcome,
    owned_params,
)
from ampcompare.training.precision.keep_fp32 import kept_in_fp32
from ampcompare.training.precision.replaced_forward import ReplacedForward

CASTS = {torch.float16: Tensor.half, torch.bfloat16: Tensor.bfloat16, torch.float64: Tensor.double}
COMPENSATION = "compensation"
MIN_SCALE = 1.0
# On a CPU reading a flag is free, and arithmetic on tensors costs more than on Python floats.
_DEVICE_TYPES = frozenset({"cuda"})
LOW_BITS = 16  # of an fp32 number, which its bfloat16 lacks


def cast_model(model: nn.Module, dtype: torch.dtype, *, bn_fp32: bool) -> None:
    """Cast the parameters and buffers of `model` in place, and from now on its inputs and outputs.

    Float64 is for an evaluation. `bn_fp32` keeps the weights and statistics of batch norm in fp32.
    """
    cast_weights(model, dtype, bn_fp32=bn_fp32)
    _CastForward(model, model.forward, dtype).install()


def cast_weights(model: nn.Module, dtype: torch.dtype, *, bn_fp32: bool) -> None:
    """Cast the parameters and buffers of `model` in place; the arguments are those of `cast_model`."""
    model.to(dtype)
    if bn_fp32:
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.float()
    # what a script has set by `grad_dtype` of torch 2.13 is the arm's to decide
    for param in model.parameters():
        if getattr(param, "grad_dtype", param.dtype) is not param.dtype:
            param.grad_dtype = param.dtype


class _CastForward(ReplacedForward):
    """Casts what goes into a model to one floating type, and what comes out to fp32."""

    def __init__(self, module: nn.Module, original: Callable[..., Any], dtype: torch.dtype) -> None:
        super().__init__(module, original)
        self.dtype = dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        dtype = self.dtype
        if len(args) == 1 and not kwargs and args[0].__class__ is Tensor:  # the usual call, without recursion
            value = args[0]
            if value.dtype is not dtype and value.is_floating_point():
                value = CASTS[dtype](value)  # twice as fast as `to`, which parses its arguments at each call
            output = self.original(value)
        else:
            output = self.original(
                *cast_floating_tensors(args, dtype), **cast_floating_tensors(kwargs, dtype)
            )
        if output.__class__ is Tensor:
            return output if output.dtype is torch.float32 else output.float()
        return cast_floating_tensors(output, torch.float32)


def cast_optimizer_state(optimizer: Optimizer) -> None:
    """Cast the state of an optimizer, if any, to the current dtypes of its parameters."""
    if optimizer.state:
        optimizer.load_state_dict(optimizer.state_dict())


class _OptimizerWeights:
    """The weights of the model as they are; what stands in their place overrides these methods."""

    def __init__(self, optimizer: Optimizer) -> None:
        cast_optimizer_state(optimizer)

    def add_up_gradients(self) -> None:
        """Add up the gradients so far, before those of another backward pass come."""

    def take_gradients(self) -> None:
        """Give what the optimizer steps the gradients of the model."""

    def give_weights(self) -> None:
        """Give the model the weights of a step."""

    def end_without_step(self) -> None:
        """End an update whose step is skipped."""

    def weight_master_pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return each weight of the model in whose place the optimizer has another tensor at present, with that."""
        return []


class _MasterWeights(_OptimizerWeights):
    """fp32 master weights that replace the 16-bit parameters of an optimizer, and the copies between the two.

    Parameters of groups that are added later get masters at the next step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._params: list[Tensor] = []
        self._masters: list[Tensor] = []
        self._num_groups = 0
        self._make_masters()

    @torch.no_grad()
    def _make_masters(self) -> None:
        optimizer = self._optimizer
        for group in optimizer.param_groups[self._num_groups :]:
            for index, param in enumerate(group["params"]):
                if param.dtype is torch.float32:
                    continue
                master = param.detach().float().requires_grad_(param.requires_grad)
                self._params.append(param)
                self._masters.append(master)
                group["params"][index] = master
                if param in optimizer.state:
                    optimizer.state[master] = optimizer.state.pop(param)
        self._num_groups = len(optimizer.param_groups)

    def weight_master_pairs(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self._params, self._masters, strict=True))

    @torch.no_grad()
    def take_gradients(self) -> None:
        if len(self._optimizer.param_groups) != self._num_groups:
            self._make_masters()
        narrow: list[Tensor] = []
        wide: list[Tensor] = []
        for param, master in zip(self._params, self._masters, strict=True):
            if param.grad is not None:
                narrow.append(param.grad)
                wide.append(torch.empty_like(param.grad, dtype=torch.float32))
                master.grad, param.grad = wide[-1], None
        copy_tensors_by_dtype(wide, narrow)

    @torch.no_grad()
    def give_weights(self) -> None:
        copy_tensors_by_dtype(self._params, self._masters)


class MastersWithFp32Gradients(_MasterWeights):
    """Masters whose gradients are sums in fp32: that of each micro-batch is added before the next one comes.

    A wrapper for several processes reduces the gradients of the last micro-batch. The sum of the earlier ones, which it
    left alone under `no_sync`, is reduced here, once, in the type `reduce` or fp32.
    """

    def __init__(self, optimizer: Optimizer, reduce: torch.dtype | None = None) -> None:
        super().__init__(optimizer)
        self._reduce = reduce or torch.float32

    @torch.no_grad()
    def add_up_gradients(self) -> None:
        for param, master in zip(self._params, self._masters, strict=True):
            if param.grad is not None:
                grad = param.grad.float()
                master.grad = grad if master.grad is None else master.grad.add_(grad)
                param.grad = None

    @torch.no_grad()
    def take_gradients(self) -> None:
        if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
            collected: list[Tensor] = [master.grad for master in self._masters if master.grad is not None]
            average_over_ranks_in(self._reduce, collected)
        if len(self._optimizer.param_groups) != self._num_groups:
            self._make_masters()
        self.add_up_gradients()


class Fp32CopiesPerStep(_OptimizerWeights):
    """fp32 copies of an optimizer's 16-bit weights, made for each step; its state has `state_dtype` between steps.

    With `kahan` what rounding has cut off is kept as `compensation` in the state of the weight, and the next step
    begins from the sum of both. That is Kahan's compensated summation of the updates.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        state_dtype: torch.dtype | None = None,
        stochastic: StochasticRounding | None = None,
        kahan: bool = False,
    ) -> None:
        self._optimizer = optimizer
        self._state_dtype = state_dtype
        self._stochastic = stochastic
        self._kahan = kahan
        self._places: list[tuple[list[Tensor], int]] = []
        self._params: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._compensations: list[Tensor | None] = []
        for group in optimizer.param_groups:
            for param in group["params"]:
                _cast_state_of_parameter(optimizer, param, state_dtype or param.dtype)

    def weight_master_pairs(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self._params, self._copies, strict=True))

    @torch.no_grad()
    def take_gradients(self) -> None:
        for group in self._optimizer.param_groups:
            held = group["params"]
            for index, param in enumerate(held):
                if param.dtype is not torch.float32 and param.requires_grad:
                    self._put_fp32_copy(held, index, param)

    def _put_fp32_copy(self, held: list[Tensor], index: int, param: Tensor) -> None:
        """Put an fp32 copy with the weight's state and gradient in its place in a group of the optimizer."""
        copy = param.detach().float()
        entries = self._optimizer.state.pop(param, {})
        # Out of the optimizer's sight: it takes a state without its own entries for one that it has made.
        compensation = entries.pop(COMPENSATION, None)
        if compensation is not None:
            copy.add_(compensation)
        if entries:
            self._optimizer.state[copy] = entries
            _cast_state_of_parameter(self._optimizer, copy, torch.float32)
        if param.grad is not None:
            copy.grad, param.grad = param.grad.float(), None
        held[index] = copy.requires_grad_()
        self._places.append((held, index))
        self._params.append(param)
        self._copies.append(copy)
        self._compensations.append(compensation)

    @torch.no_grad()
    def give_weights(self) -> None:
        if self._stochastic is not None:
            self._stochastic.round_into(self._params, self._copies)
        else:
            copy_tensors_by_dtype(self._params, self._copies)
        if self._kahan:
            for number, (param, copy) in enumerate(zip(self._params, self._copies, strict=True)):
                if copy.grad is not None:
                    self._compensations[number] = (copy.detach() - param).to(param.dtype)
        self.end_without_step()

    def end_without_step(self) -> None:
        rows = zip(self._places, self._params, self._copies, self._compensations, strict=True)
        for (held, index), param, copy, compensation in rows:
            held[index] = param
            _cast_state_of_parameter(self._optimizer, copy, self._state_dtype or param.dtype)
            entries = self._optimizer.state.pop(copy, {})
            if compensation is not None:
                entries[COMPENSATION] = compensation
            if entries:
                self._optimizer.state[param] = entries
        for kept in (self._places, self._params, self._copies, self._compensations):
            kept.clear()


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
        self._outcomes = LateOutcomes()
        self._inverses: dict[torch.device, tuple[float, Tensor]] = {}
        self._optimizers: list[Optimizer] = []
        self._weights: dict[int, _OptimizerWeights] = {}
        # overflow flags of the optimizers whose gradients are unscaled
        self._flags: dict[int, list[Tensor]] = {}

    def _prepare(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> Prepared:
        self._cast_models(models)
        if self._stochastic is not None and self._stochastic.rounds == 0:  # else loaded
            self._stochastic.seed = torch.initial_seed() % 2**31  # by now that of the run
        for model in models:
            if self._reduce is not None:
                note_reduction_type(model, self._reduce)
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
                cast_model(model, self.half_dtype, bn_fp32=self.bn_fp32)

    def _make_optimizer_weights(self, optimizer: Optimizer) -> _OptimizerWeights:
        if self._collects:
            return MastersWithFp32Gradients(optimizer, self._reduce)
        if self.master_weights:
            return _MasterWeights(optimizer)
        if self._is_wide:
            return Fp32CopiesPerStep(
                optimizer, state_dtype=self.state_dtype, stochastic=self._stochastic, kahan=self._kahan
            )
        return _OptimizerWeights(optimizer)

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
            if is_exact_on_device(self._scale) and all(
                is_step_skippable(optimizer) for optimizer in self._optimizers
            ):
                self._on_device = DeviceLossScale(device)
                self._on_device.load_host_values(self._scale, self._good_steps)
        return self._on_device

    def unscale(self, optimizer: Optimizer) -> list[Tensor]:
        self._unscale_once_per_step(optimizer)
        return owned_params(optimizer)

    def _unscale_once_per_step(self, optimizer: Optimizer) -> None:
        if id(optimizer) in self._flags:
            return
        self._weights[id(optimizer)].take_gradients()
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
                flags.append(_unscale_and_flag(same_type, self._inverse_scale_like(scale, same_type[0])))
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
                self.apply(optimizer, good=True)
            self._outcome = applied_outcome(len(optimizers), self.loss_scales())
            return self._outcome
        if self._on_device is not None:
            return self._step_without_read(optimizers, self._on_device)
        applied = tuple([not overflow for overflow in self._read_overflow_flags(optimizers)])
        for optimizer, good in zip(optimizers, applied, strict=True):
            self.apply(optimizer, good=good)
        self._update_scale(overflow=not all(applied))
        return FixedOutcome(applied, self.loss_scales())

    def why_no_cuda_graph(self, optimizers: Sequence[Optimizer]) -> str | None:
        is_plain = not (self.dynamic or self.steps_copies)
        return None if is_plain else super().why_no_cuda_graph(optimizers)

    def apply(self, optimizer: Optimizer, *, good: bool) -> Any:
        """Step an optimizer whose gradients are unscaled, or skip it; the scale stays. Return what its step does.

        Args:
            optimizer: one of those that were prepared.
            good: whether the gradients are finite; else the step is skipped.
        """
        self._forget_stepped([optimizer])
        if not good:
            self._weights[id(optimizer)].end_without_step()
            return None
        result = optimizer.step()
        self._weights[id(optimizer)].give_weights()
        return result

    def _step_without_read(self, optimizers: Sequence[Optimizer], scale: DeviceLossScale) -> StepOutcome:
        """Step without reading a flag: the optimizers leave weights and state as they are where theirs is set."""
        flags = [
            _any_flag_on_device(self._flags[id(optimizer)], like=scale.inverse) for optimizer in optimizers
        ]
        self._forget_stepped(optimizers)
        for optimizer, flag in zip(optimizers, flags, strict=True):
            optimizer.found_inf, optimizer.grad_scale = flag, None  # type: ignore[attr-defined]
            try:
                optimizer.step()
            finally:
                del optimizer.found_inf, optimizer.grad_scale  # type: ignore[attr-defined]
            self._weights[id(optimizer)].give_weights()  # after a skip the same weights again
        scale.update(_any_flag_on_device(flags, like=scale.inverse), self.growth_interval, MIN_SCALE)
        moved = scale.copy()

        def resolve(values: list[float]) -> tuple[tuple[bool, ...], tuple[float, ...]]:
            return tuple([value == 0 for value in values[:-1]]), (values[-1],)

        return self._outcomes.outcome_of_step([*flags, moved], resolve)

    def _forget_stepped(self, optimizers: Sequence[Optimizer]) -> None:
        for optimizer in optimizers:
            del self._flags[id(optimizer)]

    def _update_scale(self, *, overflow: bool) -> None:
        """Move the dynamic scale."""
        assert self._scale is not None
        self._scale, self._good_steps = next_scale_and_steps(
            self._scale,
            self._good_steps,
            overflow=overflow,
            growth_interval=self.growth_interval,
            min_scale=MIN_SCALE,
        )

    def _read_device_scale(self) -> None:
        """Read scale and count from the device, if they live there."""
        if self._on_device is not None:
            self._scale, self._good_steps = self._on_device.read_on_host()

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


def _any_flag_on_device(flags: Sequence[Tensor], *, like: Tensor) -> Tensor:
    """Return a scalar on the device of `like` that is not 0 if one of these is not."""
    if not flags:
        return torch.zeros_like(like)
    union = flags[0].to(like.device)
    for flag in flags[1:]:
        union = torch.maximum(union, flag.to(like.device))
    return union


def _unscale_and_flag(grads: list[Tensor], inverse: float | Tensor) -> Tensor:
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


def step_seed(purpose: str, seed: int, step: int) -> int:
    """Hash to a seed of 63 bits, the same on every machine.

    Every bit depends on `seed` and on `step`: torch's generator for CPUs uses the lower 32 bits and drops the others.
    """
    return (
        int.from_bytes(hashlib.blake2b(f"{purpose}:{seed}:{step}".encode(), digest_size=8).digest(), "little")
        >> 1
    )


def round_stochastically(value: Tensor, generator: torch.Generator) -> Tensor:
    """Return fp32 values in bfloat16, each rounded up or down with the probability that keeps its mean.

    A number between two of bfloat16 becomes the upper one with the probability of its distance from the lower one, in
    units of their gap. The bits that bfloat16 lacks count that distance: a random 16-bit number is added to them, and
    the carry decides. Numbers that bfloat16 has, infinities and NaN stay what they are.
    """
    noise = torch.randint(
        0, 1 << LOW_BITS, value.shape, dtype=torch.int32, device=value.device, generator=generator
    )
    bits = value.contiguous().view(torch.int32)
    rounded = ((bits + noise) >> LOW_BITS << LOW_BITS).view(torch.float32).reshape(value.shape)
    return torch.where(value.isfinite(), rounded, value).to(torch.bfloat16)


class StochasticRounding:
    """Rounds lists of weights with its own generators, so that dropout draws the same numbers as without it.

    Ranks of the default process group round alike, whatever their own seeds: the first call takes the state of rank 0,
    which is `seed` and `rounds`.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rounds = 0
        self._generators: dict[torch.device, torch.Generator] = {}
        self._agreed = False

    def round_into(self, targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Round each fp32 value into its bfloat16 target."""
        if not self._agreed and targets:
            self._take_seed_of_rank0(targets[0].device)
        self.rounds += 1
        for device in {target.device for target in targets}:
            generator = self._generators.setdefault(device, torch.Generator(device))
            generator.manual_seed(step_seed("stochastic rounding", self.seed, self.rounds))
        for target, value in zip(targets, values, strict=True):
            target.copy_(round_stochastically(value, self._generators[target.device]))

    def _take_seed_of_rank0(self, device: torch.device) -> None:
        """Take seed and count of rank 0: weights that are rounded apart would drift apart under equal gradients."""
        self._agreed = True
        if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
            of_first = torch.tensor([self.seed, self.rounds], device=device)
            distributed.broadcast(of_first, src=0)
            self.seed, self.rounds = of_first.tolist()


def hold_state_in_type(optimizer: Optimizer, dtype: torch.dtype) -> None:
    """Hold the state of an optimizer in a type between its steps; a step widens it to fp32, and rounds what it leaves.

    Args:
        optimizer: gets hooks around its step.
        dtype: of the state of each floating parameter.
    """

    def cast_all_state(target: torch.dtype) -> None:
        for param in owned_params(optimizer):
            if param.is_floating_point():
                _cast_state_of_parameter(optimizer, param, target)

    optimizer.register_step_pre_hook(lambda *_: cast_all_state(torch.float32))
    optimizer.register_step_post_hook(lambda *_: cast_all_state(dtype))
    cast_all_state(dtype)


def _cast_state_of_parameter(optimizer: Optimizer, param: Tensor, dtype: torch.dtype) -> None:
    """Cast the state of a parameter, if any: the floating tensors of its shape, not counts of steps."""
    state: dict[str, Any] = optimizer.state.get(param, {})
    for name, value in state.items():
        if (
            isinstance(value, Tensor)
            and value.is_floating_point()
            and value.shape == param.shape
            and name != "step"
        ):
            state[name] = value.to(dtype)
