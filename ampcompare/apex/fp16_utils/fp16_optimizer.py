"""`FP16_Optimizer`: any optimizer, working on fp32 copies of the fp16 parameters that it was built with."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampcompare.apex import deprecated_warning
from ampcompare.apex.fp16_utils.fp16util import clip_grad_norm, master_params_to_model_params
from ampcompare.base.tensors.lists import group_tensors_by_type


class InnerOptimizerFields:
    """Shows the fields of the optimizer inside."""

    optimizer: Any

    @property
    def state(self) -> Any:
        """The inner optimizer's state; may be set."""
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    @property
    def param_groups(self) -> Any:
        """The inner optimizer's groups, which hold the masters; may be set."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        self.optimizer.param_groups = value


class FP16_Optimizer(InnerOptimizerFields):
    """Wrap `init_optimizer` so that it updates fp32 masters, and keep the loss scale.

    Trainable fp16 parameters are replaced in the groups by fp32 masters at construction; fp32 ones are stepped as they
    are. Use `backward(loss)` instead of `loss.backward()`. `dynamic_loss_args` are keywords of `amp.scaler.LossScaler`.

    Source: Apex 25.05, `apex.fp16_utils.FP16_Optimizer`.
    """

    def __init__(
        self,
        init_optimizer: Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        print(
            "Warning: FP16_Optimizer is deprecated in Apex; torch.autocast with torch.amp.GradScaler replaces it."
        )
        deprecated_warning(
            "fp16_utils.FP16_Optimizer is deprecated in Apex; use torch.autocast and GradScaler"
        )
        # The scaler's package imports this one while it prepares optimizers.
        from ampcompare.apex.amp.scaler import LossScaler

        self.verbose = verbose
        self.optimizer = init_optimizer
        self.fp16_groups: list[list[Tensor]] = []
        self.fp32_from_fp16_groups: list[list[Tensor]] = []
        self.fp32_from_fp32_groups: list[list[Tensor]] = []
        for index, group in enumerate(self.optimizer.param_groups):
            self.maybe_print(f"FP16_Optimizer processing param group {index}:")
            self._make_masters_of_group(group)
        self.all_fp16_params = [param for group in self.fp16_groups for param in group]
        self.all_fp32_from_fp16_params = [param for group in self.fp32_from_fp16_groups for param in group]
        self.all_fp32_from_fp32_params = [param for group in self.fp32_from_fp32_groups for param in group]
        # State that already existed takes the masters' dtype on the way through torch's loader.
        self.optimizer.load_state_dict(self.optimizer.state_dict())

        self.dynamic_loss_scale = bool(dynamic_loss_scale)
        if self.dynamic_loss_scale:
            self.loss_scaler = LossScaler("dynamic", **(dynamic_loss_args or {}))
        else:
            self.loss_scaler = LossScaler(static_loss_scale)
        self.overflow = False
        self.first_closure_call_this_step = True
        self.clip_grad_norm = clip_grad_norm

    def _make_masters_of_group(self, group: dict[str, Any]) -> None:
        halves: list[Tensor] = []
        masters: list[Tensor] = []
        floats: list[Tensor] = []
        for index, param in enumerate(group["params"]):
            if not param.requires_grad:
                continue
            if param.dtype not in (torch.float16, torch.float32):
                raise TypeError(
                    f"FP16_Optimizer got a trainable parameter of {param.dtype}; it takes fp16 and fp32 parameters"
                )
            self.maybe_print(f"FP16_Optimizer received {param.type()} with {param.size()}")
            if param.dtype is torch.float32:
                floats.append(param)
                continue
            master = param.detach().clone().float().requires_grad_()
            group["params"][index] = master
            if param in self.optimizer.state:
                self.optimizer.state[master] = self.optimizer.state.pop(param)
            halves.append(param)
            masters.append(master)
        self.fp16_groups.append(halves)
        self.fp32_from_fp16_groups.append(masters)
        self.fp32_from_fp32_groups.append(floats)

    def maybe_print(self, msg: str) -> None:
        """Print `msg` if `verbose`."""
        if self.verbose:
            print(msg)

    def __getstate__(self) -> dict[str, Any]:
        raise RuntimeError("FP16_Optimizer cannot be pickled or copied; save its state_dict()")

    def __setstate__(self, state: Any) -> None:
        raise RuntimeError("FP16_Optimizer cannot be unpickled; build a new one and use load_state_dict()")

    def zero_grad(self, set_grads_to_None: bool = False) -> None:
        """Clear the gradients of masters, fp32 and fp16 parameters: to zeros, or to None."""
        owned = [param for group in self.optimizer.param_groups for param in group["params"]]
        existing = []
        for param in [*owned, *self.all_fp16_params]:
            if set_grads_to_None:
                param.grad = None
            elif param.grad is not None:
                param.grad.detach_()
                existing.append(param.grad)
        for alike in group_tensors_by_type(existing):
            torch._foreach_zero_(alike)

    def backward(self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False) -> None:
        """Back-propagate the scaled loss and give the masters their unscaled gradients, now or by a later call."""
        scaled_loss: Tensor = loss.float() * self.loss_scaler.loss_scale()
        scaled_loss.backward(retain_graph=retain_graph)
        if update_master_grads:
            self.update_master_grads()

    def update_master_grads(self) -> None:
        """Overwrite master gradients by unscaled model gradients, unscale fp32 ones in place, and move the loss scale.

        `overflow` is then True if a gradient was inf or NaN (dynamic scaling only).
        """
        self.loss_scaler.clear_overflow_state()
        scale = self.loss_scaler.loss_scale()
        model_grads: list[Tensor] = []
        master_grads: list[Tensor] = []
        for model, master in zip(self.all_fp16_params, self.all_fp32_from_fp16_params, strict=True):
            if model.grad is not None:
                if master.grad is None:
                    master.grad = torch.empty_like(master)
                model_grads.append(model.grad)
                master_grads.append(master.grad)
        if model_grads:
            self.loss_scaler.unscale(model_grads, master_grads, scale)
        own_grads = [param.grad for param in self.all_fp32_from_fp32_params if param.grad is not None]
        if own_grads:
            self.loss_scaler.unscale(own_grads, own_grads, scale)
        self.overflow = self.loss_scaler.update_scale()

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Any:
        """Clip the gradients of all groups by their common norm, and return it; -1 if they overflowed, unclipped."""
        if self.overflow:
            return -1
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        return self.clip_grad_norm(params, max_norm, norm_type)

    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """Return the gradients of each group's parameters, or None (and print why) if they overflowed."""
        if self.overflow:
            print("Warning: FP16_Optimizer.inspect_master_grad_data returns None: the gradients overflowed.")
            return None
        return [
            [None if param.grad is None else param.grad.data for param in group["params"]]
            for group in self.optimizer.param_groups
        ]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the masters and copy them to the model, unless the gradients overflowed.

        A `closure` calls `backward(loss)` of this object; it is called again, with the lowered scale, as long as
        gradients overflow. Returns what the inner optimizer returned; None if the step was skipped.
        """
        scale = self.loss_scaler.loss_scale()
        # The closure computes new gradients, so an overflow of the previous pass no longer applies.
        if self.overflow and closure is None:
            self.maybe_print(f"Gradient overflow: this step is skipped. The loss scale is now {scale}.")
            return None
        returned = self.optimizer.step() if closure is None else self._step_with_closure(closure)
        self._master_params_to_model_params()
        return returned

    def _step_with_closure(self, closure: Callable[[], Any]) -> Any:
        def evaluate() -> Any:
            if self.first_closure_call_this_step:
                self.first_closure_call_this_step = False
            else:
                # An optimizer that evaluates repeatedly has moved the masters since the model last saw them.
                self._master_params_to_model_params()
            loss = closure()
            while self.overflow:
                scale = self.loss_scaler.loss_scale()
                print(
                    f"Gradient overflow within the closure: it is called again. The loss scale is now {scale}."
                )
                loss = closure()
            return loss

        returned = self.optimizer.step(evaluate)
        self.first_closure_call_this_step = True
        return returned

    def _master_params_to_model_params(self) -> None:
        master_params_to_model_params(self.all_fp16_params, self.all_fp32_from_fp16_params)

    def state_dict(self) -> dict[str, Any]:
        """Return all state, the masters and the loss scaler object included.

        A file with it is read by `torch.load(..., weights_only=False)`, with this package installed.
        """
        return {
            "loss_scaler": self.loss_scaler,
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "first_closure_call_this_step": self.first_closure_call_this_step,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": self.fp32_from_fp16_groups,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load state saved by an optimizer built in the same way; load the model itself before."""
        # A copy: the optimizer that the state came from may live on, and must not share a scale with this one.
        self.loss_scaler = copy.deepcopy(state_dict["loss_scaler"])
        self.dynamic_loss_scale = state_dict["dynamic_loss_scale"]
        self.overflow = state_dict["overflow"]
        self.first_closure_call_this_step = state_dict["first_closure_call_this_step"]
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        for masters, saved in zip(self.fp32_from_fp16_groups, state_dict["fp32_from_fp16"], strict=True):
            master_params_to_model_params(masters, saved)

    @property
    def loss_scale(self) -> float:
        """The current loss scale; may be set."""
        return self.loss_scaler.loss_scale()

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler._loss_scale = value
