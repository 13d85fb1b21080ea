"""`FusedAdam` of 2018: Adam that receives scaled gradients, clips by given norms, and writes model weights."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampcompare.apex.multi_tensor_apply.arithmetic import (
    as_fp32_tensors,
    copy_into_targets,
    global_norm,
    rounded_to_fp32,
)
from ampcompare.base.tensors.lists import copy_tensors_by_dtype

TensorGroups = Iterable[Tensor] | Sequence[Sequence[Tensor | None]]


def split_by_group(tensors: Any, groups: Sequence[dict[str, Any]], name: str) -> list[list[Tensor | None]]:
    """Return a list of tensors, or of None, for each group, as long as the group.

    `tensors` is None, an iterable (of a single group), or a list of lists; other lengths are a RuntimeError.
    """
    sizes = [len(group["params"]) for group in groups]
    if tensors is None:
        return [[None] * size for size in sizes]
    rows = list(tensors)
    lists = [list(row) for row in rows] if rows and isinstance(rows[0], list) else [rows]
    lengths = [len(row) for row in lists]
    if lengths != sizes:
        raise RuntimeError(
            f"step got {name} for groups of {lengths} tensors; the optimizer has groups of {sizes}"
        )
    return lists


class FusedAdam(Optimizer):
    """Adam with the signature of 2018, usually inside `FP16_Optimizer`.

    State: `step`, `exp_avg` and `exp_avg_sq` of each parameter, the averages in the parameter's dtype. Arithmetic is
    fp32. Weight decay is decoupled from the averages, and scaled by the bias correction as the step is.

    Args:
        eps_inside_sqrt: add `eps` to the second moment before its root instead of to the root.
        max_grad_norm: clip each group by the norm of its gradients; 0 for no clipping.
        use_mt, amp_scale_adjustment: ignored.

    Source: Apex 25.05, `apex.contrib.optimizers.FusedAdam`.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        amsgrad: bool = False,
        use_mt: bool = False,
        amp_scale_adjustment: float = 1.0,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedAdam got amsgrad=True, which it does not support; use torch.optim.AdamW")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "max_grad_norm": max_grad_norm,
        }
        super().__init__(params, defaults)
        self.eps_mode = 0 if eps_inside_sqrt else 1

    def __getstate__(self) -> dict[str, Any]:
        """Return all that a copy or a pickle needs, the place of `eps` included."""
        return {**super().__getstate__(), "eps_mode": self.eps_mode}

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: TensorGroups | None = None,
        output_params: TensorGroups | None = None,
        scale: float = 1.0,
        grad_norms: Sequence[Any] | None = None,
    ) -> Any:
        """Update the parameters that have gradients; return what `closure` returned.

        Args:
            grads: gradients to use instead of those of the parameters; one list, or one for each group.
            output_params: model weights, in any dtype, that are written together with the parameters.
            scale: what the gradients are divided by.
            grad_norms: norm of the gradients of each group, scaled as they are; taken here where it is missing.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        given = split_by_group(grads, self.param_groups, "grads")
        outputs = split_by_group(output_params, self.param_groups, "output_params")
        norms = grad_norms if grad_norms is not None else [None] * len(self.param_groups)
        for group, of_group, copies, norm in zip(self.param_groups, given, outputs, norms, strict=True):
            rows = [
                (param, param.grad if grad is None else grad, copy)
                for param, grad, copy in zip(group["params"], of_group, copies, strict=True)
            ]
            present = [(param, grad.detach(), copy) for param, grad, copy in rows if grad is not None]
            if present:
                self._step_group(group, present, scale, norm)
        return loss

    def _step_group(
        self,
        group: dict[str, Any],
        rows: Sequence[tuple[Tensor, Tensor, Tensor | None]],
        scale: float,
        norm: Any,
    ) -> None:
        params, grads = [row[0].data for row in rows], [row[1] for row in rows]
        if any(grad.is_sparse for grad in grads):
            raise RuntimeError(
                "FusedAdam got a sparse gradient; use dense gradients, or torch.optim.SparseAdam"
            )
        divisor = scale
        if group["max_grad_norm"] > 0:
            total_norm = float(global_norm(grads) if norm is None else norm)
            clip = (total_norm / scale + 1e-6) / group["max_grad_norm"]
            divisor = scale * clip if clip > 1 else scale
        by_step: dict[int, list[int]] = {}
        for index, (param, _, _) in enumerate(rows):
            state = self.state[param]
            if not state:
                state.update(
                    step=0, exp_avg=torch.zeros_like(param.data), exp_avg_sq=torch.zeros_like(param.data)
                )
            state["step"] += 1
            by_step.setdefault(state["step"], []).append(index)
        averages = [self.state[row[0]]["exp_avg"] for row in rows]
        squares = [self.state[row[0]]["exp_avg_sq"] for row in rows]
        for step, chosen in by_step.items():
            self._apply_adam_kernel(
                group,
                step,
                list(
                    torch._foreach_div(as_fp32_tensors([grads[i] for i in chosen]), rounded_to_fp32(divisor))
                ),
                [params[i] for i in chosen],
                [averages[i] for i in chosen],
                [squares[i] for i in chosen],
            )
        copied = [(row[2], param) for row, param in zip(rows, params, strict=True) if row[2] is not None]
        if copied:
            copy_tensors_by_dtype([copy.data for copy, _ in copied], [param for _, param in copied])

    def _apply_adam_kernel(
        self,
        group: dict[str, Any],
        step: int,
        grads: list[Tensor],
        params: Sequence[Tensor],
        averages: Sequence[Tensor],
        squares: Sequence[Tensor],
    ) -> None:
        beta1, beta2 = (rounded_to_fp32(beta) for beta in group["betas"])
        rate = group["lr"]
        if group["bias_correction"]:
            rate = rate * math.sqrt(1.0 - beta2**step) / (1.0 - beta1**step)
        work_params = as_fp32_tensors(params)
        work_averages = as_fp32_tensors(averages)
        work_squares = as_fp32_tensors(squares)
        torch._foreach_mul_(work_averages, beta1)
        torch._foreach_add_(work_averages, grads, alpha=1.0 - beta1)
        torch._foreach_mul_(work_squares, beta2)
        torch._foreach_addcmul_(work_squares, grads, grads, 1.0 - beta2)
        if self.eps_mode == 0:
            denominators = torch._foreach_sqrt(torch._foreach_add(work_squares, group["eps"]))
        else:
            denominators = torch._foreach_add(torch._foreach_sqrt(work_squares), group["eps"])
        updates = torch._foreach_div(work_averages, denominators)
        torch._foreach_add_(updates, work_params, alpha=group["weight_decay"])
        torch._foreach_add_(work_params, updates, alpha=-rate)
        copy_into_targets([*params, *averages, *squares], [*work_params, *work_averages, *work_squares])
