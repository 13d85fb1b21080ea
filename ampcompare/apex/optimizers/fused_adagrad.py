"""`FusedAdagrad`: Adagrad without learning-rate decay."""

from collections.abc import Callable
from typing import Any

import torch

from ampcompare.apex.multi_tensor_apply import optimizer_math
from ampcompare.apex.optimizers.fused_optimizer import FusedOptimizer


class FusedAdagrad(FusedOptimizer):
    """Adagrad for fp16 and fp32 parameters, with L2 decay (`adagrad_w_mode=True`: decoupled).

    State: `sum` in the parameter's dtype, from 0.

    Source: Apex 25.05, `apex.optimizers.FusedAdagrad`.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:
        self.adagrad_w_mode = 1 if adagrad_w_mode else 0
        super().__init__(
            params, {"lr": lr, "eps": eps, "weight_decay": weight_decay}, set_grad_none=set_grad_none
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have gradients; return what `closure` returned."""
        loss = self._call_closure(closure)
        for group in self.param_groups:
            params = self._params_with_gradient(group["params"])
            if params:
                sums = self._state_tensors(params, "sum")
                numbers = (group["lr"], group["eps"], self.adagrad_w_mode, group["weight_decay"])
                optimizer_math.make_adagrad_step(
                    self._gradients_of(params), self._data_of(params), sums, *numbers
                )
        return loss
