"""`FusedSGD` of `apex.contrib.optimizers`, which `FP16_Optimizer` of the same package steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import required

from ampcompare.apex.contrib.optimizers.fused_adam import TensorGroups, per_group
from ampcompare.apex.multi_tensor_apply import optimizer_math
from ampcompare.apex.optimizers.fused_sgd import FusedSGD as _FusedSGD
from ampcompare.base.tensors.lists import copy_by_dtype

__all__ = ["FusedSGD"]


class FusedSGD(_FusedSGD):
    """SGD that is handed scaled gradients and writes model weights.

    Arguments and errors of the constructor are those of `ampcompare.apex.optimizers.FusedSGD`.

    Source: Apex 25.05, `apex.contrib.optimizers.fused_sgd.FusedSGD`.
    """

    def __init__(
        self,
        params: Any,
        lr: Any = required,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
    ) -> None:
        super().__init__(
            params, lr, momentum, dampening, weight_decay, nesterov, wd_after_momentum, materialize_master_grads
        )

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: TensorGroups | None = None,
        output_params: TensorGroups | None = None,
        scale: float = 1.0,
        grad_norms: Any = None,
    ) -> Any:
        """Update the parameters and `output_params` from `grads / scale`; return what `closure` returned.

        Raises:
            RuntimeError: without `grads` or `output_params`, which `FP16_Optimizer` gives; under amp.
        """
        if hasattr(self, "_amp_stash"):
            raise RuntimeError("apex.contrib.optimizers.FusedSGD cannot be used with amp; use apex.optimizers.FusedSGD")
        if grads is None or output_params is None:
            raise RuntimeError(
                "apex.contrib.optimizers.FusedSGD.step needs grads and output_params: wrap the optimizer in "
                "apex.contrib.optimizers.FP16_Optimizer, or use apex.optimizers.FusedSGD"
            )
        loss = self._evaluate(closure)
        given = per_group(grads, self.param_groups, "grads")
        outputs = per_group(output_params, self.param_groups, "output_params")
        for group, of_group, models in zip(self.param_groups, given, outputs, strict=True):
            # Checked for each parameter: a new buffer starts as its gradient.
            by_age: dict[bool, list[tuple[Tensor, Tensor, Tensor | None]]] = {}
            for param, grad, model in zip(group["params"], of_group, models, strict=True):
                if grad is not None:
                    by_age.setdefault("momentum_buffer" not in self.state[param], []).append((param, grad, model))
            for first_run, rows in by_age.items():
                params = [row[0] for row in rows]
                optimizer_math.sgd(
                    [row[1].detach() for row in rows],
                    self._data(params),
                    self._state_tensors(params, "momentum_buffer"),
                    lr=group["lr"],
                    momentum=group["momentum"],
                    dampening=group["dampening"],
                    weight_decay=group["weight_decay"],
                    nesterov=group["nesterov"],
                    first_run=first_run,
                    wd_after_momentum=self.wd_after_momentum,
                    scale=1.0 / scale,
                )
                copied = [(row[2].data, row[0].data) for row in rows if row[2] is not None]
                copy_by_dtype([model for model, _ in copied], [param for _, param in copied])
        return loss
