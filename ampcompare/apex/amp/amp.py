"""Patch torch with O1's casts, and register user functions for them.

Source: Apex 25.05, `apex/amp/amp.py`; later wrappers sit outside earlier ones, in Apex's order.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ampcompare.apex import deprecated_warning

from . import rnn_compat, wrap
from ._amp_state import _amp_state
from ._engine.casts import float_cast, half_cast
from .handle import AmpHandle, NoOpHandle
from .lists import functional_overrides, tensor_overrides, torch_overrides

Function = TypeVar("Function", bound=Callable[..., Any])

_HALF = "half"
_FLOAT = "float"
_PROMOTE = "promote"


def _casting_wrapper_of(kind: str, function: Callable[..., Any], handle: AmpHandle) -> Callable[..., Any]:
    name = getattr(function, "__name__", repr(function))
    if kind == _HALF:
        return wrap.make_cast_wrapper(
            function, torch.float16, half_cast(handle, name, dtype=torch.float16), handle
        )
    if kind == _FLOAT:
        return wrap.make_cast_wrapper(function, torch.float32, float_cast(handle, name), handle)
    return wrap.make_promote_wrapper(function, float_cast(handle, name), handle)


def _decorate_with_cast(function: Function, kind: str) -> Function:
    deprecated_warning(f"amp.{kind}_function is deprecated; `torch.amp.custom_fwd` is its successor.")
    cached: tuple[AmpHandle, Callable[..., Any]] | None = None

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nonlocal cached
        handle: Any = _amp_state.decorator_handle
        if handle is None or not handle._is_active:
            return function(*args, **kwargs)
        if cached is None or cached[0] is not handle:
            cached = (handle, _casting_wrapper_of(kind, function, handle))
        return cached[1](*args, **kwargs)

    return wrapper  # type: ignore[return-value]


def half_function(fn: Function) -> Function:
    """Decorate a function to receive float16 while O1's casts are on."""
    return _decorate_with_cast(fn, _HALF)


def float_function(fn: Function) -> Function:
    """Decorate a function to receive float32 while O1's casts are on."""
    return _decorate_with_cast(fn, _FLOAT)


def promote_function(fn: Function) -> Function:
    """Decorate a function to receive float32 where float16 and float32 meet, while O1's casts are on."""
    return _decorate_with_cast(fn, _PROMOTE)


def _register_cast_of_function(module: Any, name: str, kind: str) -> None:
    if not hasattr(module, name):
        raise ValueError(f"No function named {name} in module {module}.")
    entry = (module, name, kind)
    if entry not in _amp_state.registered:
        _amp_state.registered.append(entry)


def register_half_function(module: Any, name: str) -> None:
    """Make the next `initialize` at O1 cast the arguments of `module.name` to float16; ValueError if it is missing."""
    _register_cast_of_function(module, name, _HALF)


def register_float_function(module: Any, name: str) -> None:
    """Make the next `initialize` at O1 cast the arguments of `module.name` to float32; ValueError if it is missing."""
    _register_cast_of_function(module, name, _FLOAT)


def register_promote_function(module: Any, name: str) -> None:
    """Make the next `initialize` at O1 promote mixed float16 and float32 arguments of `module.name` to float32."""
    _register_cast_of_function(module, name, _PROMOTE)


def init(
    enabled: bool = True,
    loss_scale: float | str = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
    *,
    _cuda_only: bool | None = None,
    _half_dtype: torch.dtype = torch.float16,
) -> AmpHandle | NoOpHandle:
    """Patch torch for O1, without preparing models or optimizers.

    Args:
        enabled: False returns a handle that does nothing, and stops the casts of decorated functions.
        loss_scale: of the handle's own `scale_loss`.
        allow_banned: run `F.binary_cross_entropy` on half inputs in float instead of raising.

    Returns:
        The handle, also kept as `amp._amp_state.handle`; its `_deactivate()` undoes the patches.

    A second call replaces the patches of the first and keeps its registered functions; in strict mode it adds a layer.
    """
    if not enabled:
        _amp_state.decorator_handle = None
        return NoOpHandle()
    strict = _amp_state.strict
    if _cuda_only is None:
        # `ampcompare exec --device cpu` says that there is a GPU, and has tensors elsewhere.
        _cuda_only = torch.cuda.is_available() and torch.empty(0, device="cuda").is_cuda
    handle = AmpHandle(
        loss_scale, enable_caching, verbose, strict=strict, cuda_only=_cuda_only, half_dtype=_half_dtype
    )
    previous = _amp_state.__dict__.get("handle")
    registered = list(_amp_state.registered)
    if previous is not None and previous._saved and not strict:
        registered = [entry for entry in previous._registered if entry not in registered] + registered
        previous._deactivate()
    handle._registered = registered
    _amp_state.registered.clear()
    for kinds in ((_HALF, _FLOAT), (_PROMOTE,)):
        for module, function, kind in registered:
            if kind in kinds:
                wrap.replace_function(
                    handle, module, function, functools.partial(_casting_wrapper_of, kind, handle=handle)
                )
    _patch_listed_functions(handle)
    rnn_compat.patch_recurrent_kernels(handle)
    for name, message in functional_overrides.BANNED_FUNCS:
        if allow_banned:
            wrap.cached_cast(functional_overrides.MODULE, name, torch.float32, handle)
        else:
            wrap.err_if_any_half(functional_overrides.MODULE, name, handle, message)
    _amp_state.handle = _amp_state.decorator_handle = handle
    return handle


def _patch_listed_functions(handle: AmpHandle) -> None:
    for overrides in (functional_overrides, torch_overrides, tensor_overrides):
        for name in overrides.FP16_FUNCS:
            wrap.cached_cast(overrides.MODULE, name, handle.half_dtype, handle, try_caching=True)
        for name in overrides.FP32_FUNCS:
            wrap.cached_cast(overrides.MODULE, name, torch.float32, handle)
    for overrides in (torch_overrides, tensor_overrides):
        for name in overrides.CASTS:
            wrap.promote(overrides.MODULE, name, handle)
        for name in overrides.SEQUENCE_CASTS:
            wrap.sequence_promote(overrides.MODULE, name, handle)
    for name in torch_overrides.FP32_FUNCS:
        wrap.err_if_any_half(torch_overrides.MODULE, f"{name}_", handle)
    for name in tensor_overrides.FP32_FUNCS:
        wrap.err_if_arg0_half(tensor_overrides.MODULE, f"{name}_", handle)
    for name in (*tensor_overrides.FP16_FUNCS, *tensor_overrides.CASTS):
        wrap.promote_match_arg0(tensor_overrides.MODULE, f"{name}_", handle)
