"""`half` with fp32 master weights, a dynamic loss scale, or both: the fp16 optimizer of fp16_utils and DeepSpeed.

The model is cast as for plain `half`. The optimizer holds fp32 masters instead of the 16-bit parameters. Gradients are
converted to fp32 and unscaled once per step; after it the masters are rounded into the model.
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

from ampcompare.precision.base import FixedOutcome, Precision, StepOutcome, owned_params
from ampcompare.precision.device_loss_scale import FACTOR, DeviceLossScale, is_exact_on_device
from ampcompare.precision.half_cast import cast_model, cast_state
from ampcompare.precision.keep_fp32 import kept_in_fp32
from ampcompare.precision.late import LateOutcomes
from ampcompare.tensors.lists import by_type, copy_by_dtype
from ampcompare.tensors.skippable_step import obeys_flag

__all__ = ["HalfOptimizer"]

MIN_SCALE = 1.0
# On a CPU reading a flag is free, and arithmetic on tensors costs more than on Python floats.
_DEVICE_TYPES = frozenset({"cuda"})


class HalfOptimizer(Precision):
    """16-bit weights in the model, with the master weights and loss scaling of an fp16 optimizer.

    A static scale is divided out without an overflow check. With a dynamic scale a step with a non-finite gradient is
    skipped and halves the scale, down to 1; `growth_interval` consecutive good steps double it. With optimizers that
    obey an overflow flag on a GPU, scale and flags stay there.

    Args:
        dtype: float16 or bfloat16.
        bn_fp32: keep the weights and statistics of batch norm in fp32.
        master_weights: let the optimizers update fp32 copies of the 16-bit parameters.
        loss_scale: "dynamic", a factor, or None for none.
        init_scale, growth_interval: of a dynamic scale; its interval is that of fp16_utils and DeepSpeed.
        keep_fp32: patterns of modules that stay in fp32, as for `kept_in_fp32`.
    """

    def __init__(
        self,
        *,
        dtype: str = "float16",
        bn_fp32: bool = False,
        master_weights: bool = True,
        loss_scale: float | str | None = None,
        init_scale: float = 2.0**16,
        growth_interval: int = 1000,
        keep_fp32: str = "",
    ) -> None:
        self.keep_fp32 = keep_fp32
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
        self._masters: dict[int, _Masters] = {}
        self._flags: dict[int, list[Tensor]] = {}  # overflow flags of the optimizers whose gradients are unscaled

    def _prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> tuple[list[nn.Module], list[Optimizer]]:
        with kept_in_fp32(models, self.keep_fp32, self.half_dtype) as self.kept_fp32:
            for model in models:
                cast_model(model, self.half_dtype, bn_fp32=self.bn_fp32)
        for optimizer in optimizers:
            if self.master_weights:
                self._masters[id(optimizer)] = _Masters(optimizer)
            else:
                cast_state(optimizer)
        self._optimizers = list(optimizers)
        return list(models), list(optimizers)

    def scale_loss(
        self, loss: Tensor, optimizers: Sequence[Optimizer], *, loss_id: int = 0, delay_unscale: bool = False
    ) -> AbstractContextManager[Tensor]:
        if self._scale is None:
            return nullcontext(loss)
        on_device = self._device_scale(loss.device)
        return nullcontext(loss * self._scale if on_device is None else on_device.scaled(loss))

    def _device_scale(self, device: torch.device) -> DeviceLossScale | None:
        """Return the scale that lives on `device`; None if the host has it."""
        if self._on_device is None and self.dynamic and device.type in _DEVICE_TYPES:
            assert self._scale is not None, "a dynamic scale has a value"
            if is_exact_on_device(self._scale) and all(obeys_flag(optimizer) for optimizer in self._optimizers):
                self._on_device = DeviceLossScale(
                    device,
                    self._scale,
                    self._good_steps,
                    growth_interval=self.growth_interval,
                    min_scale=MIN_SCALE,
                )
        return self._on_device

    def unscale(self, optimizer: Optimizer) -> list[Tensor]:
        if id(optimizer) in self._flags:
            return owned_params(optimizer)
        if self.master_weights:
            self._masters[id(optimizer)].take_gradients()
        params = owned_params(optimizer)
        grads = [param.grad for param in params if param.grad is not None]
        self._flags[id(optimizer)] = [] if self._scale is None else self._unscale(grads, self._scale)
        return params

    def _unscale(self, grads: list[Tensor], scale: float) -> list[Tensor]:
        """Divide by the scale; if it is dynamic, return scalars that are not 0 if a gradient is not finite."""
        flags = []
        for same_type in by_type(grads):
            if self.dynamic:
                flags.append(_check_and_unscale(same_type, self._inverse(scale, same_type[0])))
            else:
                torch._foreach_div_(same_type, scale)
        return flags

    def _inverse(self, scale: float, grad: Tensor) -> float | Tensor:
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

    def _overflows(self, optimizers: Sequence[Optimizer]) -> list[bool]:
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
            self.unscale(optimizer)
        if self._on_device is not None:
            return self._step_on_device(optimizers, self._on_device)
        applied = tuple([not overflow for overflow in self._overflows(optimizers)])
        self._flags.clear()
        for optimizer, good in zip(optimizers, applied, strict=True):
            if good:
                optimizer.step()
                if self.master_weights:
                    self._masters[id(optimizer)].give_weights()
        if self.dynamic:
            self._move_scale(overflow=not all(applied))
        return FixedOutcome(applied, self.loss_scales())

    def _step_on_device(self, optimizers: Sequence[Optimizer], scale: DeviceLossScale) -> StepOutcome:
        """Step without reading a flag: the optimizers leave weights and state as they are where theirs is set."""
        flags = [_union(self._flags[id(optimizer)], like=scale.inverse) for optimizer in optimizers]
        self._flags.clear()
        for optimizer, flag in zip(optimizers, flags, strict=True):
            optimizer.found_inf, optimizer.grad_scale = flag, None  # type: ignore[attr-defined]
            try:
                optimizer.step()
            finally:
                del optimizer.found_inf, optimizer.grad_scale  # type: ignore[attr-defined]
            if self.master_weights:
                self._masters[id(optimizer)].give_weights()  # after a skip the same weights again
        moved = scale.move(_union(flags, like=scale.inverse))

        def resolve(values: list[float]) -> tuple[tuple[bool, ...], tuple[float, ...]]:
            return tuple([value == 0 for value in values[:-1]]), (values[-1],)

        return self._outcomes.add([*flags, moved], resolve)

    def _move_scale(self, *, overflow: bool) -> None:
        assert self._scale is not None
        if overflow:
            self._scale = max(self._scale / FACTOR, MIN_SCALE)
            self._good_steps = 0
            return
        self._good_steps += 1
        if self._good_steps == self.growth_interval:
            self._scale *= FACTOR
            self._good_steps = 0

    def _catch_up(self) -> None:
        """Read scale and count from the device, if they live there."""
        if self._on_device is not None:
            self._scale, self._good_steps = self._on_device.read()

    def loss_scales(self) -> tuple[float, ...]:
        self._catch_up()
        return () if self._scale is None else (self._scale,)

    def state_dict(self) -> dict[str, Any]:
        if self._scale is None:
            return {}
        self._catch_up()
        return {"loss_scale": self._scale, **({"good_steps": self._good_steps} if self.dynamic else {})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "loss_scale" in state:
            self._scale = float(state["loss_scale"])
            self._good_steps = int(state.get("good_steps", 0))
            self._on_device = None


def _union(flags: Sequence[Tensor], *, like: Tensor) -> Tensor:
    """Return a scalar on the device of `like` that is not 0 if one of these is not."""
    if not flags:
        return torch.zeros_like(like)
    union = flags[0].to(like.device)
    for flag in flags[1:]:
        union = torch.maximum(union, flag.to(like.device))
    return union


def _check_and_unscale(grads: list[Tensor], inverse: float | Tensor) -> Tensor:
    """Multiply gradients of one dtype and device, and return a scalar that is not 0 if one is not finite.

    Args:
        inverse: an fp32 scalar; for bfloat16 a number, or a scalar that is a power of two.
    """
    device = grads[0].device
    if grads[0].dtype is torch.bfloat16:  # torch's own kernel does not support bfloat16 on CUDA
        filled = [grad for grad in grads if grad.numel()]  # torch raises on the maximum of no elements
        largest = torch.stack(torch._foreach_norm(filled, math.inf)) if filled else torch.zeros(1, device=device)
        flag = ~largest.isfinite().all()
        if isinstance(inverse, Tensor):
            inverse = inverse.to(device, torch.bfloat16)
        torch._foreach_mul_(grads, inverse)
        return flag.float()
    flag = torch.zeros((), device=device)
    assert isinstance(inverse, Tensor), "a number is for bfloat16"
    torch._amp_foreach_non_finite_check_and_unscale_(grads, flag, inverse.to(device))
    return flag


class _Masters:
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

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Convert the gradients of the model to fp32 gradients of the masters, and clear the former."""
        if len(self._optimizer.param_groups) != self._num_groups:
            self._make_masters()
        narrow: list[Tensor] = []
        wide: list[Tensor] = []
        for param, master in zip(self._params, self._masters, strict=True):
            if param.grad is not None:
                narrow.append(param.grad)
                wide.append(torch.empty_like(param.grad, dtype=torch.float32))
                master.grad, param.grad = wide[-1], None
        copy_by_dtype(wide, narrow)

    @torch.no_grad()
    def give_weights(self) -> None:
        """Round the masters into the model."""
        copy_by_dtype(self._params, self._masters)
