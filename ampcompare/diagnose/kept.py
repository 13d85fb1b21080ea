"""Parts of a loop in fp32, to test a cure: modules by name, or single lines of code, without any change to them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from ampcompare.apex.amp._amp_state import _amp_state
from ampcompare.diagnose.sites import calling_line

__all__ = ["Kept"]

HALF = (torch.float16, torch.bfloat16)
# Functions whose arguments must be of one type: an fp32 result reaches them as a user would pass it on.
ONE_TYPE = frozenset(
    ("linear", "matmul", "__matmul__", "mm", "bmm", "addmm", "baddbmm", "einsum", "conv1d", "conv2d", "conv3d")
    + ("conv_transpose1d", "conv_transpose2d", "layer_norm", "batch_norm", "group_norm", "bilinear", "prelu")
    + ("scaled_dot_product_attention", "dot", "mv", "embedding_bag")
)


@dataclass(frozen=True)
class Kept:
    """What runs in fp32.

    Attributes:
        modules: dotted names.
        lines: file:line of calls, as `calling_line` writes them.
    """

    modules: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()

    def __or__(self, other: Kept) -> Kept:
        return Kept(
            tuple(dict.fromkeys([*self.modules, *other.modules])), tuple(dict.fromkeys([*self.lines, *other.lines]))
        )

    @contextmanager
    def applied(self, models: Sequence[nn.Module]) -> Iterator[None]:
        """Run the parts in fp32 until the end of the block."""
        if not self.modules and not self.lines:
            yield
            return
        with _InFp32(frozenset(self.lines)) as mode, ExitStack() as stack:
            for model in models:
                for name, module in model.named_modules():
                    if name in self.modules:
                        for buffers in (inner._buffers for inner in module.modules()):
                            buffers.update({key: _wide(value) for key, value in buffers.items()})
                        for handle in (
                            module.register_forward_pre_hook(mode.entering, with_kwargs=True),
                            module.register_forward_hook(mode.leaving, always_call=True),
                        ):
                            stack.callback(handle.remove)
            yield


class _InFp32(TorchFunctionMode):
    """Casts the arguments of functions that are called inside of a kept module or from a kept line."""

    def __init__(self, lines: frozenset[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lines = lines
        self._contexts: list[ExitStack] = []

    def entering(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self._contexts.append(_without_casts())
        return tree_map(_wide, args), tree_map(_wide, kwargs)

    def leaving(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._contexts:
            self._contexts.pop().close()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "__get__" or name in ("detach", "backward", "requires_grad_", "to", "half", "bfloat16", "float"):
            return func(*args, **kwargs)
        if self._contexts:
            return func(*tree_map(_wide, args), **tree_map(_wide, kwargs))
        if self.lines and calling_line(sys._getframe(1)) in self.lines:
            with _without_casts():
                return func(*tree_map(_wide, args), **tree_map(_wide, kwargs))
        if name in ONE_TYPE:
            found = {value.dtype for value in _tensors((args, kwargs))}
            half = found & set(HALF)
            if half and torch.float32 in found and not torch.is_autocast_enabled(_device((args, kwargs))):
                (dtype,) = half
                return func(*tree_map(_narrow(dtype), args), **tree_map(_narrow(dtype), kwargs))
        return func(*args, **kwargs)


def _without_casts() -> ExitStack:
    """Return an entered stack in which neither autocast nor O1 casts anything."""
    stack = ExitStack()
    for device_type in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device_type):
            stack.enter_context(torch.autocast(device_type, enabled=False))
    handle = _amp_state.handle
    if handle is not None:
        stack.enter_context(handle._disable_casts())
    return stack


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in HALF else value


def _narrow(dtype: torch.dtype) -> Callable[[Any], Any]:
    return lambda value: value.to(dtype) if isinstance(value, Tensor) and value.dtype is torch.float32 else value


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _device(value: Any) -> str:
    return _tensors(value)[0].device.type
