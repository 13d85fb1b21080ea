"""The functions of `apex.amp.utils` that scripts import; the module has Apex's name, and amp itself does not use it.

Only the dtype counts, so CPU tensors are cast too, which Apex skips.

Source: Apex 25.05, `apex.amp.utils`.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor


def is_cuda_enabled() -> bool:
    """Return whether torch was built with CUDA."""
    return torch.version.cuda is not None


def get_cuda_version() -> tuple[int, ...]:
    """Return the version of CUDA that torch was built with; empty without one."""
    return tuple(int(part) for part in (torch.version.cuda or "").split(".") if part)


def is_nested(x: Any) -> bool:
    """Return whether `x` is a tuple or list."""
    return isinstance(x, tuple | list)


def is_fp_tensor(x: Any) -> bool:
    """Return whether `x` is a floating tensor, or a tuple or list of nothing else."""
    if is_nested(x):
        return all(is_fp_tensor(item) for item in x)
    return isinstance(x, Tensor) and x.is_floating_point()


def should_cache(x: Any) -> bool:
    """Return whether `x` is an fp32 parameter, or a tuple or list of nothing else."""
    if is_nested(x):
        return all(should_cache(item) for item in x)
    return isinstance(x, torch.nn.Parameter) and x.dtype is torch.float32


def collect_fp_tensor_types(args: Iterable[Any], kwargs: Mapping[str, Any]) -> set[str]:
    """Return the type strings, such as "HalfTensor", of all floating tensors in the arguments."""
    tensors = [x for x in chain(args, kwargs.values()) if is_fp_tensor(x)]
    return {type_string(tensor) for x in tensors for tensor in _tensors_nested_in(x)}


def _tensors_nested_in(x: Any) -> Iterator[Tensor]:
    if is_nested(x):
        for item in x:
            yield from _tensors_nested_in(item)
    else:
        yield x


def type_string(x: Tensor) -> str:
    """Return the type of `x` without its device, such as "FloatTensor"."""
    return x.type().rpartition(".")[2]


def maybe_half(x: Any, name: str = "", verbose: bool = False) -> Any:
    """Return the tensor `x`, or the tensors in a tuple or list, as fp16."""
    return _nested_as_dtype(x, torch.float16, f"Float->Half ({name})" if verbose else "")


def maybe_float(x: Any, name: str = "", verbose: bool = False) -> Any:
    """Return the tensor `x`, or the tensors in a tuple or list, as fp32."""
    return _nested_as_dtype(x, torch.float32, f"Half->Float ({name})" if verbose else "")


def _nested_as_dtype(x: Any, dtype: torch.dtype, message: str) -> Any:
    if is_nested(x):
        return type(x)([_nested_as_dtype(item, dtype, "") for item in x])
    if x.dtype is dtype:
        return x
    if message:
        print(message)
    return x.to(dtype)


def casted_args(
    cast_fn: Callable[[Any], Any], args: Iterable[Any], kwargs: MutableMapping[str, Any]
) -> list[Any]:
    """Return `args` with floating tensors cast; those in `kwargs` are replaced in place."""
    for name, value in kwargs.items():
        if is_fp_tensor(value):
            kwargs[name] = cast_fn(value)
    return [cast_fn(x) if is_fp_tensor(x) else x for x in args]


def cached_cast(cast_fn: Callable[[Any], Any], x: Any, cache: MutableMapping[Any, Any]) -> Any:
    """Return `cast_fn(x)`, or the cached cast of `x` if autograd can still use it.

    Raises:
        RuntimeError: the cache contains the cast of another tensor.
    """
    if is_nested(x):
        return type(x)([cached_cast(cast_fn, item, cache) for item in x])
    cached = cache.get(x)
    if cached is not None:
        if x.requires_grad and cached.requires_grad and not _can_autograd_reach_parent(x, cached):
            raise RuntimeError("the cache of casts holds the cast of another tensor; clear it and call again")
        if x.requires_grad == cached.requires_grad or not torch.is_grad_enabled():
            return cached
    cache[x] = cast_fn(x)
    return cache[x]


def _can_autograd_reach_parent(x: Tensor, cast: Tensor) -> bool:
    parents: Sequence[Any] = cast.grad_fn.next_functions if cast.grad_fn is not None else ()
    return any(getattr(parent, "variable", None) is x for parent, _ in parents)


def verbosify(cast_fn: Callable[..., Any], fn_name: str, verbose: bool) -> Callable[..., Any]:
    """Return `cast_fn`, with `verbose` so that it prints each cast it makes for `fn_name`."""
    return functools.partial(cast_fn, name=fn_name, verbose=verbose) if verbose else cast_fn


def as_inplace(fns: Iterable[str]) -> Iterator[str]:
    """Yield the names of the in-place forms of functions."""
    return (f"{name}_" for name in fns)


def has_func(mod: Any, fn: str) -> bool:
    """Return whether the module, class or dictionary `mod` has `fn`."""
    return fn in mod if isinstance(mod, dict) else hasattr(mod, fn)


def get_func(mod: Any, fn: str) -> Any:
    """Return `fn` of the module, class or dictionary `mod`."""
    return mod[fn] if isinstance(mod, dict) else getattr(mod, fn)


def set_func(mod: Any, fn: str, new_fn: Any) -> None:
    """Replace `fn` of the module, class or dictionary `mod`."""
    if isinstance(mod, dict):
        mod[fn] = new_fn
    else:
        setattr(mod, fn, new_fn)


def set_func_save(handle: Any, mod: Any, fn: str, new_fn: Any) -> None:
    """Replace `fn` of `mod`, so that `handle` puts it back when it is deactivated."""
    handle._save_func(mod, fn, get_func(mod, fn))
    set_func(mod, fn, new_fn)
