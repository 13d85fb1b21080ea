"""`FusedNovoGrad`: NovoGrad, with one second moment for each tensor."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ampcompare.apex.multi_tensor_apply import optimizer_math
from ampcompare.apex.multi_tensor_apply.arithmetic import per_tensor_norms
from ampcompare.apex.optimizers.fused_optimizer import FusedOptimizer


class FusedNovoGrad(FusedOptimizer):
    """NovoGrad for fp16 and fp32 parameters.

    State: `exp_avg` in the parameter's dtype. In the group: `step`, an int, and from the first step `exp_avg_sq`, a
    list of two fp32 vectors with the averaged gradient norms of the fp16 and of the fp32 parameters, in order. The
    number of gradients in a group must therefore stay what it was at its first step (`AssertionError`).

    Args:
        reg_inside_moment: normalize and decay before averaging instead of after.
        norm_type: 2 (L2) or 0 (largest element); `RuntimeError` at the first step for another.
        init_zero: start the averaged norms at 0 instead of at the first norms.

    Source: Apex 25.05, `apex.optimizers.FusedNovoGrad`.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedNovoGrad got amsgrad=True, which it does not support; leave it out")
        self.moment_mode = 0 if reg_inside_moment else 1
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "norm_type": norm_type,
            "init_zero": init_zero,
        }
        super().__init__(params, defaults, set_grad_none=set_grad_none)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load state and bring the norms to the device of the parameters.

        A state saved before the first step has no norms; Apex, and the strict switch, raise `KeyError` for it.
        """
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            if group["params"] and (self._strict or "exp_avg_sq" in group):
                device = group["params"][0].device
                group["exp_avg_sq"] = [norms.to(device) for norms in group["exp_avg_sq"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have gradients; return what `closure` returned."""
        loss = self._call_closure(closure)
        for group in self.param_groups:
            step = self._count_group_step(group)
            params = self._params_with_gradient(group["params"])
            by_dtype = [[param for param in params if param.dtype is dtype] for dtype in self.supported]
            if "exp_avg_sq" not in group:
                group["exp_avg_sq"] = [self._first_gradient_norms(group, part) for part in by_dtype]
            for part, norms in zip(by_dtype, group["exp_avg_sq"], strict=True):
                if len(part) != norms.numel():
                    raise AssertionError(
                        f"FusedNovoGrad got {len(part)} gradients in a group that began with {norms.numel()};"
                        " every parameter must have a gradient at every step, or at none"
                    )
                if part:
                    beta1, beta2 = group["betas"]
                    numbers = (group["lr"], beta1, beta2, group["eps"], step, group["bias_correction"])
                    options = (
                        group["weight_decay"],
                        group["grad_averaging"],
                        self.moment_mode,
                        group["norm_type"],
                    )
                    averages = self._state_tensors(part, "exp_avg")
                    grads = self._gradients_of(part)
                    optimizer_math.make_novograd_step(
                        grads, self._data_of(part), averages, norms, *numbers, *options
                    )
        return loss

    def _first_gradient_norms(self, group: dict[str, Any], params: list[torch.Tensor]) -> torch.Tensor:
        orders = {0: math.inf, 2: 2.0}
        if group["norm_type"] not in orders:
            raise RuntimeError(
                f"FusedNovoGrad got norm_type={group['norm_type']}; it knows 2 (L2) and 0 (largest)"
            )
        if not params or group["init_zero"]:
            device = group["params"][0].device if group["params"] else None
            return torch.zeros(len(params), dtype=torch.float32, device=device)
        return per_tensor_norms(self._gradients_of(params), orders[group["norm_type"]])
