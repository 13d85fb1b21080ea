"""Runs what is called from some lines of the user's code in fp32, whatever an arm casts."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_map

from ampcompare.base.tensors.products import HALF_DTYPES
from ampcompare.diagnosis.sites import nearest_user_location_text
from ampcompare.training.precision.keep_fp32 import make_o1_casts_off_factory

UNCHANGED = frozenset(("__get__", "detach", "backward", "requires_grad_", "float"))
CASTS = frozenset(("to", "half", "bfloat16", "type"))
# Functions whose arguments must be of one type: an fp32 result reaches them as a user would pass it on.
ONE_TYPE = frozenset(
    (
        *("linear", "matmul", "__matmul__", "mm", "bmm", "addmm"),
        *("baddbmm", "einsum", "conv1d", "conv2d", "conv3d"),
        *("conv_transpose1d", "conv_transpose2d", "layer_norm"),
        *("batch_norm", "group_norm", "bilinear", "prelu"),
        *("scaled_dot_product_attention", "dot", "mv", "embedding_bag"),
    )
)


@contextmanager
def run_lines_in_fp32(lines: Iterable[str], called_names: set[str]) -> Iterator[None]:
    """Run torch functions that are called from `lines`, each file:line, in fp32; add their names to `called_names`."""
    kept = frozenset(lines)
    with _Fp32FunctionsMode(kept, called_names) if kept else nullcontext():
        yield


class _Fp32FunctionsMode(TorchFunctionMode):
    """Casts the arguments of functions that are called from a kept line; results stay in fp32."""

    def __init__(self, lines: frozenset[str], called_names: set[str]) -> None:
        super().__init__()
        self.lines = lines
        self.called_names = called_names

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in UNCHANGED:
            return func(*args, **kwargs)
        is_kept = nearest_user_location_text(sys._getframe(1)) in self.lines
        if name in CASTS:
            result = func(*args, **kwargs)
            # A cast to 16 bits would undo what the line is kept for.
            return (
                args[0].float()
                if is_kept and isinstance(result, Tensor) and result.dtype in HALF_DTYPES
                else result
            )
        if is_kept:
            self.called_names.add(resolve_name(func) or name)
            with _enter_without_casts():
                return func(*tree_map(_widened_value, args), **tree_map(_widened_value, kwargs))
        if name in ONE_TYPE:
            found = {value.dtype for value in _floating_tensors_nested_in((args, kwargs))}
            half = found & set(HALF_DTYPES)
            if (
                half
                and torch.float32 in found
                and not torch.is_autocast_enabled(_device_type_of((args, kwargs)))
            ):
                (dtype,) = half
                return func(
                    *tree_map(_make_cast_from_fp32_to(dtype), args),
                    **tree_map(_make_cast_from_fp32_to(dtype), kwargs),
                )
        return func(*args, **kwargs)


def _enter_without_casts() -> ExitStack:
    """Return an entered stack in which neither autocast nor O1 casts anything."""
    stack = ExitStack()
    for device_type in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device_type):
            stack.enter_context(torch.autocast(device_type, enabled=False))
    if "ampcompare.apex.amp" in sys.modules:
        stack.enter_context(make_o1_casts_off_factory(sys.modules["ampcompare.apex.amp"])())
    return stack


def _widened_value(value: Any) -> Any:
    if isinstance(value, torch.dtype):  # of what the line makes, as by `torch.arange(n, dtype=x.dtype)`
        return torch.float32 if value in HALF_DTYPES else value
    return value.float() if isinstance(value, Tensor) and value.dtype in HALF_DTYPES else value


def _make_cast_from_fp32_to(dtype: torch.dtype) -> Callable[[Any], Any]:
    """Return a function that casts an fp32 tensor, and returns anything else as it is."""

    def cast(value: Any) -> Any:
        is_fp32 = isinstance(value, Tensor) and value.dtype is torch.float32
        return value.to(dtype) if is_fp32 else value

    return cast


def _floating_tensors_nested_in(value: Any) -> list[Tensor]:
    return [
        leaf
        for leaf in torch.utils._pytree.tree_leaves(value)
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]


def _device_type_of(value: Any) -> str:
    return _floating_tensors_nested_in(value)[0].device.type
