"""`FusedSGD`: SGD with momentum that can write fp16 model weights together with their fp32 masters."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import required

from ampcompare.apex.multi_tensor_apply import optimizer_math
from ampcompare.apex.optimizers.fused_optimizer import FusedOptimizer


class FusedSGD(FusedOptimizer):
    """SGD for fp16 and fp32 parameters, equal to `torch.optim.SGD` unless `wd_after_momentum`.

    State: `momentum_buffer` in the parameter's dtype, made even where momentum is 0.

    Args:
        wd_after_momentum: keep weight decay out of the momentum buffer.
        materialize_master_grads: under amp with master weights, give the masters fp32 gradients. If False the step
            reads the fp16 model gradients and divides them by `most_recent_scale`.

    Attributes:
        most_recent_scale: loss scale that the gradients carry; amp's backward sets it, `step` resets it to 1.
        scale_set_by_backward: whether a backward of this iteration has set it.

    Source: Apex 25.05, `apex.optimizers.FusedSGD`.
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
        set_grad_none: bool = False,
    ) -> None:
        for name, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)):
            if value is not required and value < 0.0:
                raise ValueError(f"FusedSGD got {name}={value}; it must not be negative")
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError(
                f"FusedSGD got nesterov with momentum={momentum} and dampening={dampening};"
                " it needs a momentum above 0 and no dampening"
            )
        self.wd_after_momentum = wd_after_momentum
        self.materialize_master_grads = materialize_master_grads
        self.most_recent_scale = 1.0
        self.scale_set_by_backward = False
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults, set_grad_none=set_grad_none)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("nesterov", False)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have gradients; return what `closure` returned.

        Under amp with master weights the fp16 model weights are written as well.
        """
        loss = self._call_closure(closure)
        stash: Any = getattr(self, "_amp_stash", None)
        with_masters = hasattr(stash, "fp32_from_fp16_groups")
        for index, group in enumerate(self.param_groups):
            if with_masters:
                self._step_master_weights(group, stash.fp16_groups[index], stash.fp32_from_fp16_groups[index])
                own_params = stash.fp32_from_fp32_groups[index]
            else:
                own_params = group["params"]
            if self._strict:
                # Apex silently skips other dtypes.
                own_params = [param for param in own_params if param.dtype in self.supported]
            params = self._params_with_gradient(own_params)
            for dtype in self.supported:
                launched = [param for param in params if param.dtype is dtype]
                self._launch_sgd_kernel(group, self._gradients_of(launched), launched)
        self.most_recent_scale = 1.0
        self.scale_set_by_backward = False
        return loss

    def _step_master_weights(
        self, group: dict[str, Any], model_params: Sequence[Tensor], masters: Sequence[Tensor]
    ) -> None:
        grads: list[Tensor] = []
        stepped: list[Tensor] = []
        copies: list[Tensor] = []
        for model, master in zip(model_params, masters, strict=True):
            grad = master.grad if self.materialize_master_grads else model.grad
            if grad is not None:
                grads.append(grad.data)
                stepped.append(master)
                copies.append(model)
        self._launch_sgd_kernel(group, grads, stepped, copies)

    def _launch_sgd_kernel(
        self,
        group: dict[str, Any],
        grads: Sequence[Tensor],
        params: Sequence[Tensor],
        models: Sequence[Tensor] = (),
    ) -> None:
        if not params:
            return
        has_buffer = ["momentum_buffer" in self.state[param] for param in params]
        buffers = self._state_tensors(params, "momentum_buffer")
        if self._strict:
            # In Apex the last parameter of a launch decides for all of them.
            has_buffer = [has_buffer[-1]] * len(params)
        for first_run in (True, False):
            chosen = [index for index, known in enumerate(has_buffer) if known is not first_run]
            if not chosen:
                continue
            optimizer_math.make_sgd_step(
                [grads[index] for index in chosen],
                self._data_of(params[index] for index in chosen),
                [buffers[index] for index in chosen],
                *(
                    group["weight_decay"],
                    group["momentum"],
                    group["dampening"],
                    group["lr"],
                    group["nesterov"],
                ),
                first_run,
                self.wd_after_momentum,
                scale=1.0 / self.most_recent_scale,
                copies=self._data_of(models[index] for index in chosen) if models else (),
            )
