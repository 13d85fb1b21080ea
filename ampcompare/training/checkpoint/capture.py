"""The state of training as plain data, from which another process continues bit for bit.

Weights, optimizers and precision are restored while a run is assembled, the rest by
`TrainingSession.load_state_dict`.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampcompare.base.errors import CheckpointError
from ampcompare.base.tensors.lists import copies_on_host
from ampcompare.base.tensors.sharded import gather_tensors_in_tree, shard_like
from ampcompare.base.tensors.tree import map_tensors_in_tree
from ampcompare.checkpoints.store.layout import CONVERTED, list_of_one_or_several, only_entry_or_list
from ampcompare.training.checkpoint.check_checkpoint import Names, check_training_state
from ampcompare.training.checkpoint.flattened import (
    gather_plain_optimizer_state,
    is_flattened,
    rebuild_flattened_tensor,
)
from ampcompare.training.parallel.ranks import Communicator
from ampcompare.training.precision.base import Precision, owned_params
from ampcompare.training.process.device import generator_state_of, set_generator_state


def gather_training_state(
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    precision: Precision,
    names: Names,
) -> dict[str, Any]:
    """Return weights, optimizers and loss scales, in the layout of `checkpoints.store.layout`.

    Tensors are those that training continues with, not copies; shards are gathered, so that every rank calls it.
    `names` are those of the parameters that the optimizers held before `prepare`.
    """
    return {
        "model": only_entry_or_list([gather_tensors_in_tree(model.state_dict()) for model in models]),
        "optimizer": only_entry_or_list(
            [gather_plain_optimizer_state(optimizer.state_dict()) for optimizer in optimizers]
        ),
        precision.key: precision.state_dict(),
        "masters": only_entry_or_list(_masters_of_optimizers(models, optimizers, names)),
        # Parameters whose gradient is a tensor of zeros, not None: the sign of a zero may depend on it.
        "zeroed": [
            [index for index, param in enumerate(owned_params(optimizer)) if param.grad is not None]
            for optimizer in optimizers
        ],
    }


def gather_rank_specific_states(
    models: Sequence[nn.Module], devices: Sequence[torch.device], ranks: Communicator
) -> dict[str, Any] | None:
    """Return what differs between ranks: random generators, those of the GPUs too, and buffers.

    Every rank calls it; None on all but the first.
    """
    buffers = _buffers_of_models(models)
    on_host = dict(zip(buffers, copies_on_host(list(buffers.values())), strict=True))
    states = ranks.gather((_states_of_generators(devices), on_host))
    if not ranks.is_first:
        return None
    saved = {
        f"{index}.{name}": value
        for index, model in enumerate(models)
        for name, value in model.state_dict().items()
    }
    return {
        "rng": [generators for generators, _ in states],
        # The saved model is rank 0's: a rank stores only what it has otherwise.
        "buffers": [_buffers_missing_or_different(rank_buffers, saved) for _, rank_buffers in states],
    }


def restore_state_of_rank(
    state: Mapping[str, Any],
    models: Sequence[nn.Module],
    devices: Sequence[torch.device],
    ranks: Communicator,
    seed: int,
) -> None:
    """Load this rank's part of `gather_rank_specific_states`; from here to training nothing may draw random numbers.

    `seed`, another on each rank, seeds the generators if the state is of another number of processes.
    """
    if len(state["rng"]) != ranks.size:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        return
    buffers = _buffers_of_models(models)
    for name, value in state["buffers"][ranks.rank].items():
        if name in buffers:
            buffers[name].copy_(value)
    _set_generator_states(state["rng"][ranks.rank], devices)


def restore_training_state(
    state: Mapping[str, Any],
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    precision: Precision,
    names: Names,
) -> None:
    """Load what `gather_training_state` returned into models and optimizers, unwrapped, of `Precision.prepare`.

    All of it is checked before any of it is loaded. Its tensors may be used without a copy, and then change.
    """
    check_training_state(state, models, optimizers)
    for model, weights in zip(models, list_of_one_or_several(state["model"]), strict=True):
        here = model.state_dict()
        model.load_state_dict({name: shard_like(value, here[name]) for name, value in weights.items()})
    seen: set[int] = set()
    saved_optimizers = list_of_one_or_several(state["optimizer"])
    for optimizer, saved in zip(optimizers, saved_optimizers, strict=True):
        # Apex makes masters here at the latest. State loaded before that would be rounded to the half weights.
        optimizer.zero_grad()
        placed = _state_as_optimizer_holds_it(optimizer, _state_without_shared_memory(saved, seen))
        _load_optimizer_state(optimizer, placed, keep_types=CONVERTED not in state)
    masters = list_of_one_or_several(state.get("masters") or {})
    for optimizer, slots in zip(optimizers, names, strict=True):
        for param, (index, name) in zip(owned_params(optimizer), slots, strict=True):
            if index < len(masters) and name in masters[index]:
                with torch.no_grad():
                    param.copy_(masters[index][name])
    if precision.key in state:
        precision.load_state_dict(state[precision.key])
    for optimizer, with_grad in zip(optimizers, state.get("zeroed", ()), strict=False):
        params = owned_params(optimizer)
        for index in with_grad:
            params[index].grad = torch.zeros_like(params[index])


def _state_without_shared_memory(saved: Mapping[str, Any], seen_storages: set[int]) -> dict[str, Any]:
    """Return the state of an optimizer in tensors that share no memory, because an optimizer writes into them."""

    def copy_if_shared(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        alone = storage.nbytes() == tensor.nbytes and storage.data_ptr() not in seen_storages
        seen_storages.add(storage.data_ptr())
        return tensor if alone else tensor.clone(memory_format=torch.contiguous_format)

    return {
        "state": map_tensors_in_tree(saved["state"], copy_if_shared),
        "param_groups": saved["param_groups"],
    }


def _load_optimizer_state(optimizer: Optimizer, saved: Mapping[str, Any], *, keep_types: bool) -> None:
    try:
        optimizer.load_state_dict(dict(saved))
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"the optimizer of the checkpoint does not fit {type(optimizer).__name__}: {error}; take one of this recipe"
        ) from None
    if not keep_types:
        return
    ids = chain.from_iterable(group["params"] for group in saved["param_groups"])
    for saved_id, param in zip(ids, owned_params(optimizer), strict=True):
        loaded = optimizer.state.get(param, {})
        for key, value in saved["state"].get(saved_id, {}).items():
            # torch casts state to the type of its parameter, and some optimizers keep another.
            if isinstance(value, Tensor) and value.dtype is not loaded[key].dtype:
                loaded[key] = value.to(loaded[key].device, copy=True)


def _state_as_optimizer_holds_it(optimizer: Optimizer, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of an optimizer in its own classes of tensors, with this rank's part of what is sharded."""

    def place_value(value: Any, param: Tensor) -> Any:
        return rebuild_flattened_tensor(value) if is_flattened(value) else shard_like(value, param)

    ids = chain.from_iterable(group["params"] for group in saved["param_groups"])
    params = dict(zip(ids, owned_params(optimizer), strict=False))
    state = dict(saved["state"])
    for number in state.keys() & params.keys():
        entry = state[number]
        state[number] = {name: place_value(value, params[number]) for name, value in entry.items()}
    return {"state": state, "param_groups": saved["param_groups"]}


def _masters_of_optimizers(
    models: Sequence[nn.Module], optimizers: Sequence[Optimizer], names: Names
) -> list[dict[str, Tensor]]:
    """Return, per model, the tensors that an optimizer holds instead of the model's own parameters."""
    own = {id(param) for model in models for param in model.parameters()}
    masters: list[dict[str, Tensor]] = [{} for _ in models]
    for optimizer, slots in zip(optimizers, names, strict=True):
        for param, (index, name) in zip(owned_params(optimizer), slots, strict=True):
            if id(param) not in own:
                masters[index][name] = param.detach()
    return masters


def _buffers_of_models(models: Sequence[nn.Module]) -> dict[str, Tensor]:
    return {
        f"{index}.{name}": buffer.detach()
        for index, model in enumerate(models)
        for name, buffer in model.named_buffers()
    }


def _buffers_missing_or_different(
    buffers: Mapping[str, Tensor], saved: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return the buffers that the saved model lacks, or has with another value."""
    return {
        name: value
        for name, value in buffers.items()
        if name not in saved or not torch.equal(value.to(saved[name].dtype), saved[name].cpu())
    }


def _states_of_generators(devices: Sequence[torch.device]) -> dict[str, Any]:
    """Return the states of all global generators of this process, including those of `devices`."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": [generator_state_of(device) for device in devices],  # or of another accelerator
        "python": random.getstate(),
        "numpy": [
            str(name),
            torch.from_numpy(np.asarray(keys, np.int64)),
            int(position),
            int(has_gauss),
            float(gauss),
        ],
    }


def _set_generator_states(states: Mapping[str, Any], devices: Sequence[torch.device]) -> None:
    """Set all global generators to what `_states_of_generators` returned."""
    torch.set_rng_state(states["torch"].cpu())
    for device, state in zip(devices, states["cuda"], strict=False):
        set_generator_state(state.cpu(), device)
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.cpu().numpy().astype(np.uint32), *rest))


@contextmanager
def random_states_restored(devices: Sequence[torch.device]) -> Iterator[None]:
    """Leave all global generators on exit as they were on entry."""
    states = _states_of_generators(devices)
    try:
        yield
    finally:
        _set_generator_states(states, devices)
