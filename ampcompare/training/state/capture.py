"""The state of training as plain data, from which another process continues bit for bit.

Weights, optimizers and precision are restored while a run is assembled. The rest, `Session.load_state_dict` restores.
"""

from __future__ import annotations

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
from ampcompare.base.tensors.sharded import from_part, is_sharded, placed_like, rank_in, whole_tree
from ampcompare.base.tensors.tree import mapped
from ampcompare.training.checkpoint.store.layout import CONVERTED, TENSOR_SHARDS, as_list, one_or_list
from ampcompare.training.device import random_state, set_random_state
from ampcompare.training.parallel.ranks import Communicator
from ampcompare.training.precision.base import Precision, owned_params
from ampcompare.training.state.check_checkpoint import Names, Owned, require_training_fits
from ampcompare.training.state.flattened import is_flattened, plain_state, rebuilt

__all__ = [
    "kept_random_states",
    "rank_states",
    "require_random_states",
    "restore_rank",
    "restore_training",
    "training_state",
]

WORDS = 624
SIZES = ((16,), (44,))


def training_state(
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    precision: Precision,
    names: Names,
    *,
    whole: bool = True,
) -> dict[str, Any]:
    """Return weights, optimizers and loss scales, in the layout of `checkpoint.store.layout`.

    Tensors are those that training continues with, not copies; shards are gathered, so that every rank calls it.

    Args:
        models, optimizers: as `Precision.prepare` returned them.
        names: of the parameters that the optimizers held before `prepare`.
        whole: gather shards; else sharded tensors stay as they are.
    """
    weights, states = [model.state_dict() for model in models], [optimizer.state_dict() for optimizer in optimizers]
    return {
        "model": one_or_list([whole_tree(each) for each in weights] if whole else weights),
        "optimizer": one_or_list([plain_state(each) for each in states] if whole else states),
        precision.key: precision.state_dict(),
        "masters": one_or_list(_masters(models, optimizers, names)),
        "zeroed": [_zeroed(optimizer) for optimizer in optimizers],
        "stateless": [_stateless(optimizer) for optimizer in optimizers],
    }


def rank_states(
    models: Sequence[nn.Module], devices: Sequence[torch.device], ranks: Communicator
) -> dict[str, Any] | None:
    """Return what differs between ranks: random generators, and buffers such as batch norm statistics.

    Args:
        devices: the GPUs that this process trains on.

    Returns:
        None on all ranks but the first; every rank calls it.
    """
    buffers = _buffers(models)
    on_host = dict(zip(buffers, copies_on_host(list(buffers.values())), strict=True))
    states = ranks.gather((_random_states(devices), on_host))
    if not ranks.is_first:
        return None
    saved = {
        f"{index}.{name}": value for index, model in enumerate(models) for name, value in model.state_dict().items()
    }
    return {
        "rng": [generators for generators, _ in states],
        # The saved model is rank 0's: a rank stores only what it has otherwise.
        "buffers": [_differing(rank_buffers, saved) for _, rank_buffers in states],
    }


def restore_rank(
    state: Mapping[str, Any],
    models: Sequence[nn.Module],
    devices: Sequence[torch.device],
    ranks: Communicator,
    seed: int,
) -> None:
    """Load this rank's part of `rank_states`; nothing may draw random numbers between this call and training.

    Args:
        seed: seeds the generators if the state is of another number of processes; it must depend on the rank.
    """
    if len(state["rng"]) != ranks.size:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        return
    buffers = _buffers(models)
    for name, value in state["buffers"][ranks.rank].items():
        if name in buffers:
            buffers[name].copy_(value)
    _set_random_states(state["rng"][ranks.rank], devices)


def restore_training(
    state: Mapping[str, Any],
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    precision: Precision,
    owned: Owned,
    *,
    rates_stay: bool = False,
) -> None:
    """Load what `training_state` returned into models and optimizers as `Precision.prepare` returned them, unwrapped.

    All of it is checked before any of it is loaded.

    Args:
        state: its tensors may be used without a copy, and then change.
        owned: what `owned_by` returned.
        rates_stay: no schedule changes the learning rates.

    Raises:
        CheckpointError: it is of other models or optimizers; names what differs.
    """
    require_training_fits(state, models, optimizers, precision, owned, rates_stay=rates_stay)
    for model, weights in zip(models, as_list(state["model"]), strict=True):
        here = model.state_dict()
        model.load_state_dict({name: placed_like(value, here[name]) for name, value in weights.items()})
    seen: set[int] = set()
    saved_optimizers = as_list(state["optimizer"])
    for optimizer, saved, probe in zip(optimizers, saved_optimizers, owned.probes, strict=True):
        # Apex makes masters here at the latest. State loaded before that would be rounded to the half weights.
        optimizer.zero_grad()
        placed = _placed(optimizer, _in_own_memory(saved, seen), probe.kinds)
        _load_optimizer(optimizer, placed, keep_types=CONVERTED not in state)
    masters = as_list(state.get("masters") or {})
    for optimizer, slots in zip(optimizers, owned.names, strict=True):
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


def _in_own_memory(saved: Mapping[str, Any], seen: set[int]) -> dict[str, Any]:
    """Return the state of an optimizer in tensors that share no memory, because an optimizer writes into them."""

    def own(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        alone = storage.nbytes() == tensor.nbytes and storage.data_ptr() not in seen
        seen.add(storage.data_ptr())
        return tensor if alone else tensor.clone(memory_format=torch.contiguous_format)

    return {"state": mapped(saved["state"], own), "param_groups": saved["param_groups"]}


def _load_optimizer(optimizer: Optimizer, saved: Mapping[str, Any], *, keep_types: bool) -> None:
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


def _placed(optimizer: Optimizer, saved: Mapping[str, Any], kinds: Mapping[str, type]) -> dict[str, Any]:
    """Return the state of an optimizer in its own classes of tensors, with this rank's part of what is sharded.

    Args:
        kinds: the classes of tensors that it keeps, by name.
    """

    def place(value: Any, param: Tensor) -> Any:
        is_part = isinstance(value, Mapping) and TENSOR_SHARDS in value
        if not is_part and not is_flattened(value):
            return placed_like(value, param)
        part = value[TENSOR_SHARDS][rank_in(param)] if is_part else value
        part = rebuilt(part, kinds) if is_flattened(part) else part
        return from_part(part, param) if is_sharded(param) else part

    ids = chain.from_iterable(group["params"] for group in saved["param_groups"])
    params = dict(zip(ids, owned_params(optimizer), strict=False))
    state = {
        number: {name: place(value, params[number]) for name, value in entry.items()} if number in params else entry
        for number, entry in saved["state"].items()
    }
    return {"state": state, "param_groups": saved["param_groups"]}


def _masters(models: Sequence[nn.Module], optimizers: Sequence[Optimizer], names: Names) -> list[dict[str, Tensor]]:
    """Return, per model, the tensors that an optimizer holds instead of the model's own parameters."""
    own = {id(param) for model in models for param in model.parameters()}
    masters: list[dict[str, Tensor]] = [{} for _ in models]
    for optimizer, slots in zip(optimizers, names, strict=True):
        for param, (index, name) in zip(owned_params(optimizer), slots, strict=True):
            if id(param) not in own:
                masters[index][name] = param.detach()
    return masters


def _zeroed(optimizer: Optimizer) -> list[int]:
    """Return the indices of parameters whose gradient is a tensor, not None; the sign of a zero may depend on it."""
    return [index for index, param in enumerate(owned_params(optimizer)) if param.grad is not None]


def _stateless(optimizer: Optimizer) -> list[int]:
    """Return the indices of parameters without state, so that a lost state is detected."""
    return [index for index, param in enumerate(owned_params(optimizer)) if not optimizer.state.get(param)]


def _buffers(models: Sequence[nn.Module]) -> dict[str, Tensor]:
    return {
        f"{index}.{name}": buffer.detach()
        for index, model in enumerate(models)
        for name, buffer in model.named_buffers()
    }


def _differing(buffers: Mapping[str, Tensor], saved: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the buffers that the saved model lacks, or has with another value."""
    return {
        name: value
        for name, value in buffers.items()
        if name not in saved or not torch.equal(value.to(saved[name].dtype), saved[name].cpu())
    }


"""Length of the state of a Mersenne Twister, in words of 32 bits."""
"""Shapes of the state of a GPU: seed and offset; under Metal the state of a Philox generator and a seed."""


def _random_states(devices: Sequence[torch.device]) -> dict[str, Any]:
    """Return the states of all global generators of this process, including those of `devices`."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": [random_state(device) for device in devices],  # or of another accelerator
        "python": random.getstate(),
        "numpy": [str(name), torch.from_numpy(np.asarray(keys, np.int64)), int(position), int(has_gauss), float(gauss)],
    }


def _set_random_states(states: Mapping[str, Any], devices: Sequence[torch.device]) -> None:
    """Set all global generators to what `random_states` returned."""
    torch.set_rng_state(states["torch"].cpu())
    for device, state in zip(devices, states["cuda"], strict=False):
        set_random_state(state.cpu(), device)
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(_of_numpy(states["numpy"]))


@contextmanager
def kept_random_states(devices: Sequence[torch.device]) -> Iterator[None]:
    """Leave all global generators on exit as they were on entry."""
    states = _random_states(devices)
    try:
        yield
    finally:
        _set_random_states(states, devices)


def require_random_states(states: Any, path: str) -> None:
    """Check that states can be restored, by restoring them into generators that are used for nothing else.

    Args:
        path: of the states in the checkpoint, for the message.

    Raises:
        CheckpointError: names the generator whose state is not valid.
    """
    if not isinstance(states, dict):
        raise CheckpointError(f"{path} is a {type(states).__name__}, and holds the states of random generators")
    for name, test in (("torch", _try_torch), ("cuda", _try_cuda), ("python", _try_python), ("numpy", _try_numpy)):
        if name not in states:
            raise CheckpointError(f"{path} has no state of the generator of {name}")
        try:
            test(states[name])
        except (TypeError, ValueError, OverflowError, RuntimeError, IndexError) as error:
            raise CheckpointError(f"{path}.{name} is not a state of a random generator: {_line(error)}") from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:120]


def _try_torch(state: Any) -> None:
    if not isinstance(state, Tensor):
        raise TypeError(f"it is a {type(state).__name__}")
    torch.Generator().set_state(state.cpu())


def _try_cuda(states: Any) -> None:
    if not isinstance(states, list):
        raise TypeError(f"it is a {type(states).__name__}")
    for state in states:
        if not isinstance(state, Tensor) or state.dtype is not torch.uint8 or state.shape not in SIZES:
            raise ValueError("a GPU's has 16 bytes, or 44 under Metal")
        if torch.cuda.is_available():
            torch.Generator("cuda").set_state(state.cpu())


def _try_python(state: Any) -> None:
    version, internal, gauss = state
    _require_words(internal[:-1])
    if type(gauss) not in (float, type(None)):
        raise TypeError(f"its cached number is a {type(gauss).__name__}")
    random.Random().setstate((version, tuple(internal), gauss))


def _try_numpy(state: Any) -> None:
    _, keys, position, has_gauss, gauss = state
    if not isinstance(keys, Tensor) or keys.dtype is not torch.int64 or keys.dim() != 1:
        raise TypeError("its words are not a tensor of int64")
    _require_words(keys.tolist())
    if type(position) is not int or not 0 <= position <= WORDS:
        raise ValueError(f"its position is {position}")
    if type(has_gauss) is not int or has_gauss not in (0, 1) or type(gauss) is not float:
        raise ValueError("its cached number is not valid")
    np.random.RandomState().set_state(_of_numpy(state))


def _require_words(words: Any) -> None:
    if len(words) != WORDS or not all(type(word) is int and 0 <= word < 1 << 32 for word in words):
        raise ValueError(f"it has not {WORDS} words of 32 bits")


def _of_numpy(state: Any) -> tuple[Any, ...]:
    name, keys, position, has_gauss, cached = state
    return (name, keys.cpu().numpy().astype(np.uint32), position, has_gauss, cached)
