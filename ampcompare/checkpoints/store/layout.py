"""The entries of an ampcompare checkpoint and the version of this layout."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ampcompare.base.errors import CheckpointError

SCHEMA = 1
"""Goes up when a key changes its meaning or goes away; a new key alone leaves it."""

CONVERTED = "converted"
"""Key of a state that was written for another arm than trained it: its types and its loss scale may be others."""

TRAINER = "trainer"
"""Key of such a state: the arm that trained it, so that a run that resumes from it does not pass for its own arm's."""

TENSOR_CLASS = "tensor_class"
"""Key of the class of a tensor of an optimizer that is stored as the plain tensors that it holds; next to "tensors",
"attributes", "shape" and "stride"."""

PRECISION_KEYS = ("amp", "scaler", "precision")
"""Where the precision state lies: `Precision.key` of the arm that saved it."""

# The keys of a checkpoint; those from "parts" on may be missing.
#
# schema       SCHEMA
# model        state dict of the model without wrappers; a list of them if there are several
# optimizer    state dict of the optimizer as torch has it, with tensor subclasses by TENSOR_CLASS;
#              a list of them if there are several
# amp | scaler | precision
#              `Precision.state_dict()`, under `Precision.key`
# masters      per model as above: names of parameters to their fp32 masters; {} where the arm has none
# parts        states of what else changes in a run, by name; "average" holds the averaged weights (EMA)
# rng          states of random number generators, a list by rank
# buffers      buffers of each rank that are not as in the saved model, a list by rank
# zeroed       per optimizer, places of the parameters whose gradients were zeros and not None
# converted    True where `convert` wrote it for another arm than trained it
# trainer      where converted is True, the arm that trained it
# progress     {"step", "epoch", "batch": batches of this epoch that are done, ...}
# best         {"value", "step"} of the best metric so far
# arm          canonical text, as "apex:O2"
# recipe       the recipe as plain data
# engine       {"name", "version"} of an Apex arm, else None
# versions     {"ampcompare", "torch", "python", "machine", "processor", "host"}

_PLAIN = (str, int, float, bool, bytes, type(None), torch.Size, torch.dtype, torch.device)


def list_of_one_or_several(entry: Any) -> list[Any]:
    """Return what `only_entry_or_list` was given."""
    return list(entry) if isinstance(entry, list | tuple) else [entry]


def only_entry_or_list(entries: Sequence[Any]) -> Any:
    """Return the only entry, as legacy scripts save it, or a list of several."""
    return entries[0] if len(entries) == 1 else list(entries)


def require_plain_state(state: Any) -> None:
    """Check that a state holds only tensors, plain values, and dicts, lists and tuples of these."""
    seen: set[int] = set()
    todo: list[tuple[str, Any]] = [("the state", state)]
    while todo:
        place, value = todo.pop()
        if isinstance(value, Tensor) and is_traceable_wrapper_subclass(value):
            raise CheckpointError(
                f"{place} is a {type(value).__name__}, a class of its own, and a checkpoint holds those of optimizers "
                "alone; save no checkpoints"
            )
        if isinstance(value, Tensor) or type(value) in _PLAIN or id(value) in seen:
            continue
        if type(value) in (dict, OrderedDict):
            todo += [(f"{place}[{key!r}]", item) for key, item in value.items()]
            todo += [(f"a key of {place}", key) for key in value if type(key) not in _PLAIN]
        elif type(value) in (list, tuple):
            todo += [(f"{place}[{index}]", item) for index, item in enumerate(value)]
        else:
            raise CheckpointError(
                f"{place} is a {type(value).__module__}.{type(value).__qualname__}, and a checkpoint holds tensors "
                "and plain values only; save its values instead"
            )
        seen.add(id(value))


def state_in_apex_layout(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return precisely what a legacy script would save: model, optimizer, amp, epoch, and the best metric.

    Masters, random states, position and all else that such a script does not know are left out; the model's entries are
    fp32, as `state_dict` gives them after `amp.initialize`.

    Raises:
        CheckpointError: the state is of an arm that is not Apex's.
    """
    if "amp" not in state:
        raise CheckpointError(
            f"the layout of an Apex script holds amp.state_dict(), and this checkpoint is of {state.get('arm')}; "
            "convert it with --to apex"
        )
    legacy = {"model": state["model"], "optimizer": state["optimizer"], "amp": state["amp"]}
    legacy["epoch"] = state.get("progress", {}).get("epoch", 0)
    if isinstance(best := state.get("best"), Mapping) and best.get("value") is not None:
        legacy["best_prec1"] = 100.0 * best["value"]
    return legacy


def flat_weights_for_safetensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the weights as one flat dict for safetensors: fp32 masters instead of the half weights they belong to.

    Entries of the second and further models get their index as a prefix.
    """
    models, masters = (
        list_of_one_or_several(state["model"]),
        list_of_one_or_several(state.get("masters") or {}),
    )
    weights = {}
    for index, model in enumerate(models):
        prefix = f"{index}." if len(models) > 1 else ""
        own = masters[index] if index < len(masters) else {}
        for name, value in model.items():
            if isinstance(value, Tensor):
                weights[prefix + name] = own.get(name, value)
    return weights
