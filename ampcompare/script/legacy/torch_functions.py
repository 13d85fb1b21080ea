"""Restore the former behavior of torch functions, each with one line on stderr when used.

Libraries call these functions too. Where a library may rely on the new behavior, only calls from the script's own files
are changed.
"""

import argparse  # noqa: TID251 - the script's own parser is patched; ampcompare uses click
import atexit
import collections
import collections.abc
import fractions
import functools
import importlib
import inspect
import math
import os
import queue
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.optim import lr_scheduler

from ampcompare.base.patches import register_as_jit_builtin
from ampcompare.base.python_folders import INSTALLED_PACKAGES, STANDARD_LIBRARY
from ampcompare.script.invocation.stderr import say_once

LIBRARIES = (*STANDARD_LIBRARY, *INSTALLED_PACKAGES, torch.__path__[0].rpartition("torch")[0])
SPELLINGS = ("--local_rank", "--local-rank")
# Index of the mask or index among the positional arguments, `self` included.
METHODS = dict.fromkeys(
    (
        *("masked_fill", "masked_fill_", "masked_scatter", "masked_scatter_", "masked_select", "where"),
        *("__getitem__", "__setitem__", "index_put", "index_put_"),
    ),
    1,
)
FUNCTIONS = {"masked_fill": 1, "masked_scatter": 1, "masked_select": 1, "where": 0}
KEYWORDS = ("mask", "condition", "indices")
_KINDS = {
    **{kind.__name__: kind for kind in (float, int, bool, object, str, complex)},
    **{"long": int, "unicode": str},
}
NUMPY = {
    **{name: (kind, kind.__name__) for name, kind in _KINDS.items()},
    **dict.fromkeys(("Inf", "Infinity", "infty"), (math.inf, "numpy.inf")),
    **dict.fromkeys(("NaN", "NAN"), (math.nan, "numpy.nan")),
}
SIX = {
    **{name: (value, repr(value)) for name, value in {"PY3": True, "PY37": True, "int_classes": int}.items()},
    "container_abcs": (collections.abc, "collections.abc"),
    "inf": (math.inf, "math.inf"),
    "nan": (math.nan, "math.nan"),
    "queue": (queue, "queue"),
    "string_classes": ((str, bytes), "(str, bytes)"),
}
NUMPY_RENAMED = {
    "float_": "float64",
    "unicode_": "str_",
    "product": "prod",
    "sometrue": "any",
    "alltrue": "all",
}


def _is_called_by_script() -> bool:
    """Return whether the function that calls this, in place of another, was called from the script's own files."""
    return not sys._getframe(2).f_code.co_filename.startswith(LIBRARIES)


def patch_for_old_scripts() -> None:
    """Patch torch, and restore names that Python and numpy have removed, in this process."""
    _patch_argparse_for_local_rank()
    _restore_removed_names()
    _patch_load_of_pickles()
    _patch_full_of_integers()
    _patch_flattening_view_of_strided()
    _route_functional_prelu_through_torch()
    _patch_clamp_bounds()
    _patch_uint8_masks()
    _patch_schedulers()
    _patch_loader_next()
    if not torch.backends.cuda.is_built() or torch.cuda.device_count() == 0:
        use_gloo_for_nccl()


def _patch_load_of_pickles() -> None:
    load = torch.load

    @functools.wraps(load)
    def load_anything(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("weights_only") is None:
            kwargs["weights_only"] = False
            say_once(
                "torch.load runs with weights_only=False, as before torch 2.6: load only files that you trust"
            )
        return load(*args, **kwargs)

    torch.load = load_anything


def _patch_full_of_integers() -> None:
    full = torch.full

    @functools.wraps(full)
    def full_of_floats(*args: Any, **kwargs: Any) -> Any:
        value = kwargs.get("fill_value", args[1] if len(args) > 1 else None)
        plain = kwargs.get("dtype") is None and kwargs.get("out") is None
        if plain and isinstance(value, int) and _is_called_by_script():
            say_once("torch.full of an integer gives floats, as before torch 1.7")
            kwargs["dtype"] = torch.get_default_dtype()
        return full(*args, **kwargs)

    torch.full = full_of_floats
    register_as_jit_builtin(full, full_of_floats)


def _patch_flattening_view_of_strided() -> None:
    view = Tensor.view

    @functools.wraps(view)
    def view_or_reshape(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        try:
            return view(self, *args, **kwargs)
        except RuntimeError:
            # Flattening only: other views are written to, which a copy would lose.
            if args not in ((-1,), ((-1,),), ([-1],)) or self.is_contiguous():
                raise
        say_once(".view(-1) of a tensor that is not contiguous copies it, as .reshape(-1) does")
        return self.reshape(-1)

    Tensor.view = view_or_reshape  # type: ignore[method-assign, assignment]


def _route_functional_prelu_through_torch() -> None:
    """Let `F.prelu` call `torch.prelu`, as before torch 1.13: Apex's O1 casts that one."""
    original = functional.prelu

    def prelu(input: Tensor, weight: Tensor) -> Tensor:
        return torch.prelu(input, weight)

    functional.prelu = prelu
    register_as_jit_builtin(original, prelu)


def _patch_clamp_bounds() -> None:
    for name in ("clamp", "clamp_"):
        setattr(Tensor, name, _make_clamp_with_integer_bounds(getattr(Tensor, name)))


def _make_clamp_with_integer_bounds(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def clamp(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.is_floating_point() or self.is_complex():
            return original(self, *args, **kwargs)
        return original(
            self,
            *map(_as_integer_bound, args),
            **{name: _as_integer_bound(value) for name, value in kwargs.items()},
        )

    return clamp


def _as_integer_bound(bound: Any) -> Any:
    """Return a bound that is a float tensor of one element as the integer that it was cast to."""
    if isinstance(bound, Tensor) and bound.is_floating_point() and bound.dim() == 0:
        say_once("an integer tensor is clamped by the value of a float tensor, as before torch 1.10")
        return int(bound)
    return bound


def _patch_loader_next() -> None:
    from torch.utils.data import dataloader

    def next_batch(self: Any) -> Any:
        say_once("the .next() of a DataLoader's iterator is next(iterator)")
        return next(self)

    dataloader._BaseDataLoaderIter.next = next_batch  # type: ignore[attr-defined]


def _patch_argparse_for_local_rank() -> None:
    """Pass the local rank to argparse, if the script's parser has such an option.

    torchrun passes none; `torch.distributed.launch` has written it with a hyphen since torch 2.0.
    """
    parse = argparse.ArgumentParser.parse_known_args

    @functools.wraps(parse)
    def parse_known_args(
        self: Any, args: Sequence[str] | None = None, namespace: Any = None, **kwargs: Any
    ) -> Any:
        given = list(sys.argv[1:] if args is None else args)
        return parse(self, _arguments_with_local_rank(self, given), namespace, **kwargs)

    argparse.ArgumentParser.parse_known_args = parse_known_args  # type: ignore[method-assign, assignment]


def _arguments_with_local_rank(parser: Any, arguments: list[str]) -> list[str]:
    accepted = [spelling for spelling in SPELLINGS if spelling in parser._option_string_actions]
    if not accepted:
        return arguments
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in accepted:
            return arguments
        if name in SPELLINGS:
            say_once(f"{name} is passed to the script as {accepted[0]}")
            return [*arguments[:index], accepted[0] + equals + value, *arguments[index + 1 :]]
    rank = os.environ.get("LOCAL_RANK")
    if rank is None:
        return arguments
    say_once(f"the script gets {accepted[0]} from LOCAL_RANK")
    return [f"{accepted[0]}={rank}", *arguments]


def _patch_uint8_masks() -> None:
    """Let operations accept uint8 masks, and let masks act as bytes in subtraction and `~`."""
    for name, index in METHODS.items():
        setattr(Tensor, name, _make_operation_taking_uint8_masks(getattr(Tensor, name), index))
    for name, index in FUNCTIONS.items():
        original = getattr(torch, name)
        replacement = _make_operation_taking_uint8_masks(original, index)
        setattr(torch, name, replacement)
        register_as_jit_builtin(original, replacement)
    _patch_bool_arithmetic()


def _mask_as_bool(mask: Any) -> Any:
    if isinstance(mask, Tensor) and mask.dtype is torch.uint8:
        say_once("a uint8 mask is used as a bool mask, as before torch 1.2")
        return mask.bool()
    return mask


def _make_operation_taking_uint8_masks(original: Callable[..., Any], mask_index: int) -> Callable[..., Any]:
    @functools.wraps(original)
    def operation(*args: Any, **kwargs: Any) -> Any:
        if len(args) > mask_index:
            args = (*args[:mask_index], _index_with_bool_masks(args[mask_index]), *args[mask_index + 1 :])
        for name in KEYWORDS:
            if name in kwargs:
                kwargs[name] = _index_with_bool_masks(kwargs[name])
        return original(*args, **kwargs)

    return operation


def _index_with_bool_masks(index: Any) -> Any:
    if isinstance(index, (tuple, list)) and any(isinstance(entry, Tensor) for entry in index):
        return type(index)(_mask_as_bool(entry) for entry in index)
    return _mask_as_bool(index)


def _bool_as_bytes(operand: Any, idiom: str) -> Any:
    """Return the bytes of a bool tensor, and anything else as it is."""
    if isinstance(operand, Tensor) and operand.dtype is torch.bool:
        say_once(f"{idiom} counts a mask as bytes, as before torch 1.2")
        return operand.to(torch.uint8)
    return operand


def _patch_bool_arithmetic() -> None:
    sub = Tensor.__sub__
    rsub = Tensor.__rsub__
    invert = Tensor.__invert__

    @functools.wraps(sub)
    def subtract(self: Tensor, other: Any) -> Any:
        return sub(_bool_as_bytes(self, "mask - x"), _bool_as_bytes(other, "x - mask"))

    @functools.wraps(rsub)
    def subtract_from(self: Tensor, other: Any) -> Any:
        return rsub(_bool_as_bytes(self, "1 - mask"), other)

    @functools.wraps(invert)
    def not_mask(self: Tensor) -> Any:
        # Bytes with other values are not a mask: their bits are inverted, as in torch since 1.2.
        if self.dtype is torch.uint8 and _is_called_by_script() and self.numel() and int(self.max()) <= 1:
            say_once("~ of a uint8 mask is 1 - mask, as before torch 1.2")
            return 1 - self
        return invert(self)

    patches = {"__sub__": subtract, "__rsub__": subtract_from, "__invert__": not_mask}
    for name, patch in patches.items():
        setattr(Tensor, name, patch)


def _restore_removed_names() -> None:
    """Restore removed names of modules; existing names stay as they are."""
    _restore_names_of_module(fractions, {"gcd": (math.gcd, "math.gcd")})
    _restore_names_of_module(time, {"clock": (time.perf_counter, "time.perf_counter")})
    _restore_names_of_module(
        collections,
        {
            name: (getattr(collections.abc, name), f"collections.abc.{name}")
            for name in collections.abc.__all__
        },
    )
    numpy = importlib.import_module("numpy")
    renamed = {old: (getattr(numpy, new), f"numpy.{new}") for old, new in NUMPY_RENAMED.items()}
    _restore_names_of_module(numpy, {**NUMPY, **renamed})
    six = sys.modules["torch._six"] = torch._six = ModuleType("torch._six")  # type: ignore[attr-defined]
    _restore_names_of_module(six, SIX)


def _restore_names_of_module(module: ModuleType, names: dict[str, tuple[Any, str]]) -> None:
    """Resolve removed names by the module's `__getattr__`, so that nothing is printed before one is used."""
    before: Callable[[str], Any] | None = module.__dict__.get("__getattr__")

    def lookup(name: str) -> Any:
        if name in names:
            value, replacement = names[name]
            say_once(f"{module.__name__}.{name} was removed; {replacement} replaces it")
            return value
        if before is not None:
            return before(name)
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    module.__dict__["__getattr__"] = lookup


def _patch_schedulers() -> None:
    """Let torch's schedulers accept and ignore `verbose` if they no longer have it."""
    for kind in _scheduler_classes():
        if "__init__" in vars(kind) and "verbose" not in inspect.signature(kind.__init__).parameters:
            _accept_verbose_argument(kind)


def _scheduler_classes() -> Iterable[type[Any]]:
    kinds = [lr_scheduler.LRScheduler]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return dict.fromkeys(kinds)


def _accept_verbose_argument(kind: Any) -> None:
    init = kind.__init__
    count = len(inspect.signature(init).parameters)

    @functools.wraps(init)
    def init_without_verbose(self: Any, *args: Any, **kwargs: Any) -> None:
        # It was the last positional parameter, after those that remain.
        beyond = len(args) + 1 > count and isinstance(args[-1], (bool, str))
        if beyond or "verbose" in kwargs:
            args = args[:-1] if beyond else args
            kwargs.pop("verbose", None)
            say_once("verbose of a learning rate scheduler was removed and is ignored")
        init(self, *args, **kwargs)

    kind.__init__ = init_without_verbose


def use_gloo_for_nccl() -> None:
    """Let `init_process_group` and `new_group` use gloo if the script asks for nccl, with one line on stderr."""
    if not dist.is_available() or hasattr(dist.init_process_group, "_ampcompare_gloo"):
        return
    # Its functions have the group as a default argument: imported later, they would keep a destroyed group alive.
    importlib.import_module("torch.distributed.nn.functional")
    atexit.register(_destroy_open_process_group)
    init, new = dist.init_process_group, dist.new_group

    @functools.wraps(init)
    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        return init(_gloo_in_place_of_nccl(backend), *args, **kwargs)

    @functools.wraps(new)
    def new_group(
        ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        return new(ranks, timeout, _gloo_in_place_of_nccl(backend), *args, **kwargs)

    init_process_group._ampcompare_gloo = True  # type: ignore[attr-defined]
    for module in (dist, dist.distributed_c10d):
        module.init_process_group = init_process_group  # type: ignore[attr-defined]
        module.new_group = new_group  # type: ignore[attr-defined]


def _gloo_in_place_of_nccl(requested: Any) -> Any:
    if isinstance(requested, str) and requested.lower() == "nccl":
        say_once("process groups use gloo instead of nccl: there is no CUDA device")
        return "gloo"
    return requested


def _destroy_open_process_group() -> None:
    """Destroy the group that a script left open: a gloo thread that outlives the interpreter can abort the process."""
    if dist.is_initialized():
        dist.destroy_process_group()
