"""Wrap functions so that they receive arguments of the right dtype, and put the wrappers in place.

Every wrapper first checks whether casts are on, and then decides by class and dtype alone: it runs at each call of
each operation.

Source: Apex 25.05, `apex/amp/wrap.py`.

An exact signature packs no arguments, which is most of what a wrapper costs. Whatever is not the plain case goes to
the general wrapper of the same function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ._engine.casts import (
    Cast,
    cached_weight_cast,
    cast_nested_tensors,
    collect_floating_dtypes,
    float_cast,
    half_cast,
)

if TYPE_CHECKING:
    from .handle import AmpHandle

Function = Callable[..., Any]

_FLOAT32 = torch.float32
# A tuple for isinstance: torch.compile does not find a class in a frozenset of classes.
_SCALARS = (int, float, bool, str, type(None), torch.dtype, torch.device)
_NUMBERS = frozenset({int, float, bool})
_MISSING: Any = object()


def replace_function(handle: AmpHandle, module: Any, name: str, make: Callable[[Function], Function]) -> None:
    """Replace `module.name` by `make(original)`, noting the original in the handle.

    A class stays a class: its constructor is wrapped.
    """
    original: Any = getattr(module, name)
    is_class: bool = isinstance(original, type)
    if is_class:
        module = original
        name = "__init__"
        original = original.__init__
    inherited = isinstance(module, type) and name not in vars(module)
    wrapper = make(original)
    functools.update_wrapper(
        wrapper, original, assigned=("__module__", "__name__", "__qualname__", "__doc__"), updated=()
    )
    handle._save_func(module, name, original, inherited)
    setattr(module, name, wrapper)


def make_cast_wrapper(original: Function, target: torch.dtype, convert: Cast, handle: AmpHandle) -> Function:
    """Return `original` with all floating-point arguments cast to `target`."""
    keep_out = not handle.strict

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not handle._is_active:
            return original(*args, **kwargs)
        cast: list[Any] | None = None
        for index, value in enumerate(args):
            kind = value.__class__
            if kind is Tensor or kind is Parameter:
                dtype = value.dtype
                if dtype is target or not dtype.is_floating_point:
                    continue
                new = convert(value)
            elif isinstance(value, _SCALARS):
                continue
            else:
                new = cast_nested_tensors(value, target, convert)
            if cast is None:
                cast = list(args)
            cast[index] = new
        if kwargs:
            if keep_out and kwargs.get("out") is not None:
                return _compute_into_out(original, args if cast is None else cast, kwargs, target, convert)
            for name, value in kwargs.items():
                if not isinstance(value, _SCALARS):
                    # `kwargs` is this call's own dict, and its keys stay.
                    kwargs[name] = cast_nested_tensors(value, target, convert)
        return original(*(args if cast is None else cast), **kwargs)

    return wrapper


def _compute_into_out(
    original: Function, args: Any, kwargs: dict[str, Any], target: torch.dtype, convert: Cast
) -> Any:
    """Compute in `target`, and write the result into the caller's `out` tensors, whatever their dtype."""
    kwargs = dict(kwargs)
    out = kwargs.pop("out")
    with torch.no_grad():
        results = original(
            *args, **{name: cast_nested_tensors(value, target, convert) for name, value in kwargs.items()}
        )
        pairs = [(out, results)] if isinstance(out, Tensor) else list(zip(out, results, strict=True))
        for buffer, result in pairs:
            if buffer.shape != result.shape:
                buffer.resize_(result.shape)
            buffer.copy_(result)
    return out


def cached_cast(
    module: Any, name: str, target: torch.dtype, handle: AmpHandle, try_caching: bool = False
) -> None:
    """Make `module.name` receive the handle's 16-bit type or float32; missing names are skipped."""
    if not hasattr(module, name):
        return
    convert = float_cast(handle, name) if target is _FLOAT32 else half_cast(handle, name, caching=try_caching)
    cast_weight = cached_weight_cast(handle) if (module, name) == (torch.nn.functional, "linear") else None

    def make(original: Function) -> Function:
        general = make_cast_wrapper(original, target, convert, handle)
        return (
            general
            if cast_weight is None
            else _fast_linear_wrapper(original, general, convert, cast_weight, handle)
        )

    replace_function(handle, module, name, make)


def make_promote_wrapper(original: Function, convert: Cast, handle: AmpHandle) -> Function:
    """Return `original` with half arguments cast to float where others are float.

    Raises (the wrapper):
        NotImplementedError: any other mix of floating-point dtypes.
    """
    cuda_only = handle.cuda_only
    promoted = {handle.half_dtype, _FLOAT32}

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not handle._is_active:
            return original(*args, **kwargs)
        dtypes = collect_floating_dtypes(args, kwargs, cuda_only)
        if len(dtypes) <= 1:
            return original(*args, **kwargs)
        if dtypes != promoted:
            raise NotImplementedError(
                f"{_opt_level_of(handle)} cannot choose a type for {_function_name(original)} of "
                f"{_dtype_names_text(dtypes)}: it only "
                f"promotes {_dtype_names_text({handle.half_dtype})} to float32.  Cast one of the arguments."
            )
        new_args = [cast_nested_tensors(value, _FLOAT32, convert) for value in args]
        return original(
            *new_args,
            **{name: cast_nested_tensors(value, _FLOAT32, convert) for name, value in kwargs.items()},
        )

    return wrapper


def _opt_level_of(handle: AmpHandle) -> str:
    return "O1" if handle.half_dtype is torch.float16 else "O4"


def _function_name(function: Function) -> str:
    return getattr(function, "__name__", repr(function))


def _dtype_names_text(dtypes: set[torch.dtype]) -> str:
    return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


def promote(module: Any, name: str, handle: AmpHandle) -> None:
    """Make `module.name` promote half to float where the two meet."""

    def make(original: Function) -> Function:
        general = make_promote_wrapper(original, float_cast(handle, name), handle)
        return _fast_promotion_wrapper(name, original, general, handle) if module is Tensor else general

    replace_function(handle, module, name, make)


def sequence_promote(module: Any, name: str, handle: AmpHandle) -> None:
    """Make a function of a sequence of tensors (`cat`, `stack`) promote half to float within it."""
    convert = float_cast(handle, name)
    strict = handle.strict
    promoted = {handle.half_dtype, _FLOAT32}

    def make(original: Function) -> Function:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not args and (strict or "tensors" not in kwargs):
                raise TypeError(
                    f"{_function_name(original)}() missing its first argument, the sequence of tensors"
                )
            if not handle._is_active:
                return original(*args, **kwargs)
            if args:
                return original(_promoted_sequence(args[0], promoted, convert), *args[1:], **kwargs)
            return original(**{**kwargs, "tensors": _promoted_sequence(kwargs["tensors"], promoted, convert)})

        return wrapper

    replace_function(handle, module, name, make)


def _promoted_sequence(sequence: Any, promoted: set[torch.dtype], convert: Cast) -> Any:
    dtypes = {value.dtype for value in sequence if isinstance(value, Tensor)}
    if dtypes != promoted:
        return sequence
    return [value if value.dtype is _FLOAT32 else convert(value) for value in sequence]


def promote_match_arg0(module: Any, name: str, handle: AmpHandle) -> None:
    """Make an in-place method cast its other arguments to the dtype of the tensor that it writes."""
    if not hasattr(module, name):
        return
    to_half, to_float = half_cast(handle, name, caching=False), float_cast(handle, name)
    half_dtype = handle.half_dtype

    def make(original: Function) -> Function:
        def wrapper(arg0: Any, *args: Any, **kwargs: Any) -> Any:
            if not handle._is_active:
                return original(arg0, *args, **kwargs)
            assert isinstance(arg0, Tensor), f"{name} writes a tensor, got {type(arg0).__name__}"
            dtype = arg0.dtype
            if dtype is half_dtype:
                convert = to_half
            elif dtype is _FLOAT32:
                convert = to_float
            else:
                return original(arg0, *args, **kwargs)
            new_args = [
                value if isinstance(value, _SCALARS) else cast_nested_tensors(value, dtype, convert)
                for value in args
            ]
            if kwargs:
                kwargs = {key: cast_nested_tensors(value, dtype, convert) for key, value in kwargs.items()}
            return original(arg0, *new_args, **kwargs)

        return _fast_in_place_wrapper(name, original, wrapper, handle)

    replace_function(handle, module, name, make)


def _is_half_tensor(value: Any, handle: AmpHandle) -> bool:
    if isinstance(value, Tensor):
        return value.dtype is handle.half_dtype and (value.is_cuda or not handle.cuda_only)
    return isinstance(value, (list, tuple)) and any(_is_half_tensor(entry, handle) for entry in value)


def err_if_any_half(module: Any, name: str, handle: AmpHandle, message: str | None = None) -> None:
    """Make `module.name` raise NotImplementedError for half arguments, casts on or off."""
    if not hasattr(module, name):
        return
    text = message or (
        f"{_opt_level_of(handle)} does not run {name} on {_dtype_names_text({handle.half_dtype})} in place: "
        "its result would need float32.  Use the form without the underscore."
    )

    def make(original: Function) -> Function:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if any(_is_half_tensor(value, handle) for value in (*args, *kwargs.values())):
                raise NotImplementedError(text)
            return original(*args, **kwargs)

        return wrapper

    replace_function(handle, module, name, make)


def err_if_arg0_half(module: Any, name: str, handle: AmpHandle) -> None:
    """Make an in-place method raise NotImplementedError on a half tensor, and cast its other arguments to float."""
    if not hasattr(module, name):
        return
    convert = float_cast(handle, name)

    def make(original: Function) -> Function:
        def wrapper(arg0: Any, *args: Any, **kwargs: Any) -> Any:
            assert isinstance(arg0, Tensor), f"{name} writes a tensor, got {type(arg0).__name__}"
            if _is_half_tensor(arg0, handle):
                raise NotImplementedError(
                    f"{_opt_level_of(handle)} does not run in-place method {name} on "
                    f"{_dtype_names_text({handle.half_dtype})}: its "
                    "result would need float32.  Use the form without the underscore, or a float32 tensor."
                )
            new_args = [cast_nested_tensors(value, _FLOAT32, convert) for value in args]
            return original(
                arg0,
                *new_args,
                **{key: cast_nested_tensors(value, _FLOAT32, convert) for key, value in kwargs.items()},
            )

        return wrapper

    replace_function(handle, module, name, make)


def _fast_linear_wrapper(
    original: Function, general: Function, convert: Cast, cast_weight: Cast, handle: AmpHandle
) -> Function:
    """Return `F.linear` for a tensor as input and fp32 parameters.

    Args:
        convert: casts a tensor to half.
        cast_weight: casts an fp32 parameter to half, or returns its cached cast.
    """
    cuda_only = handle.cuda_only
    cache = handle.cache
    half = Tensor.half
    is_grad_enabled = torch.is_grad_enabled

    def linear(input: Any, weight: Any, bias: Any = None) -> Any:
        if not handle._is_active:
            return original(input, weight, bias)
        if (
            input.__class__ is not Tensor
            or weight.__class__ is not Parameter
            or weight.dtype is not _FLOAT32
            or not (bias is None or (bias.__class__ is Parameter and bias.dtype is _FLOAT32))
            or (cuda_only and not weight.is_cuda)
        ):
            return general(input, weight, bias)
        dtype = input.dtype
        if dtype is _FLOAT32:
            input = convert(input)
        elif dtype is not torch.float16:
            return general(input, weight, bias)
        # Inlines `cast_weight` for a weight that is not in the cache, the usual case for a layer.
        keep = is_grad_enabled()
        key = id(weight)
        if key in cache or weight.is_cuda:
            half_weight = cast_weight(weight)
        else:
            half_weight = half(weight)
            if keep:
                cache[key] = (weight, half_weight, weight._version, weight.data_ptr())
        if bias is None:
            return original(input, half_weight)
        key = id(bias)
        if key in cache or bias.is_cuda:
            return original(input, half_weight, cast_weight(bias))
        half_bias = half(bias)
        if keep:
            cache[key] = (bias, half_bias, bias._version, bias.data_ptr())
        return original(input, half_weight, half_bias)

    return linear


def _fast_promotion_wrapper(name: str, original: Function, general: Function, handle: AmpHandle) -> Function:
    """Return the wrapper of a method of tensors that promotes half to float, or `general` if it has no short form."""
    if name == "add":

        def add(self: Any, other: Any = _MISSING, old_form: Any = _MISSING, *, alpha: Any = _MISSING) -> Any:
            if other is not _MISSING and old_form is _MISSING:
                kind = other.__class__
                if (
                    not handle._is_active
                    or kind in _NUMBERS
                    or ((kind is Tensor or kind is Parameter) and self.dtype is other.dtype)
                ):
                    return original(self, other) if alpha is _MISSING else original(self, other, alpha=alpha)
            return general(
                self, *_without_missing_values(other, old_form), **_without_missing_options(alpha=alpha)
            )

        return add
    if not name.startswith("__"):
        return general

    def operator(self: Any, other: Any) -> Any:
        kind = other.__class__
        if (
            not handle._is_active
            or kind in _NUMBERS
            or ((kind is Tensor or kind is Parameter) and self.dtype is other.dtype)
        ):
            return original(self, other)
        return general(self, other)

    return operator


def _fast_in_place_wrapper(name: str, original: Function, general: Function, handle: AmpHandle) -> Function:
    """Return the wrapper of an in-place method, which an optimizer's step calls with casts off."""
    if name == "mul_":

        def mul_(self: Any, other: Any) -> Any:
            return general(self, other) if handle._is_active else original(self, other)

        return mul_
    if name == "add_":

        def add_(self: Any, other: Any = _MISSING, old_form: Any = _MISSING, *, alpha: Any = _MISSING) -> Any:
            if handle._is_active or old_form is not _MISSING or other is _MISSING:
                return general(
                    self, *_without_missing_values(other, old_form), **_without_missing_options(alpha=alpha)
                )
            return original(self, other) if alpha is _MISSING else original(self, other, alpha=alpha)

        return add_
    if name in ("addcmul_", "addcdiv_"):

        def ternary(
            self: Any,
            tensor1: Any = _MISSING,
            tensor2: Any = _MISSING,
            old_form: Any = _MISSING,
            *,
            value: Any = _MISSING,
        ) -> Any:
            if handle._is_active or old_form is not _MISSING or value is _MISSING or tensor2 is _MISSING:
                return general(
                    self,
                    *_without_missing_values(tensor1, tensor2, old_form),
                    **_without_missing_options(value=value),
                )
            return original(self, tensor1, tensor2, value=value)

        return ternary
    return general


def _without_missing_values(*values: Any) -> list[Any]:
    return [value for value in values if value is not _MISSING]


def _without_missing_options(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not _MISSING}
