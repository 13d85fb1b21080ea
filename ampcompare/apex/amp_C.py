"""Apex's compiled operations by their names and argument order, on torch's list kernels, for any device.

Each takes `(chunk_size, noop_flag, tensor_lists, ...)`, by position; `chunk_size` has no part here. `noop_flag` is an
int32 tensor of one element; an operation that checks for inf or NaN sets it to 1 on the device and never clears it.
Lists must be non-empty, of equal length, row by row of one shape, floating, and on the device of the flag; else
`RuntimeError`.
Dtypes may differ within a list; all arithmetic is fp32. Source: Apex 25.05, the bindings of its module `amp_C`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ampcompare.apex.multi_tensor_apply import arithmetic, optimizer_math

update_scale_hysteresis = torch.no_grad()(arithmetic.update_scale_with_hysteresis)

TensorLists = Sequence[Sequence[Tensor]]


@torch.no_grad()
def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, scale: float) -> None:
    """[in, out]: write `in * scale`; the flag is set if any input is not finite, all outputs are written anyway."""
    inputs, outputs = _checked_tensor_lists(tensor_lists, noop_flag, 2)
    _set_flag_where(noop_flag, arithmetic.scale_into(inputs, outputs, scale))


@torch.no_grad()
def multi_tensor_axpby(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, a: float, b: float, arg_to_check: int
) -> None:
    """[x, y, out]: write `a * x + b * y`; the flag reports inf or NaN in both (`arg_to_check` -1), x (0) or y (1)."""
    xs, ys, outputs = _checked_tensor_lists(tensor_lists, noop_flag, 3)
    if arg_to_check not in (-1, 0, 1):
        raise RuntimeError(
            f"arg_to_check is {arg_to_check}; it must be -1 (check both), 0 (check x) or 1 (check y)"
        )
    watched = {-1: [*xs, *ys], 0: xs, 1: ys}[arg_to_check]
    _set_flag_where(noop_flag, arithmetic.any_non_finite(watched))
    arithmetic.add_scaled_into(xs, ys, outputs, a, b)


@torch.no_grad()
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, per_tensor: bool | None = None
) -> tuple[Tensor, Tensor]:
    """[x]: return (norm of all, shape (1,); norms of each, shape (n,), or (0,) unless `per_tensor`), both fp32."""
    (tensors,) = _checked_tensor_lists(tensor_lists, noop_flag, 1)
    return _norms_with_flag(noop_flag, tensors, per_tensor)


@torch.no_grad()
def multi_tensor_l2norm_mp(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, per_tensor: bool | None = None
) -> tuple[Tensor, Tensor]:
    """[x]: as `multi_tensor_l2norm`, but zeros where the flag is already set."""
    (tensors,) = _checked_tensor_lists(tensor_lists, noop_flag, 1)
    skipped = noop_flag.reshape(()) != 0
    both = _norms_with_flag(noop_flag, tensors, per_tensor)
    return torch.where(skipped, 0.0, both[0]), torch.where(skipped, 0.0, both[1])


@torch.no_grad()
def multi_tensor_l2norm_scale(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    scale: float,
    per_tensor: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """[in, out]: write `in * scale`, and return the norms of `in` as `multi_tensor_l2norm` does."""
    inputs, outputs = _checked_tensor_lists(tensor_lists, noop_flag, 2)
    both = _norms_with_flag(noop_flag, inputs, per_tensor)
    arithmetic.scale_into(inputs, outputs, scale)
    return both


@torch.no_grad()
def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    inv_scale: Tensor,
    per_tensor: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """[x]: return the norms of `x * inv_scale` as `multi_tensor_l2norm` does; `x` is not changed."""
    (tensors,) = _checked_tensor_lists(tensor_lists, noop_flag, 1)
    total, each = _norms_with_flag(noop_flag, tensors, per_tensor)
    factor = inv_scale.reshape(()).abs()
    return total * factor, each * factor


def _norms_with_flag(
    noop_flag: Tensor, tensors: Sequence[Tensor], per_tensor: bool | None
) -> tuple[Tensor, Tensor]:
    each = arithmetic.per_tensor_norms(tensors)
    total = torch.linalg.vector_norm(each).reshape(1)
    _set_flag_where(noop_flag, ~torch.isfinite(total))
    return total, each if per_tensor else each.new_empty(0)


def _checked_tensor_lists(lists: TensorLists, noop_flag: Tensor, *counts: int) -> list[list[Tensor]]:
    """Return the lists of an operation that takes one of `counts` lists.

    Raises:
        RuntimeError: another number of lists, empty or unequal ones, unequal shapes, a dtype that is not floating, or
            a tensor that is not on the device of the flag.
    """
    if len(lists) not in counts:
        raise RuntimeError(
            f"got {len(lists)} tensor lists; this operation takes {' or '.join(map(str, counts))}"
        )
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
                raise RuntimeError(
                    f"tensor at index {index} has dtype {tensor.dtype}; a floating dtype is needed"
                )
            if tensor.device != noop_flag.device:
                raise RuntimeError(
                    f"tensor at index {index} is on {tensor.device}, the flag on {noop_flag.device}; use one device"
                )
    return [list(tensors) for tensors in lists]


def _set_flag_where(noop_flag: Tensor, condition: Tensor) -> None:
    """Set the flag to 1 where `condition`, of one element, is true; nothing waits for the device."""
    noop_flag.masked_fill_(condition.reshape(noop_flag.shape) != 0, 1)


def _make_list_operation(function: Callable[..., None], count: int) -> Callable[..., None]:
    """Return the operation that applies a function to `count` lists and to the numbers behind them."""

    @torch.no_grad()
    def operation(chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, *numbers: Any) -> None:
        function(*_checked_tensor_lists(tensor_lists, noop_flag, count), *numbers)

    return operation


# [grads, params, first moments, second moments], lr, beta1, beta2, epsilon, step, mode (0: L2, 1: decoupled decay),
# bias_correction, weight_decay
multi_tensor_adam = _make_list_operation(optimizer_math.make_adam_step, 4)
# [grads, params, sums of squares], lr, epsilon, mode (0: L2, 1: decoupled decay), weight_decay
multi_tensor_adagrad = _make_list_operation(optimizer_math.make_adagrad_step, 3)
# [grads, params, moments], grad_norms, lr, beta1, beta2, epsilon, step, bias_correction, weight_decay, grad_averaging,
# mode (0: with the norm inside the moment), norm_type (2 or 0)
multi_tensor_novograd = _make_list_operation(optimizer_math.make_novograd_step, 3)


@torch.no_grad()
def multi_tensor_sgd(chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, *numbers: Any) -> None:
    """[grads, params, momentum buffers(, model copies)]: one SGD step; none if the flag is set.

    The host reads the flag, and waits for it, only where more than torch's fused kernel is to be held back.

    Args:
        numbers: weight_decay, momentum, dampening, lr, nesterov, first_run, wd_after_momentum, scale.
    """
    grads, params, buffers, *rest = _checked_tensor_lists(tensor_lists, noop_flag, 3, 4)
    weight_decay, wd_after_momentum = numbers[0], numbers[6]
    beyond_kernel = rest or (wd_after_momentum and weight_decay != 0.0)
    if (beyond_kernel or not noop_flag.is_cuda) and noop_flag.item():
        return
    found_inf = _flag_as_found_inf(noop_flag) if noop_flag.is_cuda else None
    optimizer_math.make_sgd_step(
        grads, params, buffers, *numbers, found_inf=found_inf, copies=rest[0] if rest else ()
    )


def _flag_as_found_inf(noop_flag: Tensor) -> Tensor:
    return (noop_flag != 0).to(torch.float32).reshape(())


@torch.no_grad()
def multi_tensor_adam_capturable(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, lr: Tensor, *numbers: Any
) -> None:
    """As `multi_tensor_adam` with `lr`, `step` and a last argument `inv_scale` on the device; gradients are unscaled.

    A fifth list holds fp32 masters of the second: they are updated, and the model parameters follow. Where the flag is
    set nothing changes.
    """
    grads, params, exp_avgs, exp_avg_sqs, *rest = _checked_tensor_lists(tensor_lists, noop_flag, 4, 5)
    *numbers_of_adam, inv_scale = numbers
    optimizer_math.make_adam_step(
        grads,
        rest[0] if rest else params,
        exp_avgs,
        exp_avg_sqs,
        lr.reshape(()),
        *numbers_of_adam,
        grad_scale=inv_scale.to(torch.float32).reshape(()).reciprocal(),
        found_inf=_flag_as_found_inf(noop_flag),
        copies=params if rest else (),
    )


multi_tensor_adam_capturable_master = multi_tensor_adam_capturable


@torch.no_grad()
def multi_tensor_lamb(chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, *numbers: Any) -> None:
    """[grads, params, first moments, second moments]: one LAMB step; the gradients hold the update afterwards.

    Args:
        numbers: lr, beta1, beta2, epsilon, step, bias_correction, weight_decay, grad_averaging, mode (0: L2, 1:
            decoupled decay), global_grad_norm, max_grad_norm, use_nvlamb (None by default).
    """
    numbers_of_lamb = (
        *numbers[:9],
        optimizer_math.divisor_for_norm_clip(numbers[9], numbers[10]),
        any(numbers[11:]),
    )
    grads, params, exp_avgs, exp_avg_sqs = _checked_tensor_lists(tensor_lists, noop_flag, 4)
    optimizer_math.make_lamb_step(grads, params, exp_avgs, exp_avg_sqs, *numbers_of_lamb)


@torch.no_grad()
def multi_tensor_lamb_mp(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, lr: Tensor, *numbers: Any
) -> None:
    """As `multi_tensor_lamb`, with tensors for numbers; a fifth list holds low-precision copies of the parameters.

    Behind `use_nvlamb` come `found_inf`, without a part here, and `inv_scale`. Gradients and `global_grad_norm` carry
    the loss scale, and so does `max_grad_norm`. Nothing changes where the flag is set, which the host reads.
    """
    grads, params, exp_avgs, exp_avg_sqs, *rest = _checked_tensor_lists(tensor_lists, noop_flag, 4, 5)
    if noop_flag.item():
        return
    global_grad_norm, max_grad_norm, use_nvlamb, _, inv_scale = numbers[8:]
    divisor = optimizer_math.divisor_for_norm_clip(global_grad_norm, max_grad_norm) / inv_scale.reshape(())
    numbers_of_lamb = (lr.reshape(()), *numbers[:8], divisor, use_nvlamb)
    optimizer_math.make_lamb_step(
        grads, params, exp_avgs, exp_avg_sqs, *numbers_of_lamb, copies=rest[0] if rest else ()
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
    optimizer_math.write_lamb_updates(
        *_checked_tensor_lists(tensor_lists, noop_flag, 5),
        divisor=optimizer_math.divisor_for_norm_clip(global_grad_norm, max_global_grad_norm),
        beta1=beta1,
        beta2=beta2,
        grad_averaging=True,
        step=step + 1,
        bias_correction=True,
        eps=epsilon,
        decoupled_decays=per_tensor_decay.to(noop_flag.device, torch.float32),
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
    params, updates = _checked_tensor_lists(tensor_lists, noop_flag, 2)
    adapt = bool(use_nvlamb) or weight_decay != 0.0
    optimizer_math.apply_lamb_updates(
        params, updates, per_tensor_param_norm, per_tensor_update_norm, lr=lr, adapt=adapt
    )
