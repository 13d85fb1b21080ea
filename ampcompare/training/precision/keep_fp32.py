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
from ampcompare.base.tensors.tree import cast_floating, first_floating_type, map_tree, tensors_in
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
    named = [(name, module) for model in models for name, module in model.named_modules(remove_duplicate=False) if name]
    kept = find_ids(patterns.split("|"), named)
    weights = _Weights([module for _, module in named if id(module) in kept])
    names: list[str] = []
    for model in models:
        exact = _ExactOutputs()
        called = list(_called_from_outside(model, kept))
        for name, module in called:
            _KeptForward(module, module.forward, half_dtype, context, exact).install()
            module.register_forward_pre_hook(_do_nothing)
            names.append(name)
        if half_dtype is not None and called:
            _ExactForward(model, model.forward, exact).install()
    yield tuple(names)
    weights.restore()


def find_kept(models: Sequence[nn.Module], patterns: str) -> dict[str, nn.Module]:
    """Return the modules that `kept_in_fp32` would keep, by name, without those that run inside of another one."""
    if not patterns:
        return {}
    named = [(name, module) for model in models for name, module in model.named_modules(remove_duplicate=False) if name]
    kept = find_ids(patterns.split("|"), named)
    return {name: module for model in models for name, module in _called_from_outside(model, kept)}


def autocast_off_factory(device_type: str) -> Callable[[], Any]:
    """Return what makes a context without autocast."""
    return functools.partial(torch.autocast, device_type, enabled=False)


def casts_off_factory(amp: Any) -> Callable[[], Any]:
    """Return what makes a context without the casts of O1, by the module that has patched torch."""
    return functools.partial(_casts_off, amp.__name__)


def _casts_off(amp: str) -> AbstractContextManager[Any]:
    # Looked up late, by name: a model that holds a module of Python cannot be pickled.
    handle: Any = getattr(sys.modules[amp]._amp_state, "handle", None)
    return NO_CONTEXT if handle is None else handle._disable_casts()


def _do_nothing(module: nn.Module, args: Any) -> None:
    """Do nothing: torch's fused paths ignore `forward` of the modules inside of them, unless one has a hook."""


def find_ids(patterns: Sequence[str], named: Sequence[tuple[str, nn.Module]], option: str = "keep_fp32") -> set[int]:
    """Return the ids of the modules that patterns keep, those inside of them and those that share a weight with one.

    Raises:
        ConfigError: a pattern, of this option, matches no module.
    """
    kept: set[int] = set()
    for pattern in patterns:
        found = [module for name, module in named if _pattern_matches(pattern, name, module)]
        if not found:
            raise ConfigError(
                f"{option}={pattern} matches no module, neither by its dotted name nor by its type; "
                f"{_near_names_hint(pattern, named)}"
            )
        kept.update(id(inner) for module in found for inner in module.modules())
    size = -1
    while size != len(kept):  # a module that shares a weight may hold another one that is shared
        size = len(kept)
        held = {id(tensor) for _, module in named if id(module) in kept for tensor in own_tensors(module)}
        kept.update(id(module) for _, module in named if any(id(tensor) in held for tensor in own_tensors(module)))
    return kept


def _pattern_matches(pattern: str, name: str, module: nn.Module) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(type(module).__name__, pattern)


def _near_names_hint(pattern: str, named: Sequence[tuple[str, nn.Module]]) -> str:
    known = [*dict.fromkeys([*(name for name, _ in named), *(type(module).__name__ for _, module in named)])]
    core = pattern.strip("*.").lower()
    ends = {name: name.rpartition(".")[2].lower() for name in known}
    alike = set(close_matches(core, ends.values(), count=MAX_NAMED))
    near = [name for name in known if (core and core in name.lower()) or ends[name] in alike]
    return f"near are {', '.join(near[:MAX_NAMED])}" if near else f"names are {', '.join(known[:MAX_NAMED])}"


def own_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters and buffers of a module without those of the modules inside of it."""
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


class _Weights:
    """The floating parameters and buffers of modules, as they were before a cast."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        tensors = [tensor for module in modules for tensor in own_tensors(module) if tensor.is_floating_point()]
        self._values = [(tensor, tensor.detach()) for tensor in tensors]
        self._buffers = [(module, dict(module._buffers)) for module in modules]

    def restore(self) -> None:
        """Undo the cast: it gives a parameter other data, and may put another tensor in the place of a buffer."""
        for tensor, value in self._values:
            tensor.data = value
            if tensor.grad is not None:
                tensor.grad.data = tensor.grad.data.to(value.dtype)
        for module, buffers in self._buffers:
            module._buffers.update(buffers)


def _called_from_outside(model: nn.Module, kept: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Yield each kept module that one that is not kept calls, once; a list of modules is not called itself."""
    seen: set[int] = set()

    def walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
        for name, child in module.named_children():
            if id(child) not in kept or type(child).forward is nn.Module.forward:
                yield from walk(child, f"{prefix}{name}.")
            elif id(child) not in seen:
                seen.add(id(child))
                yield prefix + name, child

    yield from walk(model, "")


class _ExactOutputs:
    """The last output of a kept module on each device before it was rounded; replicas of a model have a device each."""

    def __init__(self) -> None:
        self._last: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def keep(self, rounded: Tensor, exact: Tensor) -> None:
        self._last[rounded.device] = rounded, exact

    def exchange(self, output: Any) -> Any:
        """Return an output of the model with the exact tensor in the place of the rounded one, and forget both."""
        exchanged = map_tree(output, self._exact)
        for tensor in tensors_in(output):
            self._last.pop(tensor.device, None)
        return exchanged

    def _exact(self, tensor: Tensor) -> Tensor:
        rounded, exact = self._last.get(tensor.device, (None, tensor))
        return exact if tensor is rounded else tensor


class _KeptForward(ReplacedForward):
    """Runs a module in fp32."""

    def __init__(
        self,
        module: nn.Module,
        original: Callable[..., Any],
        half_dtype: torch.dtype | None,
        context: Callable[[], Any] | None,
        exact: _ExactOutputs,
    ) -> None:
        super().__init__(module, original)
        self.half_dtype = half_dtype
        self.context = context
        self.exact = exact

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with NO_CONTEXT if self.context is None else self.context():
            output = self.original(*cast_floating(args, torch.float32), **cast_floating(kwargs, torch.float32))
        if self.half_dtype is None:
            return output
        dtype = first_floating_type((args, kwargs)) or self.half_dtype
        rounded = cast_floating(output, dtype)
        if isinstance(output, Tensor) and rounded is not output:
            self.exact.keep(rounded, output)
        return rounded


class _ExactForward(ReplacedForward):
    """Runs a model, and returns what a kept module at its end has computed without rounding."""

    def __init__(self, module: nn.Module, original: Callable[..., Any], exact: _ExactOutputs) -> None:
        super().__init__(module, original)
        self.exact = exact

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.exact.exchange(self.original(*args, **kwargs))
