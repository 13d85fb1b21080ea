"""Run recurrent modules and cells in half under O1.

`torch.nn.modules.rnn` looks its kernels up in `_VF`; it gets a forwarding object there, so that other users of `_VF`
are left alone.

Source: Apex 25.05, `apex/amp/rnn_compat.py`. Weights are cast through autograd, which works for any layout.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.modules import rnn

from . import wrap
from ._engine.casts import cast_nested_tensors, half_cast

if TYPE_CHECKING:
    from .handle import AmpHandle

RNN_NAMES = ["rnn_relu", "rnn_tanh", "gru", "lstm"]
CELL_NAMES = ["rnn_relu_cell", "rnn_tanh_cell", "gru_cell", "lstm_cell"]


class VariableFunctionsShim:
    """Forward every name to the wrapped module, until the name is set here."""

    def __init__(self, forwarded: Any) -> None:
        self._forwarded = forwarded

    def __getattr__(self, name: str) -> Any:
        return getattr(self._forwarded, name)


def has_old_rnns() -> bool:
    """Return whether torch has the recurrent cells of before 1.0: never, since ampcompare needs a later one."""
    return False


def patch_recurrent_kernels(handle: AmpHandle) -> None:
    """Put the casts of recurrent kernels in force."""
    kernels: Any = vars(rnn)["_VF"]
    if not isinstance(kernels, VariableFunctionsShim):
        kernels = VariableFunctionsShim(kernels)
        vars(rnn)["_VF"] = kernels
    for name in RNN_NAMES:
        wrap.replace_function(
            handle, kernels, name, functools.partial(_casting_kernel_wrapper, name=name, handle=handle)
        )
    wrap.replace_function(
        handle, rnn.RNNBase, "check_input", lambda original: _input_check_with_weight_dtype(original, handle)
    )
    for name in CELL_NAMES:
        wrap.cached_cast(kernels, name, handle.half_dtype, handle, try_caching=True)


def _casting_kernel_wrapper(original: Callable[..., Any], name: str, handle: AmpHandle) -> Callable[..., Any]:
    convert = half_cast(handle, name, caching=False)
    half_dtype = handle.half_dtype

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not handle._is_active:
            return original(*args, **kwargs)
        assert len(args) == 9, f"{name} takes 9 positional arguments, got {len(args)}"
        assert not kwargs, f"{name} takes no keyword arguments, got {sorted(kwargs)}"
        # padded: input, hidden, weights, ...; packed: data, batch sizes, hidden, weights, ...
        positions = (0, 1, 2) if isinstance(args[6], bool) else (0, 2, 3)
        cast = list(args)
        cast[positions[-1]] = (
            _half_casts_in_one_storage(cast[positions[-1]], half_dtype) or cast[positions[-1]]
        )
        for position in positions:
            cast[position] = cast_nested_tensors(cast[position], half_dtype, convert)
        return original(*cast)

    return wrapper


def _half_casts_in_one_storage(weights: Any, dtype: torch.dtype) -> list[Tensor] | None:
    """Return half casts of weights that share one storage, laid out alike in one storage of their own; None for others.

    cuDNN takes a storage that `flatten_parameters` laid out as it is, and copies any other weights at every call.
    """
    if not isinstance(weights, (list, tuple)) or not all(weight.dtype is torch.float32 for weight in weights):
        return None
    if len(weights) < 2 or len({weight.untyped_storage().data_ptr() for weight in weights}) > 1:
        return None
    first = weights[0]
    flat = first.new_empty(first.untyped_storage().nbytes() // first.element_size(), dtype=dtype)
    casts = []
    for weight in weights:
        # Not a view of `flat` to autograd: each cast has its own history.
        cast = flat.new_empty(0).set_(
            flat.untyped_storage(), weight.storage_offset(), weight.shape, weight.stride()
        )
        casts.append(cast.copy_(weight))
    return casts


def _input_check_with_weight_dtype(original: Callable[..., Any], handle: AmpHandle) -> Callable[..., Any]:
    """Let `RNNBase.check_input` see the weights' dtype, as the kernel's wrapper will cast input and weights alike."""

    def wrapper(self: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
        weights = self._flat_weights
        if handle._is_active and isinstance(input, Tensor) and input.is_floating_point() and weights:
            if input.dtype is not weights[0].dtype:
                input = torch.empty((), dtype=weights[0].dtype, device="meta").expand(input.shape)
        return original(self, input, *args, **kwargs)

    return wrapper
