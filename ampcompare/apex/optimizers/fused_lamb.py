"""`FusedLAMB`: LAMB with clipping by the norm of all gradients."""

from collections.abc import Callable
from typing import Any

import torch

from ampcompare.apex.multi_tensor_apply.arithmetic import global_norm
from ampcompare.apex.multi_tensor_apply.optimizer_math import divisor_for_norm_clip, make_lamb_step
from ampcompare.apex.optimizers.fused_optimizer import FusedOptimizer


class FusedLAMB(FusedOptimizer):
    """LAMB for fp16 and fp32 parameters, with decoupled weight decay (`adam_w_mode=False`: L2).

    State: `exp_avg` and `exp_avg_sq` in the parameter's dtype; `step` in the group, an int. After `step` the gradients
    hold the update, as in Apex.

    Args:
        max_grad_norm: limit of the norm over all groups; it is read from the constructor, never from a group.
        use_nvlamb: adapt the rate without weight decay too.

    Source: Apex 25.05, `apex.optimizers.FusedLAMB`.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedLAMB got amsgrad=True, which it does not support; leave it out")
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.use_nvlamb = use_nvlamb
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
        }
        super().__init__(params, defaults, set_grad_none=set_grad_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have gradients; return what `closure` returned."""
        loss = self._call_closure(closure)
        chosen = [self._params_with_gradient(group["params"]) for group in self.param_groups]
        grads = [self._gradients_of(params) for params in chosen]
        # A norm of norms lets groups live on several devices.
        norms = [global_norm(of_group) for of_group in grads if of_group]
        if not norms:
            for group in self.param_groups:
                self._count_group_step(group)
            return loss
        norm = torch.linalg.vector_norm(torch.cat([part.to(norms[0].device) for part in norms]))
        divisor = divisor_for_norm_clip(norm, self.defaults["max_grad_norm"])
        for group, params, of_group in zip(self.param_groups, chosen, grads, strict=True):
            step = self._count_group_step(group)
            if params:
                beta1, beta2 = group["betas"]
                numbers = (group["lr"], beta1, beta2, group["eps"], step, group["bias_correction"])
                options = (group["weight_decay"], group["grad_averaging"], self.adam_w_mode)
                moments = (self._state_tensors(params, "exp_avg"), self._state_tensors(params, "exp_avg_sq"))
                clip = divisor.to(params[0].device)
                make_lamb_step(
                    of_group, self._data_of(params), *moments, *numbers, *options, clip, self.use_nvlamb
                )
        return loss
