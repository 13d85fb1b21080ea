"""Tensor subclasses, such as moments in 8 bits, as dictionaries of the plain tensors that they hold.

torch calls such a class a traceable wrapper subclass: `__tensor_flatten__` gives the names of its plain tensors and
what else it is made of. A dictionary of these can be stored, compared and read without the class. Nothing is imported
by a stored name: the class is looked up in the module of its name, which the optimizer of the run has loaded.

Of a sharded tensor each rank may hold such a tensor. Their blocks do not add up to those of the whole: it is refused.
"""

import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ampcompare.base.errors import CheckpointError
from ampcompare.base.tensors.sharded import gather_tensors_in_tree, is_sharded, local_part
from ampcompare.checkpoints.store.layout import TENSOR_CLASS


def is_tensor_subclass(value: Any) -> bool:
    """Return whether a value is a tensor subclass; a sharded tensor does not count."""
    return isinstance(value, Tensor) and not is_sharded(value) and is_traceable_wrapper_subclass(value)


def is_flattened(value: Any) -> bool:
    """Return whether a value is what `flatten_tensor` makes of a tensor subclass."""
    return isinstance(value, Mapping) and TENSOR_CLASS in value


def flatten_tensor(value: Any) -> Any:
    """Return a tensor subclass as a dictionary of plain tensors, not copied; anything else as it is."""
    if not is_tensor_subclass(value):
        return value
    names, attributes = value.__tensor_flatten__()
    return {
        TENSOR_CLASS: f"{type(value).__module__}.{type(value).__qualname__}",
        "tensors": {name: flatten_tensor(getattr(value, name)) for name in names},
        "attributes": attributes,
        "shape": value.shape,
        "stride": value.stride(),
    }


def rebuild_flattened_tensor(saved: Mapping[str, Any]) -> Tensor:
    """Return the tensor that `flatten_tensor` was given; it holds the stored tensors themselves."""
    tensors = {
        name: rebuild_flattened_tensor(inner) if is_flattened(inner) else inner
        for name, inner in saved["tensors"].items()
    }
    module, _, name = saved[TENSOR_CLASS].rpartition(".")
    kind: Any = getattr(sys.modules.get(module), name, None)
    is_known = isinstance(kind, type) and issubclass(kind, Tensor) and hasattr(kind, "__tensor_unflatten__")
    if not is_known:
        raise CheckpointError(
            f"the optimizer of the checkpoint holds tensors of class {saved[TENSOR_CLASS]}, which nothing here has "
            "loaded; use one of this recipe"
        )
    made: Tensor = kind.__tensor_unflatten__(
        tensors, saved["attributes"], torch.Size(saved["shape"]), tuple(saved["stride"])
    )
    return made


def gather_plain_optimizer_state(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict of an optimizer in whole, plain tensors: shards gathered, other classes flattened.

    Every rank calls it with its parts of the same state, and raises if shards are of another class on any rank.
    """
    entries: dict[Any, dict[str, Any]] = state["state"]
    values = [value for entry in entries.values() for value in entry.values() if isinstance(value, Tensor)]
    shards = [local_part(value) for value in values if is_sharded(value)]
    if shards:
        answers: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(answers, any(map(is_tensor_subclass, shards)))  # a short one may be plain
        if any(answers):
            raise CheckpointError(
                "the optimizer keeps state in a few bits, in blocks of the shards of each rank, which no checkpoint "
                "holds; save no checkpoints, or use an optimizer with plain state"
            )
        return gather_tensors_in_tree(state)  # type: ignore[no-any-return]
    if not any(map(is_tensor_subclass, values)):
        return state
    plain = {
        number: {name: flatten_tensor(value) for name, value in entry.items()}
        for number, entry in entries.items()
    }
    return {**state, "state": plain}
