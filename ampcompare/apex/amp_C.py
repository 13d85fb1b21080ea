"""Apex's compiled operations by their names and argument order, on torch's list kernels, for any device.

Each takes `(chunk_size, noop_flag, tensor_lists, ...)`; `chunk_size` has no part here. `noop_flag` is an int32 tensor
of one element; an operation that checks for inf or NaN sets it to 1 on the device and never clears it. Lists must be
non-empty, of equal length, row by row of one shape, floating, and on the device of the flag; else `RuntimeError`.
Dtypes may differ within a list; all arithmetic is fp32. Source: Apex 25.05, the bindings of its module `amp_C`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ampcompare.apex.multi_tensor_apply import arithmetic, optimizer_math

__all__ = [
    "multi_tensor_adagrad",
    "multi_tensor_adam",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_axpby",
    "multi_tensor_l2norm",
    "multi_tensor_l2norm_mp",
    "multi_tensor_l2norm_scale",
    "multi_tensor_lamb",
    "multi_tensor_lamb_mp",
    "multi_tensor_lamb_stage1_cuda",
    "multi_tensor_lamb_stage2_cuda",
    "multi_tensor_novograd",
    "multi_tensor_scale",
    "multi_tensor_sgd",
    "multi_tensor_unscale_l2norm",
    "update_scale_hysteresis",
]

update_scale_hysteresis = torch.no_grad()(arithmetic.update_scale_with_hysteresis)

TensorLists = Sequence[Sequence[Tensor]]


@torch.no_grad()
def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, scale: float) -> None:
    """[in, out]: write `in * scale`; the flag is set if any input is not finite, all outputs are written anyway."""
    inputs, outputs = _check_lists(tensor_lists, noop_flag, 2)
    _raise_flag(noop_flag, arithmetic.scale(inputs, outputs, scale))


@torch.no_grad()
def multi_tensor_axpby(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, a: float, b: float, arg_to_check: int
) -> None:
    """[x, y, out]: write `a * x + b * y`; the flag reports inf or NaN in both (`arg_to_check` -1), x (0) or y (1)."""
    xs, ys, outputs = _check_lists(tensor_lists, noop_flag, 3)
    if arg_to_check not in (-1, 0, 1):
        raise RuntimeError(f"arg_to_check is {arg_to_check}; it must be -1 (check both), 0 (check x) or 1 (check y)")
    watched = {-1: [*xs, *ys], 0: xs, 1: ys}[arg_to_check]
    _raise_flag(noop_flag, arithmetic.non_finite(watched))
    arithmetic.axpby(xs, ys, outputs, a, b)


@torch.no_grad()
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, per_tensor: bool | None = None
) -> tuple[Tensor, Tensor]:
    """[x]: return (norm of all, shape (1,); norms of each, shape (n,), or (0,) unless `per_tensor`), both fp32."""
    (tensors,) = _check_lists(tensor_lists, noop_flag, 1)
    return _norms(noop_flag, tensors, per_tensor)


@torch.no_grad()
def multi_tensor_l2norm_mp(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, per_tensor: bool | None = None
) -> tuple[Tensor, Tensor]:
    """[x]: as `multi_tensor_l2norm`, but zeros where the flag is already set."""
    (tensors,) = _check_lists(tensor_lists, noop_flag, 1)
    skipped = noop_flag.reshape(()) != 0
    both = _norms(noop_flag, tensors, per_tensor)
    return torch.where(skipped, 0.0, both[0]), torch.where(skipped, 0.0, both[1])


@torch.no_grad()
def multi_tensor_l2norm_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, scale: float, per_tensor: bool | None = None
) -> tuple[Tensor, Tensor]:
    """[in, out]: write `in * scale`, and return the norms of `in` as `multi_tensor_l2norm` does."""
    inputs, outputs = _check_lists(tensor_lists, noop_flag, 2)
    both = _norms(noop_flag, inputs, per_tensor)
    arithmetic.scale(inputs, outputs, scale)
    return both


@torch.no_grad()
def multi_tensor_unscale_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, inv_scale: Tensor, per_tensor: bool | None = None
) -> tuple[Tensor, Tensor]:
    """[x]: return the norms of `x * inv_scale` as `multi_tensor_l2norm` does; `x` is not changed."""
    (tensors,) = _check_lists(tensor_lists, noop_flag, 1)
    total, each = _norms(noop_flag, tensors, per_tensor)
    factor = inv_scale.reshape(()).abs()
    return total * factor, each * factor


def _norms(noop_flag: Tensor, tensors: Sequence[Tensor], per_tensor: bool | None) -> tuple[Tensor, Tensor]:
    each = arithmetic.per_tensor_norms(tensors)
    total = torch.linalg.vector_norm(each).reshape(1)
    _raise_flag(noop_flag, ~torch.isfinite(total))
    return total, each if per_tensor else each.new_empty(0)


def _check_lists(lists: TensorLists, noop_flag: Tensor, *counts: int) -> list[list[Tensor]]:
    """Return the lists of an operation that takes one of `counts` lists.

    Raises:
        RuntimeError: another number of lists, empty or unequal ones, unequal shapes, a dtype that is not floating, or
            a tensor that is not on the device of the flag.
    """
    if len(lists) not in counts:
        raise RuntimeError(f"got {len(lists)} tensor lists; this operation takes {' or '.join(map(str, counts))}")
    lengths = [len(tensors) for tensors in lists]
    if not lengths[0] or len(set(lengths)) != 1:
        raise RuntimeError(f"tensor lists have lengths {lengths}; they must be equal and not zero")
    for index, row in enumerate(zip(*lists, strict=True)):
        if any(tensor.shape != row[0].shape for tensor in row):
            raise RuntimeError(
                f"tensors at index {index} have shapes {[tuple(t.shape) for t in row]}; they must be equal"
            )
        for tensor in row:
            if not tensor.is_floating_point():
                raise RuntimeError(f"tensor at index {index} has dtype {tensor.dtype}; a floating dtype is needed")
            if tensor.device != noop_flag.device:
                raise RuntimeError(
                    f"tensor at index {index} is on {tensor.device}, the flag on {noop_flag.device}; use one device"
                )
    return [list(tensors) for tensors in lists]


def _raise_flag(noop_flag: Tensor, condition: Tensor) -> None:
    """Set the flag to 1 where `condition`, of one element, is true; nothing waits for the device."""
    noop_flag.masked_fill_(condition.reshape(noop_flag.shape) != 0, 1)


@torch.no_grad()
def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    weight_decay: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float,
) -> None:
    """[grads, params, momentum buffers(, model copies)]: one SGD step; none if the flag is set.

    The host reads the flag, and waits for it, only where more than torch's fused kernel is to be held back.
    """
    grads, params, buffers, *rest = _check_lists(tensor_lists, noop_flag, 3, 4)
    beyond_kernel = rest or (wd_after_momentum and weight_decay != 0.0)
    if (beyond_kernel or not noop_flag.is_cuda) and noop_flag.item():
        return
    optimizer_math.sgd(
        grads,
        params,
        buffers,
        lr=lr,
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        nesterov=nesterov,
        first_run=first_run,
        wd_after_momentum=wd_after_momentum,
        scale=scale,
        found_inf=(noop_flag != 0).to(torch.float32).reshape(()) if noop_flag.is_cuda else None,
        copies=rest[0] if rest else (),
    )


@torch.no_grad()
def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """[grads, params, first moments, second moments]: one Adam step, `mode` 0 with L2 decay, 1 as AdamW."""
    grads, params, exp_avgs, exp_avg_sqs = _check_lists(tensor_lists, noop_flag, 4)
    optimizer_math.adam(
        grads,
        params,
        exp_avgs,
        exp_avg_sqs,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=epsilon,
        step=step,
        adam_w=mode == 1,
        bias_correction=bool(bias_correction),
        weight_decay=weight_decay,
    )


@torch.no_grad()
def multi_tensor_adam_capturable(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    lr: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: Tensor,
) -> None:
    """As `multi_tensor_adam` with `lr`, `step` and `inv_scale` on the device; gradients come back unscaled.

    A fifth list holds fp32 masters of the second: they are updated, and the model parameters follow. Where the flag is
    set nothing changes.
    """
    grads, params, exp_avgs, exp_avg_sqs, *rest = _check_lists(tensor_lists, noop_flag, 4, 5)
    optimizer_math.adam(
        grads,
        rest[0] if rest else params,
        exp_avgs,
        exp_avg_sqs,
        lr=lr.reshape(()),
        beta1=beta1,
        beta2=beta2,
        eps=epsilon,
        step=step,
        adam_w=mode == 1,
        bias_correction=bool(bias_correction),
        weight_decay=weight_decay,
        grad_scale=inv_scale.to(torch.float32).reshape(()).reciprocal(),
        found_inf=(noop_flag != 0).to(torch.float32).reshape(()),
        copies=params if rest else (),
    )


multi_tensor_adam_capturable_master = multi_tensor_adam_capturable


@torch.no_grad()
def multi_tensor_adagrad(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    lr: float,
    epsilon: float,
    mode: int,
    weight_decay: float,
) -> None:
    """[grads, params, sums of squares]: one Adagrad step, `mode` 0 with L2 decay, 1 with decoupled decay."""
    grads, params, sums = _check_lists(tensor_lists, noop_flag, 3)
    optimizer_math.adagrad(grads, params, sums, lr=lr, eps=epsilon, adagrad_w=mode == 1, weight_decay=weight_decay)


@torch.no_grad()
def multi_tensor_novograd(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    grad_norms: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    norm_type: int,
) -> None:
    """[grads, params, moments]: one NovoGrad step, `mode` 0 with the norm inside the moment; `norm_type` 2 or 0."""
    grads, params, exp_avgs = _check_lists(tensor_lists, noop_flag, 3)
    optimizer_math.novograd(
        grads,
        params,
        exp_avgs,
        grad_norms,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=epsilon,
        step=step,
        bias_correction=bool(bias_correction),
        weight_decay=weight_decay,
        grad_averaging=bool(grad_averaging),
        reg_inside_moment=mode == 0,
        max_norm=norm_type == 0,
    )


@torch.no_grad()
def multi_tensor_lamb(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: Tensor,
    max_grad_norm: float,
    use_nvlamb: bool | None = None,
) -> None:
    """[grads, params, first moments, second moments]: one LAMB step; the gradients hold the update afterwards."""
    grads, params, exp_avgs, exp_avg_sqs = _check_lists(tensor_lists, noop_flag, 4)
    optimizer_math.lamb(
        grads,
        params,
        exp_avgs,
        exp_avg_sqs,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=epsilon,
        step=step,
        bias_correction=bool(bias_correction),
        weight_decay=weight_decay,
        grad_averaging=bool(grad_averaging),
        adam_w=mode == 1,
        divisor=optimizer_math.clip_divisor(global_grad_norm, max_grad_norm),
        use_nvlamb=bool(use_nvlamb),
    )


@torch.no_grad()
def multi_tensor_lamb_mp(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    lr: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: Tensor,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: Tensor,
    max_grad_norm: Tensor,
    use_nvlamb: bool | None,
    found_inf: Tensor,
    inv_scale: Tensor,
) -> None:
    """As `multi_tensor_lamb`, with tensors for numbers; a fifth list holds low-precision copies of the parameters.

    Gradients and `global_grad_norm` carry the loss scale, and so does `max_grad_norm`. Nothing changes where the flag
    is set, which the host reads.
    """
    grads, params, exp_avgs, exp_avg_sqs, *rest = _check_lists(tensor_lists, noop_flag, 4, 5)
    if noop_flag.item():
        return
    optimizer_math.lamb(
        grads,
        params,
        exp_avgs,
        exp_avg_sqs,
        lr=lr.reshape(()),
        beta1=beta1,
        beta2=beta2,
        eps=epsilon,
        step=step,
        bias_correction=bool(bias_correction),
        weight_decay=weight_decay,
        grad_averaging=bool(grad_averaging),
        adam_w=mode == 1,
        divisor=optimizer_math.clip_divisor(global_grad_norm, max_grad_norm) / inv_scale.reshape(()),
        use_nvlamb=bool(use_nvlamb),
        copies=rest[0] if rest else (),
    )


@torch.no_grad()
def multi_tensor_lamb_stage1_cuda(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    per_tensor_decay: Tensor,
    step: int,
    beta1: float,
    beta2: float,
    epsilon: float,
    global_grad_norm: Tensor,
    max_global_grad_norm: float,
) -> None:
    """[grads, params, first moments, second moments, updates]: moments and updates; `step` counts from 0."""
    grads, params, exp_avgs, exp_avg_sqs, updates = _check_lists(tensor_lists, noop_flag, 5)
    optimizer_math.compute_update(
        grads,
        params,
        exp_avgs,
        exp_avg_sqs,
        updates,
        divisor=optimizer_math.clip_divisor(global_grad_norm, max_global_grad_norm),
        beta1=beta1,
        beta2=beta2,
        grad_averaging=True,
        step=step + 1,
        bias_correction=True,
        eps=epsilon,
        decoupled_decays=per_tensor_decay.to(params[0].device, torch.float32),
    )


@torch.no_grad()
def multi_tensor_lamb_stage2_cuda(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    per_tensor_param_norm: Tensor,
    per_tensor_update_norm: Tensor,
    lr: float,
    weight_decay: float,
    use_nvlamb: bool | None = None,
) -> None:
    """[params, updates]: subtract the updates, each scaled by ||param|| / ||update|| where that applies."""
    params, updates = _check_lists(tensor_lists, noop_flag, 2)
    optimizer_math.apply_update(
        params,
        updates,
        per_tensor_param_norm,
        per_tensor_update_norm,
        lr=lr,
        adapt=bool(use_nvlamb) or weight_decay != 0.0,
    )
