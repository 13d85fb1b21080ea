"""`FusedMixedPrecisionLamb`: LAMB with its own fp32 copies of low-precision parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from ampcompare.apex.multi_tensor_apply.arithmetic import global_norm
from ampcompare.apex.multi_tensor_apply.optimizer_math import clip_divisor, lamb
from ampcompare.apex.optimizers.fused_optimizer import FusedOptimizer, GradientScaling

__all__ = ["FusedMixedPrecisionLamb"]


class FusedMixedPrecisionLamb(FusedOptimizer):
    """LAMB that keeps fp32 weights for parameters of `reduced_precision_dtype`, and unscales gradients itself.

    State: `exp_avg` and `exp_avg_sq`, fp32 where there is an fp32 copy, else in the parameter's dtype. In the group:
    `lr` (fp32 tensor, shape ()) and `step` (int32 tensor, shape (1,)), on the device of the parameters. The fp32
    weights are made at the first step, from the parameters as they then are, and are saved nowhere. After `step` the
    gradients hold the update, as in Apex.

    Raises:
        RuntimeError: `amsgrad`.

    Source: Apex 25.05, `apex.optimizers.FusedMixedPrecisionLamb`.
    """

    supported: ClassVar[tuple[torch.dtype, ...]] = (torch.float16, torch.bfloat16, torch.float32)
    exact_state: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    apex_casts_state: ClassVar[bool] = False

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        step: int = 0,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
        reduced_precision_dtype: torch.dtype | None = None,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedMixedPrecisionLamb got amsgrad=True, which it does not support; leave it out")
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.use_nvlamb = use_nvlamb
        self.reduced_precision_dtype = reduced_precision_dtype
        self.param_groups_full_precision: list[dict[str, list[Tensor | None]]] = []
        defaults = {
            "lr": torch.tensor(lr, dtype=torch.float32),
            "step": torch.tensor([step], dtype=torch.int32),
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
        }
        super().__init__(params, defaults, set_grad_none=True)
        self._step_supports_amp_scaling = True

    def _settings(self) -> tuple[str, ...]:
        added_attributes = ("adam_w_mode", "use_nvlamb", "reduced_precision_dtype", "param_groups_full_precision")
        return (*super()._settings(), *added_attributes, "_step_supports_amp_scaling")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group with its own `lr` and `step` tensors."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for name, dtype in (("lr", torch.float32), ("step", torch.int32)):
            group[name] = torch.as_tensor(group[name], dtype=dtype).clone()
        self._to_parameter_device(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Update the parameters that have gradients, unless a gradient is inf or NaN; return what `closure` returned.

        Args:
            options: `grad_scaler`, a `torch.amp.GradScaler` whose scale the gradients carry. The host reads its flag,
                and whether the norm of all gradients is finite. It is not a named argument because torch warns at each
                step of an optimizer that names it.

        Raises:
            TypeError: an unknown option.
        """
        grad_scaler = options.pop("grad_scaler", None)
        if options:
            raise TypeError(f"FusedMixedPrecisionLamb.step got unexpected options: {', '.join(sorted(options))}")
        loss = self._evaluate(closure)
        self._complete_full_precision()
        chosen = [self._with_gradient(group["params"]) for group in self.param_groups]
        grads = [gradient for params in chosen for gradient in self._gradients(params)]
        if not grads:
            return loss
        scaling = GradientScaling.of_step(self, grad_scaler, grads[0].device)
        if scaling.found_inf is not None and scaling.found_inf.item():
            return loss
        limit: float | Tensor = self.defaults["max_grad_norm"]
        if scaling.scale is not None:
            limit = limit * scaling.scale
        norm = global_norm(grads)
        if not torch.isfinite(norm).item():
            return loss
        divisor = clip_divisor(norm, limit)
        if scaling.scale is not None:
            divisor = divisor * scaling.scale
        for group, full, params in zip(self.param_groups, self.param_groups_full_precision, chosen, strict=True):
            group["step"] += 1
            if params:
                self._step_group(group, dict(zip(group["params"], full["params"], strict=True)), params, divisor)
        return loss

    def _step_group(
        self, group: dict[str, Any], full: dict[Tensor, Tensor | None], params: list[Tensor], divisor: Tensor
    ) -> None:
        kept = [full[param] for param in params]
        weights = [param.data if copy is None else copy for param, copy in zip(params, kept, strict=True)]
        for param, weight in zip(params, weights, strict=True):
            for name in self.exact_state:
                if name not in self.state[param]:
                    self.state[param][name] = torch.zeros_like(weight)
        lamb(
            self._gradients(params),
            weights,
            self._state_tensors(params, "exp_avg"),
            self._state_tensors(params, "exp_avg_sq"),
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            step=group["step"],
            bias_correction=bool(group["bias_correction"]),
            weight_decay=group["weight_decay"],
            grad_averaging=bool(group["grad_averaging"]),
            adam_w=bool(self.adam_w_mode),
            divisor=divisor,
            use_nvlamb=self.use_nvlamb,
            copies=self._data(params),
        )

    def _complete_full_precision(self) -> None:
        # Only now, not at construction: until the first step DDP or a checkpoint may still change the parameters.
        for group in self.param_groups[len(self.param_groups_full_precision) :]:
            copies = [
                param.detach().clone().float()
                if self.reduced_precision_dtype is not None and param.dtype == self.reduced_precision_dtype
                else None
                for param in group["params"]
            ]
            self.param_groups_full_precision.append({"params": copies})
