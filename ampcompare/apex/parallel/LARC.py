"""`LARC`: layer-wise adaptive rate control around any optimizer."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampcompare.apex.multi_tensor_apply.arithmetic import multiply_each, multiply_each_, per_tensor_norms
from ampcompare.base.tensors.lists import group_tensors_by_type


class LARC:
    """Scale each gradient by the ratio of its parameter's norm to its own before `optimizer` steps.

    For each parameter with gradient g, weight decay wd and both norms nonzero, r = trust_coefficient * ||p|| /
    (||g|| + wd * ||p|| + eps), and g becomes (g + wd * p) * r. If `clip`, r is min(r / lr, 1), so that the rate never
    exceeds lr; else the rate is lr * r. Where a norm is zero the gradient is left alone, without weight decay.

    This is not a `torch.optim.Optimizer`: pass the inner one, `optim`, to schedulers.

    Source: Apex 25.05, `apex.parallel.LARC`.
    """

    def __init__(
        self, optimizer: Optimizer, trust_coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8
    ) -> None:
        self.optim = optimizer
        self.trust_coefficient = trust_coefficient
        self.eps = eps
        self.clip = clip

    def __repr__(self) -> str:
        return repr(self.optim)

    @property
    def state(self) -> Any:
        """The inner optimizer's state."""
        return self.optim.state

    @property
    def param_groups(self) -> Any:
        """The inner optimizer's groups; may be set."""
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        self.optim.param_groups = value

    def state_dict(self) -> Any:
        """Return the inner optimizer's state dict."""
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the inner optimizer's state."""
        self.optim.load_state_dict(state_dict)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients as the inner optimizer does."""
        self.optim.zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: Any) -> None:
        """Add a group to the inner optimizer."""
        self.optim.add_param_group(param_group)

    @torch.no_grad()
    def step(self) -> None:
        """Adapt all gradients in place, then step the inner optimizer with its weight decay set to 0."""
        decays = [group.get("weight_decay", 0) for group in self.optim.param_groups]
        try:
            for group, decay in zip(self.optim.param_groups, decays, strict=True):
                group["weight_decay"] = 0
                self.adapt_group_gradients(group, decay)
            self.optim.step()
        finally:
            for group, decay in zip(self.optim.param_groups, decays, strict=True):
                group["weight_decay"] = decay

    def adapt_group_gradients(self, group: dict[str, Any], decay: float) -> None:
        """Adapt the gradients of one group in place, with `decay` added to them; call it under `no_grad`."""
        for params in group_tensors_by_type(param for param in group["params"] if param.grad is not None):
            self._adapt_gradients_of_one_type(params, decay, group["lr"])

    def _adapt_gradients_of_one_type(self, params: list[Tensor], decay: float, lr: float | Tensor) -> None:
        weights = [param.data for param in params]
        grads = [param.grad.data for param in params if param.grad is not None]
        # fp16 norms overflow at 65504, and eps rounds to zero in fp16.
        wide = torch.promote_types(weights[0].dtype, torch.float32)
        param_norms = per_tensor_norms(weights, dtype=wide)
        grad_norms = per_tensor_norms(grads, dtype=wide)
        usable = (param_norms != 0) & (grad_norms != 0)
        ratios = self.trust_coefficient * param_norms / (grad_norms + param_norms * decay + self.eps)
        if self.clip:
            ratios = torch.clamp(ratios / lr, max=1)
        ratios = torch.where(usable, ratios, torch.ones_like(ratios))
        if decay != 0:
            decays = usable.to(wide) * decay
            torch._foreach_add_(grads, multiply_each(weights, decays))
        multiply_each_(grads, ratios)
