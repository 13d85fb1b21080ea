"""`half` with fp32 master weights, a dynamic loss scale, or both: the fp16 optimizer of fp16_utils and DeepSpeed.

The model is cast as for plain `half`. The optimizer holds masters in the places of the 16-bit parameters; gradients are
widened and unscaled once per step, and the masters are rounded into the model after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampcompare.precision.base import FixedOutcome, Precision, StepOutcome, owned_params, refuse_wrapped
from ampcompare.precision.half_cast import cast_model, cast_state

__all__ = ["HalfOptimizer"]

FACTOR = 2.0
LEAST_SCALE = 1.0


class HalfOptimizer(Precision):
    """16-bit weights in the model, and what an fp16 optimizer adds to them.

    A static scale is divided out and nothing is looked for. Under a dynamic one a step with a non-finite gradient is
    skipped and halves the scale, down to 1; `growth_interval` good steps in a row double it.

    Args:
        dtype: float16 or bfloat16.
        bn_fp32: keep the weights and statistics of batch norm in fp32.
        master_weights: let the optimizers update fp32 copies of the 16-bit parameters.
        loss_scale: "dynamic", a factor, or None for none.
        init_scale, growth_interval: of a dynamic scale; its interval is that of fp16_utils and DeepSpeed.
    """

    key = "precision"

    def __init__(
        self,
        *,
        dtype: str = "float16",
        bn_fp32: bool = False,
        master_weights: bool = True,
        loss_scale: float | str | None = None,
        init_scale: float = 2.0**16,
        growth_interval: int = 1000,
    ) -> None:
        self.half_dtype: torch.dtype = getattr(torch, dtype)
        self.bn_fp32 = bn_fp32
        self.master_weights = master_weights
        self.dynamic = isinstance(loss_scale, str)
        self.growth_interval = growth_interval
        self._scale = init_scale if isinstance(loss_scale, str) else loss_scale
        self._good_steps = 0
        self._null: AbstractContextManager[None] = nullcontext()
        self._masters: dict[int, _Masters] = {}
        self._overflows: dict[int, bool] = {}

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> tuple[list[nn.Module], list[Optimizer]]:
        refuse_wrapped(models)
        for model in models:
            cast_model(model, self.half_dtype, bn_fp32=self.bn_fp32)
        for optimizer in optimizers:
            if self.master_weights:
                self._masters[id(optimizer)] = _Masters(optimizer)
            else:
                cast_state(optimizer)
        return list(models), list(optimizers)

    def autocast(self) -> AbstractContextManager[None]:
        return self._null

    def scale_loss(
        self, loss: Tensor, optimizers: Sequence[Optimizer], *, loss_id: int = 0, delay_unscale: bool = False
    ) -> AbstractContextManager[Tensor]:
        return nullcontext(loss if self._scale is None else loss * self._scale)

    def unscale(self, optimizer: Optimizer) -> list[Tensor]:
        if id(optimizer) in self._overflows:
            return owned_params(optimizer)
        if self.master_weights:
            self._masters[id(optimizer)].take_gradients()
        params = owned_params(optimizer)
        grads = [param.grad for param in params if param.grad is not None]
        self._overflows[id(optimizer)] = self._unscale(grads) if self._scale is not None else False
        return params

    def _unscale(self, grads: list[Tensor]) -> bool:
        """Divide by the scale; under a dynamic one return whether a gradient is not finite, which waits for them."""
        assert self._scale is not None
        if not self.dynamic:
            if grads:
                torch._foreach_div_(grads, self._scale)
            return False
        found: list[Tensor] = []
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for grad in grads:
            alike.setdefault((grad.device, grad.dtype), []).append(grad)
        for (device, _), same in alike.items():
            found.append(torch.zeros((), device=device))
            inverse = torch.full((), 1 / self._scale, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(same, found[-1], inverse)
        return any(flag.item() != 0 for flag in found)

    def step(self, *optimizers: Optimizer) -> StepOutcome:
        for optimizer in optimizers:
            self.unscale(optimizer)
        applied = tuple([not self._overflows[id(optimizer)] for optimizer in optimizers])
        self._overflows.clear()
        for optimizer, good in zip(optimizers, applied, strict=True):
            if good:
                optimizer.step()
                if self.master_weights:
                    self._masters[id(optimizer)].give_weights()
        if self.dynamic:
            self._move_scale(overflow=not all(applied))
        return FixedOutcome(applied, self.loss_scales())

    def _move_scale(self, *, overflow: bool) -> None:
        assert self._scale is not None
        if overflow:
            self._scale = max(self._scale / FACTOR, LEAST_SCALE)
            self._good_steps = 0
            return
        self._good_steps += 1
        if self._good_steps == self.growth_interval:
            self._scale *= FACTOR
            self._good_steps = 0

    def loss_scales(self) -> tuple[float, ...]:
        return () if self._scale is None else (self._scale,)

    def state_dict(self) -> dict[str, Any]:
        if self._scale is None:
            return {}
        return {"loss_scale": self._scale, **({"good_steps": self._good_steps} if self.dynamic else {})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "loss_scale" in state:
            self._scale = float(state["loss_scale"])
            self._good_steps = int(state.get("good_steps", 0))


class _Masters:
    """fp32 copies in the places that 16-bit parameters had in an optimizer, and the way between the two.

    Parameters of groups that are added later are taken over at the next step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._params: list[Tensor] = []
        self._masters: list[Tensor] = []
        self._num_groups = 0
        self._take_over()

    @torch.no_grad()
    def _take_over(self) -> None:
        optimizer = self._optimizer
        for group in optimizer.param_groups[self._num_groups :]:
            for place, param in enumerate(group["params"]):
                if param.dtype is torch.float32:
                    continue
                master = param.detach().float().requires_grad_(param.requires_grad)
                self._params.append(param)
                self._masters.append(master)
                group["params"][place] = master
                if param in optimizer.state:
                    optimizer.state[master] = optimizer.state.pop(param)
        self._num_groups = len(optimizer.param_groups)

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Widen the gradients of the model into those of the masters, and clear the former."""
        if len(self._optimizer.param_groups) != self._num_groups:
            self._take_over()
        for param, master in zip(self._params, self._masters, strict=True):
            if param.grad is not None:
                master.grad = param.grad.float()
                param.grad = None

    @torch.no_grad()
    def give_weights(self) -> None:
        """Round the masters into the model."""
        if self._params:
            torch._foreach_copy_(self._params, self._masters)
