"""`FusedAdam`: Adam and AdamW with fp32 moments for parameters of any width."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from ampcompare.apex.multi_tensor_apply import optimizer_math
from ampcompare.apex.optimizers.fused_optimizer import FusedOptimizer, GradientScaling

_ONLY_2018 = frozenset({"amp_scale_adjustment", "eps_inside_sqrt", "max_grad_norm", "use_mt"})


class FusedAdam(FusedOptimizer):
    """Adam with decoupled weight decay by default (`adam_w_mode=False`: L2), for fp16, bf16 and fp32 parameters.

    State: `exp_avg` and `exp_avg_sq` in fp32 for each parameter; `step` in the group, an int, or an int32 tensor of one
    element if `capturable`. Gradients may have another dtype than their parameters.

    Args:
        capturable: keep `lr`, `step` and the overflow test on the device, and take part in `GradScaler.step`: gradients
            are unscaled in place, and an overflow changes nothing, the step count included.
        master_weights: update fp32 copies, made at construction, that the parameters follow. They are saved nowhere:
            load a model before building its optimizer.

    An argument that only the `FusedAdam` of 2018 had makes an `ampcompare.apex.contrib.optimizers.FusedAdam`, not an
    instance of this class.

    Source: Apex 25.05, `apex.optimizers.FusedAdam`.
    """

    supported: ClassVar[tuple[torch.dtype, ...]] = (torch.float16, torch.bfloat16, torch.float32)
    exact_state: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return an optimizer of this class, or for an argument of 2018 the `FusedAdam` that has it."""
        if cls is FusedAdam and not _ONLY_2018.isdisjoint(kwargs):
            # Only now: the package with the optimizers of 2018 is built on this one.
            from ampcompare.apex.contrib.optimizers.fused_adam import FusedAdam as FusedAdamOf2018

            return FusedAdamOf2018(*args, **kwargs)
        return super().__new__(cls)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedAdam got amsgrad=True, which it does not support; use torch.optim.AdamW")
        if master_weights and not capturable:
            raise RuntimeError("FusedAdam got master_weights=True without capturable=True; give both")
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.capturable = capturable
        self.master_weights = master_weights
        self.param_groups_master: list[dict[str, list[Tensor | None]]] = []
        self._overflowed: Tensor | None = None
        rate = torch.tensor(lr, dtype=torch.float32) if capturable else lr
        defaults = {
            "lr": rate,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        self._step_supports_amp_scaling = capturable
        self._master_groups_are_fixed = False
        super().__init__(params, defaults, set_grad_none=set_grad_none)
        # In strict mode groups are added without masters from here on, and `step` pairs the two lists.
        self._master_groups_are_fixed = self._strict

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with its own device tensors and masters where the optimizer keeps them."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if self.capturable and isinstance(group["lr"], Tensor):
            # A default that is a tensor would be shared by all groups, and a schedule fills it in place.
            group["lr"] = group["lr"].clone()
        self._move_group_to_parameter_device(group)
        if not self._master_groups_are_fixed:
            masters = [
                param.detach().clone().float() if self.master_weights else None for param in group["params"]
            ]
            self.param_groups_master.append({"params": masters})

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: None = None,
        output_params: None = None,
        scale: None = None,
        grad_norms: None = None,
        **options: Any,
    ) -> Any:
        """Update the parameters that have gradients; return what `closure` returned.

        Args:
            options: `grad_scaler`, a `torch.amp.GradScaler` whose scale the gradients carry (read if `capturable`).
                It is not a named argument because torch warns at each step of an optimizer that names it.
        """
        if any(argument is not None for argument in (grads, output_params, scale, grad_norms)):
            raise RuntimeError(
                "FusedAdam.step got grads, output_params, scale or grad_norms, which it has not taken since 2019;"
                " call step() and let amp or a GradScaler do the scaling"
            )
        grad_scaler = options.pop("grad_scaler", None)
        if options:
            raise TypeError(f"FusedAdam.step got unexpected options: {', '.join(sorted(options))}")
        loss = self._call_closure(closure)
        for group, master_group in zip(self.param_groups, self.param_groups_master, strict=not self._strict):
            if group["params"]:
                self._step_group(group, master_group["params"], grad_scaler)
        return loss

    def _step_group(self, group: dict[str, Any], masters: list[Tensor | None], grad_scaler: Any) -> None:
        scaling = GradientScaling(None, None)
        if self.capturable:
            scaling = GradientScaling.of_step(self, grad_scaler, group["params"][0].device)
            self._count_step_on_device(group, scaling.found_inf)
        else:
            self._count_group_step(group)
        params = self._params_with_gradient(group["params"])
        if not params:
            return
        grads, weights = self._gradients_of(params), self._data_of(params)
        targets, copies = weights, []
        if self.master_weights:
            by_param = dict(zip(group["params"], masters, strict=True))
            kept = [by_param[param] for param in params]
            targets = [
                weight if master is None else master for weight, master in zip(weights, kept, strict=True)
            ]
            copies = weights
        beta1, beta2 = group["betas"]
        optimizer_math.make_adam_step(
            grads,
            targets,
            self._state_tensors(params, "exp_avg", torch.float32),
            self._state_tensors(params, "exp_avg_sq", torch.float32),
            *(group["lr"], beta1, beta2, group["eps"], group["step"]),
            *(self.adam_w_mode, group["bias_correction"], group["weight_decay"]),
            grad_scale=scaling.scale,
            found_inf=scaling.found_inf,
            copies=copies,
        )

    def _count_step_on_device(self, group: dict[str, Any], found_inf: Tensor | None) -> None:
        device = group["params"][0].device
        if found_inf is None:
            found_inf = torch.zeros((), device=device)
        # Apex lets the flag of the call before decide whether this call counts, and always counts the first.
        decisive = self._overflowed if self._strict else found_inf
        if self._strict and "step" not in group:
            decisive = None
        counted = torch.ones(1, dtype=torch.int32, device=device)
        if decisive is not None:
            counted -= decisive.to(torch.int32)
        if "step" in group:
            group["step"].add_(counted)  # in place: a CUDA graph counts where it was recorded
        else:
            group["step"] = counted
        self._overflowed = found_inf
