"""Cast what goes into and comes out of a model, by a `forward` that copies, pickles and replicates with it."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ampcompare.apex.amp._amp_state import _amp_state
from ampcompare.base.tensors.tree import first_floating_type, map_tensors_in_tree


def to_type(dtype: torch.dtype, t: Any, *, expect_cuda: bool = False) -> Any:
    """Return a floating tensor, or an object with a method `to`, cast; warn about a tensor that should be on CUDA."""
    if not isinstance(t, Tensor):
        return t.to(dtype)
    if expect_cuda and not t.is_cuda:
        warnings.warn(
            "An input or output tensor of an amp model on CUDA is on the CPU.  Move it to the model's device.",
            stacklevel=3,
        )
    return t.to(dtype) if t.is_floating_point() else t


def applier(value: Any, fn: Callable[[Any], Any], *, in_dataclasses: bool = False) -> Any:
    """Apply `fn` to every tensor inside `value`, or to `value` itself if it has `.to`.

    Mappings become plain dicts, unless they are dataclasses; other iterables keep their type. Strings, arrays and
    scalars stay as they are.

    Source: Apex 25.05, `apex/amp/_initialize.py`; named tuples, ranges and iterators, which raise there, work here.
    With `in_dataclasses`, so do tensors in the fields of a dataclass that is no mapping, which Apex leaves as they are.
    """
    if isinstance(value, (Tensor, str)):
        return fn(value) if isinstance(value, Tensor) else value
    kind = type(value)
    if value is None or kind in (int, float, bool) or kind.__module__ == "numpy":
        return value
    if hasattr(value, "to"):
        return fn(value)

    def inside(entry: Any) -> Any:
        return applier(entry, fn, in_dataclasses=in_dataclasses)

    if isinstance(value, Mapping):
        if dataclasses.is_dataclass(value) and not _amp_state.strict and isinstance(value, MutableMapping):
            # an output of transformers or diffusers, whose entries are attributes too
            result = copy.copy(value)
            for key, entry in value.items():
                result[key] = inside(entry)
            return result
        return {inside(key): inside(entry) for key, entry in value.items()}
    if isinstance(value, (range, bytes)):
        return value
    if in_dataclasses and dataclasses.is_dataclass(value) and not isinstance(value, type):
        # What a field holds besides tensors and plain containers stays: no such object went through Apex's rules.
        return value if first_floating_type(value) is None else map_tensors_in_tree(value, fn)
    if isinstance(value, Iterator):
        return (inside(entry) for entry in value)
    if hasattr(value, "__iter__"):
        entries = [inside(entry) for entry in value]
        return kind(*entries) if hasattr(value, "_fields") else kind(entries)
    return value


class CastForward:
    """Stand as `model.forward`: cast floating inputs (None: not), run the model, cast floating outputs.

    It refers to its module, so a deep copy or an unpickled model runs its own weights; replicas made by
    `nn.DataParallel` get one each. `under_casts` lets the model run under O1's casts where they are in force.
    """

    def __init__(
        self, module: nn.Module, inputs: torch.dtype | None, outputs: torch.dtype, *, under_casts: bool
    ) -> None:
        self.module = module
        self.inputs = inputs
        self.outputs = outputs
        self.under_casts = under_casts
        self.expect_cuda = any(param.is_cuda for param in module.parameters())
        # A `forward` set on the instance before, including an earlier amp layer; the class of a traced module has none.
        self.inner: Callable[..., Any] | None = module.__dict__.get("forward")
        if self.inner is None and isinstance(module, torch.jit.ScriptModule):
            self.inner = module.forward

    @classmethod
    def install(
        cls, module: nn.Module, inputs: torch.dtype | None, outputs: torch.dtype, *, under_casts: bool
    ) -> None:
        """Replace `module.forward`, on this instance only."""
        forward = cls(module, inputs, outputs, under_casts=under_casts)
        module.forward = forward
        module._replicate_for_data_parallel = forward.replicate  # type: ignore[method-assign]

    def replicate(self) -> nn.Module:
        """Return what `nn.Module._replicate_for_data_parallel` returns, with its own forward."""
        replica: nn.Module = type(self.module)._replicate_for_data_parallel(self.module)
        self.copy_for_replica(replica)
        return replica

    def copy_for_replica(self, replica: nn.Module) -> CastForward:
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin.module = replica
        # an earlier amp layer, or another one that follows its module
        copy_for_replica = getattr(self.inner, "copy_for_replica", None)
        if copy_for_replica is not None:
            twin.inner = copy_for_replica(replica)
        replica.__dict__["forward"] = twin
        replica.__dict__["_replicate_for_data_parallel"] = twin.replicate
        return twin

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._original_forward())

    def _original_forward(self) -> Callable[..., Any]:
        if self.inner is not None:
            return self.inner
        bound: Callable[..., Any] = type(self.module).forward.__get__(self.module)
        return bound

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and self.inner is None and "handle" not in _amp_state.__dict__:
            # What a step is in most scripts, with nothing in the way.
            module, value = self.module, args[0]
            if self.inputs is not None and not (
                value.__class__ is Tensor
                and value.dtype is self.inputs
                and (not self.expect_cuda or value.is_cuda)
            ):
                value = self._cast_input(value, self.inputs)
            result = type(module).forward(module, value)
        else:
            result = self._call_with_casts(args, kwargs)
        if (
            result.__class__ is Tensor
            and result.dtype is self.outputs
            and (not self.expect_cuda or result.is_cuda)
        ):
            return result
        return self._cast_floating_in(result, self.outputs)

    def _call_with_casts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (inputs := self.inputs) is not None:
            args = tuple([self._cast_input(value, inputs) for value in args])
            kwargs = {name: self._cast_input(value, inputs) for name, value in kwargs.items()}
        handle = _amp_state.__dict__.get("handle")
        if handle is not None and not self.under_casts and handle._is_active and not _amp_state.strict:
            # Another model's O1 patches are in force: this one was prepared for a level without them.
            with handle._disable_casts():
                return self._original_forward()(*args, **kwargs)
        return self._original_forward()(*args, **kwargs)

    def _cast_input(self, value: Any, dtype: torch.dtype) -> Any:
        """Cast what goes in, dataclasses in it too unless strict."""
        return self._cast_floating_in(value, dtype, in_dataclasses=not _amp_state.strict)

    def _cast_floating_in(self, value: Any, dtype: torch.dtype, *, in_dataclasses: bool = False) -> Any:
        if value.__class__ is Tensor and (not self.expect_cuda or value.is_cuda):
            if value.dtype is dtype or not value.is_floating_point():
                return value
            # Twice as fast as `to`, which parses its arguments.
            if dtype is torch.float32:
                return value.float()
            return value.half() if dtype is torch.float16 else value.to(dtype)
        cast = partial(to_type, dtype, expect_cuda=self.expect_cuda)
        return applier(value, cast, in_dataclasses=in_dataclasses)
