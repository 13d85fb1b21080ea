"""Chosen modules in fp32 inside of a model that runs in 16 bits: `keep_fp32=*.norm|lm_head|LayerNorm`.

A kept module stores its weights and computes in fp32, with everything inside of it. Where the model around it is of a
16-bit type, outputs get the type of the inputs back, and what the model itself returns is not rounded. Under autocast
and O1 outputs stay in fp32, as those of other functions in fp32 do.
"""

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from ampcompare.base.errors import ConfigError, close_matches
from ampcompare.base.tensors.tree import (
    cast_floating_tensors,
    first_floating_type,
    map_tensors_in_tree,
    tensors_in_value,
)
from ampcompare.training.precision.base import NO_CONTEXT
from ampcompare.training.precision.replaced_forward import ReplacedForward

MAX_NAMED = 6


@contextmanager
def kept_in_fp32(
    models: Sequence[nn.Module],
    patterns: str,
    half_dtype: torch.dtype | None,
    context: Callable[[], AbstractContextManager[Any]] | None = None,
) -> Iterator[tuple[str, ...]]:
    """Keep modules of models in fp32, while the block casts the models and replaces their own `forward`.

    A module that shares a weight with a kept one is kept too.

    Args:
        models: before they are cast.
        patterns: of the shell, joined by `|`, each for the dotted name of a module or the name of its type.
        half_dtype: of the outputs of a kept module without floating inputs; None if they stay in fp32.
        context: makes what kept modules run in, such as a block without autocast; None for nothing.

    Yields:
        The names of the kept modules, without those that run inside of another one.
    """
    if not patterns:
        yield ()
        return
    named = _named_modules_of_models(models)
    kept = ids_of_kept_modules(patterns.split("|"), named)
    weights = _WeightsBeforeCast([module for _, module in named if id(module) in kept])
    names: list[str] = []
    for model in models:
        exact = _ExactOutputsByDevice()
        called = list(_modules_called_from_outside(model, kept))
        for name, module in called:
            _Fp32Forward(module, module.forward, half_dtype, context, exact).install()
            module.register_forward_pre_hook(_hook_without_effect)
            names.append(name)
        if half_dtype is not None and called:
            _ExactOutputForward(model, model.forward, exact).install()
    yield tuple(names)
    weights.restore_weights()


def _named_modules_of_models(models: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Return the modules inside of models with each name that they have there."""
    return [
        (name, module)
        for model in models
        for name, module in model.named_modules(remove_duplicate=False)
        if name
    ]


def find_outermost_kept_modules(models: Sequence[nn.Module], patterns: str) -> dict[str, nn.Module]:
    """Return the modules that `kept_in_fp32` would keep, by name, without those that run inside of another one."""
    if not patterns:
        return {}
    named = _named_modules_of_models(models)
    kept = ids_of_kept_modules(patterns.split("|"), named)
    return {name: module for model in models for name, module in _modules_called_from_outside(model, kept)}


def make_autocast_off_factory(device_type: str) -> Callable[[], Any]:
    """Return what makes a context without autocast."""
    return functools.partial(torch.autocast, device_type, enabled=False)


def make_o1_casts_off_factory(amp: Any) -> Callable[[], Any]:
    """Return what makes a context without the casts of O1, by the module that has patched torch."""
    return functools.partial(_o1_casts_off, amp.__name__)


def _o1_casts_off(amp: str) -> AbstractContextManager[Any]:
    # Looked up late, by name: a model that holds a module of Python cannot be pickled.
    handle: Any = getattr(sys.modules[amp]._amp_state, "handle", None)
    return NO_CONTEXT if handle is None else handle._disable_casts()


def _hook_without_effect(module: nn.Module, args: Any) -> None:
    """Do nothing: torch's fused paths ignore `forward` of the modules inside of them, unless one has a hook."""


def ids_of_kept_modules(
    patterns: Sequence[str], named: Sequence[tuple[str, nn.Module]], option: str = "keep_fp32"
) -> set[int]:
    """Return the ids of the modules that patterns keep, those inside of them and those that share a weight with one.

    Raises:
        ConfigError: a pattern, of this option, matches no module.
    """
    kept: set[int] = set()
    for pattern in patterns:
        found = [module for name, module in named if _does_pattern_match(pattern, name, module)]
        if not found:
            raise ConfigError(
                f"{option}={pattern} matches no module in the model, neither by its dotted name nor by its type; "
                f"{_similar_names_text(pattern, named)}"
            )
        kept.update(id(inner) for module in found for inner in module.modules())
    tensors = {id(module): {id(tensor) for tensor in own_tensors_of_module(module)} for _, module in named}
    size = -1
    while size != len(kept):  # a module that shares a weight may hold another one that is shared
        size = len(kept)
        held: set[int] = set().union(*(own for module, own in tensors.items() if module in kept))
        kept.update(module for module, own in tensors.items() if own & held)
    return kept


def _does_pattern_match(pattern: str, name: str, module: nn.Module) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(type(module).__name__, pattern)


def _similar_names_text(pattern: str, named: Sequence[tuple[str, nn.Module]]) -> str:
    known = [*dict.fromkeys([*(name for name, _ in named), *(type(module).__name__ for _, module in named)])]
    core = pattern.strip("*.").lower()
    ends = {name: name.rpartition(".")[2].lower() for name in known}
    alike = set(close_matches(core, ends.values(), count=MAX_NAMED))
    near = [name for name in known if (core and core in name.lower()) or ends[name] in alike]
    return f"near are {', '.join(near[:MAX_NAMED])}" if near else f"names are {', '.join(known[:MAX_NAMED])}"


def own_tensors_of_module(module: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters and buffers of a module without those of the modules inside of it."""
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


class _WeightsBeforeCast:
    """The floating parameters and buffers of modules, as they were before a cast."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        tensors = [
            tensor
            for module in modules
            for tensor in own_tensors_of_module(module)
            if tensor.is_floating_point()
        ]
        self._values = [(tensor, tensor.detach()) for tensor in tensors]
        self._buffers = [(module, dict(module._buffers)) for module in modules]

    def restore_weights(self) -> None:
        """Undo the cast: it gives a parameter other data, and may put another tensor in the place of a buffer."""
        for tensor, value in self._values:
            tensor.data = value
            if tensor.grad is not None:
                tensor.grad.data = tensor.grad.data.to(value.dtype)
        for module, buffers in self._buffers:
            module._buffers.update(buffers)


def _modules_called_from_outside(model: nn.Module, kept_ids: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Yield each kept module that one that is not kept calls, once; a list of modules is not called itself."""
    seen: set[int] = set()

    def walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
        for name, child in module.named_children():
            if id(child) not in kept_ids or type(child).forward is nn.Module.forward:
                yield from walk(child, f"{prefix}{name}.")
            elif id(child) not in seen:
                seen.add(id(child))
                yield prefix + name, child

    yield from walk(model, "")


class _ExactOutputsByDevice:
    """The last output of a kept module on each device before it was rounded; replicas of a model have a device each."""

    def __init__(self) -> None:
        self._last: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def keep_exact_output(self, rounded: Tensor, exact: Tensor) -> None:
        self._last[rounded.device] = rounded, exact

    def exchange_for_exact(self, output: Any) -> Any:
        """Return an output of the model with the exact tensor in the place of the rounded one, and forget both."""
        exchanged = map_tensors_in_tree(output, self._exact_output_of)
        for tensor in tensors_in_value(output):
            self._last.pop(tensor.device, None)
        return exchanged

    def _exact_output_of(self, tensor: Tensor) -> Tensor:
        rounded, exact = self._last.get(tensor.device, (None, tensor))
        return exact if tensor is rounded else tensor


class _Fp32Forward(ReplacedForward):
    """Runs a module in fp32."""

    def __init__(
        self,
        module: nn.Module,
        original: Callable[..., Any],
        half_dtype: torch.dtype | None,
        context: Callable[[], Any] | None,
        exact: _ExactOutputsByDevice,
    ) -> None:
        super().__init__(module, original)
        self.half_dtype = half_dtype
        self.context = context
        self.exact = exact

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with NO_CONTEXT if self.context is None else self.context():
            output = self.original(
                *cast_floating_tensors(args, torch.float32), **cast_floating_tensors(kwargs, torch.float32)
            )
        if self.half_dtype is None:
            return output
        dtype = first_floating_type((args, kwargs)) or self.half_dtype
        rounded = cast_floating_tensors(output, dtype)
        if isinstance(output, Tensor) and rounded is not output:
            self.exact.keep_exact_output(rounded, output)
        return rounded


class _ExactOutputForward(ReplacedForward):
    """Runs a model, and returns what a kept module at its end has computed without rounding."""

    def __init__(self, module: nn.Module, original: Callable[..., Any], exact: _ExactOutputsByDevice) -> None:
        super().__init__(module, original)
        self.exact = exact

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.exact.exchange_for_exact(self.original(*args, **kwargs))
