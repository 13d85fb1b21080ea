"""`FP16_Optimizer` of 2018 around a fused optimizer: fp32 master weights, one loss scale, and skipped steps."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ampcompare.apex.contrib.optimizers.fused_adam import FusedAdam
from ampcompare.apex.fp16_utils.fp16_optimizer import InnerOptimizerFields
from ampcompare.apex.multi_tensor_apply.arithmetic import global_norm, scale_into
from ampcompare.base.tensors.lists import copy_tensors_by_dtype


class FP16_Optimizer(InnerOptimizerFields):
    """Train a model of any floating dtype through fp32 copies of its parameters, which `init_optimizer` steps.

    Call `backward(loss)` instead of `loss.backward()`. A dynamic scale begins at 2**16, halves at an overflow down to
    1 and doubles after 1000 steps without one. A step with a gradient that is inf or NaN is skipped, under a static
    scale too.

    `init_optimizer` is the `FusedAdam` of this package, which divides by the scale itself, or any other, whose
    parameters are given fp32 gradients. Its groups hold the copies from here on.

    Raises:
        SystemError: `dynamic_loss_args` with a dynamic scale.

    Source: Apex 25.05, `apex.contrib.optimizers.FP16_Optimizer`.
    """

    def __init__(
        self,
        init_optimizer: Any,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        if dynamic_loss_scale and dynamic_loss_args is not None:
            raise SystemError("FP16_Optimizer takes no dynamic_loss_args; leave them out")
        self.optimizer = init_optimizer
        self.fp16_groups: list[list[Tensor]] = []
        self.fp32_groups: list[list[Tensor]] = []
        for group in init_optimizer.param_groups:
            self.fp16_groups.append(list(group["params"]))
            self.fp32_groups.append([param.detach().clone().float() for param in group["params"]])
            group["params"] = self.fp32_groups[-1]
        self.dynamic_loss_scale = dynamic_loss_scale
        self.cur_scale: float = 2.0**16 if dynamic_loss_scale else static_loss_scale
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = 2.0
        self.scale_window = 1000
        self.overflow = False
        self.verbose = verbose

    def zero_grad(self, set_grads_to_None: bool = True) -> None:
        """Clear the gradients of the model, to None or to zeros."""
        for param in (param for group in self.fp16_groups for param in group):
            if set_grads_to_None:
                param.grad = None
            elif param.grad is not None:
                param.grad.detach_().zero_()

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss` times the scale to those of the model."""
        (loss.float() * self.cur_scale).backward()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Step the copies and write them into the model, or skip the step on an overflow; then move the scale."""
        if closure is not None:
            raise RuntimeError("FP16_Optimizer.step takes no closure; call backward(loss), then step()")
        grads = [[param.grad for param in group] for group in self.fp16_groups]
        present = [[grad for grad in group if grad is not None] for group in grads]
        norms = [global_norm(group) if group else None for group in present]
        self.overflow = any(norm is not None and not torch.isfinite(norm) for norm in norms)
        if not self.overflow:
            if isinstance(self.optimizer, FusedAdam):
                self.optimizer.step(
                    grads=grads, output_params=self.fp16_groups, scale=self.cur_scale, grad_norms=norms
                )
            else:
                self._step_with_gradients_only()
        self._update_scale(self.overflow)

    def _step_with_gradients_only(self) -> None:
        models = [param for group in self.fp16_groups for param in group]
        masters = [param for group in self.fp32_groups for param in group]
        for model, master in zip(models, masters, strict=True):
            master.grad = None if model.grad is None else torch.empty_like(master)
        sources = [model.grad for model in models if model.grad is not None]
        targets = [master.grad for master in masters if master.grad is not None]
        if sources:
            scale_into(sources, targets, 1.0 / self.cur_scale)
        self.optimizer.step()
        copy_tensors_by_dtype([model.data for model in models], masters)
        for master in masters:
            master.grad = None

    def _update_scale(self, skip: bool) -> None:
        if skip and (self.verbose or not self.dynamic_loss_scale):
            kind = "dynamic" if self.dynamic_loss_scale else "static"
            print(
                f"\nGrad overflow on iteration {self.cur_iter}\nUsing {kind} loss scale of {self.cur_scale}"
            )
        if self.dynamic_loss_scale:
            if skip:
                self.cur_scale = max(self.cur_scale / self.scale_factor, 1)
                self.last_overflow_iter = self.cur_iter
            elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
                self.cur_scale *= self.scale_factor
        self.cur_iter += 1

    @property
    def loss_scale(self) -> float:
        """The loss scale; may be set."""
        return self.cur_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.cur_scale = value

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and its counters, the inner state dict and the fp32 copies, by Apex's keys."""
        state: dict[str, Any] = {
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "cur_scale": self.cur_scale,
            "cur_iter": self.cur_iter,
        }
        if self.dynamic_loss_scale:
            for name in ("last_overflow_iter", "scale_factor", "scale_window"):
                state[name] = getattr(self, name)
        return {**state, "optimizer_state_dict": self.optimizer.state_dict(), "fp32_groups": self.fp32_groups}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned; load the model by itself, before or after."""
        shapes = [[tuple(param.shape) for param in group] for group in self.fp32_groups]
        saved = [[tuple(param.shape) for param in group] for group in state_dict["fp32_groups"]]
        if saved != shapes:
            raise ValueError(
                f"FP16_Optimizer got fp32_groups of shapes {saved}, but holds {shapes}; load it into the same model"
            )
        names = ["dynamic_loss_scale", "cur_scale", "cur_iter"]
        if state_dict["dynamic_loss_scale"]:
            names += ["last_overflow_iter", "scale_factor", "scale_window"]
        for name in names:
            setattr(self, name, state_dict[name])
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        for group, saved_group in zip(self.fp32_groups, state_dict["fp32_groups"], strict=True):
            for param, value in zip(group, saved_group, strict=True):
                param.data.copy_(value.data)
