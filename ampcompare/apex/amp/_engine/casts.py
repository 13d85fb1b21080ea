"""Decide what O1 casts: floating-point tensors, alone or in containers that hold nothing else.

Source: Apex 25.05, `apex/amp/utils.py`; only the dtype counts, so every device is supported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ampcompare.apex.amp._amp_state import maybe_print

from .errors import AmpScalingError

if TYPE_CHECKING:
    from ampcompare.apex.amp.handle import AmpHandle

Cast = Callable[[Tensor], Tensor]
"""Takes a floating-point tensor of another dtype, returns the cast one."""


def half_cast(
    handle: AmpHandle, name: str = "", *, caching: bool = True, dtype: torch.dtype | None = None
) -> Cast:
    """Return the cast to a 16-bit type, by default that of the handle.

    With `caching` fp32 parameters are cast once between two clearings of the cache. O4 casts them at each use, so that
    the gradients of a weight's uses are summed in fp32, as ROCm's Apex (daed8525) does.
    """
    dtype = dtype or handle.half_dtype
    # Methods: twice as fast as `to`, which parses its arguments.
    plain = Tensor.half if dtype is torch.float16 else Tensor.bfloat16
    convert = _printing_cast(handle, plain, f"Float->{_TYPE_NAMES[dtype]} ({name})")
    if caching and handle.has_cache:
        if handle.strict:
            convert = _strictly_caching_cast(handle, convert)
        elif handle.half_dtype is torch.float16:
            convert = _caching_cast(handle, convert)
    return _cuda_only_cast(convert) if handle.cuda_only else convert


_TYPE_NAMES = {torch.float16: "Half", torch.bfloat16: "BFloat16"}


def float_cast(handle: AmpHandle, name: str = "") -> Cast:
    """Return the cast to float32."""
    convert = _printing_cast(handle, Tensor.float, f"Half->Float ({name})")
    return _cuda_only_cast(convert) if handle.cuda_only else convert


def _printing_cast(handle: AmpHandle, convert: Cast, message: str) -> Cast:
    if not handle.verbose:
        return convert

    def announce(value: Tensor) -> Tensor:
        maybe_print(message)
        return convert(value)

    return announce


def _cuda_only_cast(convert: Cast) -> Cast:
    def pass_cpu(value: Tensor) -> Tensor:
        return convert(value) if value.is_cuda else value

    return pass_cpu


def cached_weight_cast(handle: AmpHandle) -> Cast | None:
    """Return the cast to half of what is known to be an fp32 parameter; None where no casts are kept, or not so.

    Nothing is kept under `no_grad`: a write through `.data`, as averaged weights are swapped in, leaves no trace.
    """
    if handle.verbose or handle.strict or not handle.has_cache or handle.half_dtype is not torch.float16:
        return None
    return _cached_cast_of_weight(handle, Tensor.half)


def _caching_cast(handle: AmpHandle, convert: Cast) -> Cast:
    """Cache casts of fp32 parameters, while the parameter is what it was when it was cast."""
    cast_weight = _cached_cast_of_weight(handle, convert)
    float32 = torch.float32

    def cast_tensor(value: Tensor) -> Tensor:
        # `isinstance` is a Python call here: it is left to subclasses.
        kind = value.__class__
        if (
            kind is Tensor
            or value.dtype is not float32
            or not (kind is Parameter or isinstance(value, Parameter))
        ):
            return convert(value)
        return cast_weight(value)

    return cast_tensor


def _cached_cast_of_weight(handle: AmpHandle, convert: Cast) -> Cast:
    cache, groups = handle.cache, handle.groups
    is_grad_enabled, is_compiling = torch.is_grad_enabled, torch.compiler.is_dynamo_compiling

    def cast_weight(value: Tensor) -> Tensor:
        if is_compiling():  # the compiler cannot compare pointers, nor take a cast from outside of its graph
            return convert(value)
        key = id(value)
        cached = cache.get(key)
        if cached is not None and cached[2] == value._version and cached[3] == value.data_ptr():
            cast = cached[1]
            if value.requires_grad == cast.requires_grad or not is_grad_enabled():
                _check_cast_leads_to_parameter(value, cast)
                return cast
        keep = is_grad_enabled()
        if keep and cached is None and convert is Tensor.half:
            for weight, cast in groups.cast(value):
                if weight is value or id(weight) not in cache:
                    cache[id(weight)] = (weight, cast, weight._version, weight.data_ptr())
            if key in cache:
                return cache[key][1]
        cast = convert(value)
        if keep:
            cache[key] = (value, cast, value._version, value.data_ptr())
        return cast

    return cast_weight


def _strictly_caching_cast(handle: AmpHandle, convert: Cast) -> Cast:
    """Cache casts of fp32 parameters as Apex does: until the cache is cleared, whatever is loaded meanwhile."""
    cache = handle.cache
    passes_gradients = handle.half_dtype is torch.float16

    def cast_tensor(value: Tensor) -> Tensor:
        if value.dtype is not torch.float32 or not isinstance(value, Parameter):
            return convert(value)
        cached = cache.get(id(value))
        if cached is not None and (passes_gradients or not cached[1].requires_grad):
            cast = cached[1]
            _check_cast_leads_to_parameter(value, cast)
            if value.requires_grad == cast.requires_grad or not torch.is_grad_enabled():
                return cast
        cast = convert(value)
        cache[id(value)] = (value, cast, 0, 0)
        return cast

    return cast_tensor


def _check_cast_leads_to_parameter(value: Tensor, cast: Tensor) -> None:
    """Raise unless gradients of the cached cast reach the parameter itself."""
    if not (value.requires_grad and cast.requires_grad):
        return
    node = cast.grad_fn
    parents = node.next_functions if node is not None else ()
    output_index = cast.output_nr  # of a cast that was made in a group
    if len(parents) <= output_index or getattr(parents[output_index][0], "variable", None) is not value:
        raise AmpScalingError(
            "A cached half weight no longer belongs to its parameter, whose gradient it would miss.  Was the parameter "
            "replaced or detached since the last scale_loss block?  Then call amp._amp_state.handle._clear_cache()."
        )


def cast_nested_tensors(value: Any, target: torch.dtype, convert: Cast) -> Any:
    """Cast a tensor, or a list or tuple of floating-point tensors only; return anything else unchanged."""
    if isinstance(value, Tensor):
        if value.dtype is not target and value.is_floating_point():
            return convert(value)
        return value
    if isinstance(value, (list, tuple)) and _are_all_floating(value):
        entries = [cast_nested_tensors(entry, target, convert) for entry in value]
        return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
    return value


def _are_all_floating(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.is_floating_point()
    return isinstance(value, (list, tuple)) and all(_are_all_floating(entry) for entry in value)


def collect_floating_dtypes(
    args: Iterable[Any], kwargs: Mapping[str, Any], cuda_only: bool
) -> set[torch.dtype]:
    """Return the dtypes of all floating-point tensors among the arguments, and in containers of nothing else."""
    dtypes: set[torch.dtype] = set()
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            if value.is_floating_point() and (value.is_cuda or not cuda_only):
                dtypes.add(value.dtype)
        elif isinstance(value, (list, tuple)) and _are_all_floating(value):
            dtypes |= collect_floating_dtypes(value, {}, cuda_only)
    return dtypes
