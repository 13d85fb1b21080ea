"""What a run is made of at a drain point, as plain data, and how another process goes on from it to the last bit.

Every part of a session with a state of its own is in `Session.parts`, and is saved under its name there. Weights,
optimizers and precision go back in while the run is put together, the rest when the session is there.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampcompare.checkpoint.layout import as_list, one_or_list
from ampcompare.environment import fingerprint
from ampcompare.errors import CheckpointError
from ampcompare.precision.base import Precision, owned_params
from ampcompare.record import Resumption
from ampcompare.tasks.randomness import derive

if TYPE_CHECKING:
    from ampcompare.training.session import Session

__all__ = [
    "CONVERTED",
    "Names",
    "Stateful",
    "capture",
    "parameter_names",
    "require_fit",
    "restore_session",
    "restore_training",
]

MOST_NAMED = 10
CONVERTED = "converted"
"""Key of a state that another arm has written, whose types are not those of this one."""

Names = Sequence[Sequence[tuple[int, str]]]
"""Per optimizer and parameter, in its order: index of the model, and name of the parameter there."""


class Stateful(Protocol):
    """A part of a run that changes while it trains."""

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and plain values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""


def parameter_names(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> Names:
    """Return which parameter each optimizer holds at each place; to be asked before masters take these places."""
    names = {id(param): (index, name) for index, model in enumerate(models) for name, param in model.named_parameters()}
    return [[names[id(param)] for param in owned_params(optimizer)] for optimizer in optimizers]


def capture(session: Session) -> dict[str, Any] | None:
    """Return the state of a run at a drain point, in the layout of `checkpoint.layout`; every rank calls it.

    Tensors are those that training goes on with, not copies.

    Returns:
        None but on the first rank.
    """
    assembly, config = session.assembly, session.config
    buffers = _buffers(assembly.replicas)
    own = assembly.ranks.gather((_random_states(_devices(session)), {n: b.cpu() for n, b in buffers.items()}))
    if not assembly.ranks.is_first:
        return None
    models = [model.state_dict() for model in assembly.replicas]
    known = {f"{index}.{name}": value for index, model in enumerate(models) for name, value in model.items()}
    engine = assembly.precision.engine
    return {
        "model": one_or_list(models),
        "optimizer": one_or_list([optimizer.state_dict() for optimizer in assembly.optimizers]),
        assembly.precision.key: assembly.precision.state_dict(),
        "masters": one_or_list(_masters(assembly.replicas, assembly.optimizers, assembly.names)),
        "zeroed": [_zeroed(optimizer) for optimizer in assembly.optimizers],
        "rng": [states for states, _ in own],
        "buffers": [_differing(found, known) for _, found in own],
        "progress": {
            **session.position.state_dict(),
            "world_size": assembly.ranks.size,
            "total_batch_size": config.recipe.batch_size * assembly.ranks.size,
        },
        "best": dict(session.best),
        "parts": {name: part.state_dict() for name, part in session.parts.items()},
        "resumed": [resumption.model_dump() for resumption in session.resumed],
        "arm": config.arm,
        "recipe": config.recipe.model_dump(mode="json"),
        "engine": None if engine is None else {"name": engine.name, "version": engine.version},
        "versions": fingerprint(),
    }


def restore_training(
    state: Mapping[str, Any],
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    precision: Precision,
    names: Names,
) -> None:
    """Load what `capture` returned into models and optimizers as `Precision.prepare` returned them, before wrapping.

    Args:
        state: its tensors may be used as they are, and change then.
        names: as `parameter_names` gave them.

    Raises:
        CheckpointError: it is of other models or optimizers, naming what differs.
    """
    saved_models, saved_optimizers = as_list(state["model"]), as_list(state["optimizer"])
    if len(saved_models) != len(models) or len(saved_optimizers) != len(optimizers):
        raise CheckpointError(
            f"the checkpoint holds {len(saved_models)} models and {len(saved_optimizers)} optimizers, and the run has "
            f"{len(models)} and {len(optimizers)}; take one of this model"
        )
    for model, weights in zip(models, saved_models, strict=True):
        require_fit(model, weights)
        model.load_state_dict(weights)
    for optimizer, saved in zip(optimizers, saved_optimizers, strict=True):
        # Apex makes masters here at the latest. Loaded before that, the state would be rounded to the half weights.
        optimizer.zero_grad()
        _load_optimizer(optimizer, saved, keep_types=CONVERTED not in state)
    masters = as_list(state.get("masters") or {})
    for optimizer, places in zip(optimizers, names, strict=True):
        for param, (index, name) in zip(owned_params(optimizer), places, strict=True):
            if index < len(masters) and name in masters[index]:
                with torch.no_grad():
                    param.copy_(masters[index][name])
    if precision.key in state:
        precision.load_state_dict(state[precision.key])
    for optimizer, places_with_grad in zip(optimizers, state.get("zeroed", ()), strict=False):
        params = owned_params(optimizer)
        for place in places_with_grad:
            params[place].grad = torch.zeros_like(params[place])


def restore_session(session: Session, state: Mapping[str, Any], resumption: Resumption) -> None:
    """Load the rest of what `capture` returned, random generators last; nothing may draw from them afterwards.

    With another number of processes each rank gets generators derived from the seed, the step and its number.
    """
    assembly = session.assembly
    session.position.load_state_dict(state["progress"])
    session.loop.step = session.position.step
    session.best = dict(state["best"])
    session.resumed = [*(Resumption.model_validate(earlier) for earlier in state["resumed"]), resumption]
    for name, part in session.parts.items():
        if name in state["parts"]:
            part.load_state_dict(state["parts"][name])
    rank = assembly.ranks.rank
    if len(state["rng"]) == assembly.ranks.size:
        buffers = _buffers(assembly.replicas)
        for name, value in state["buffers"][rank].items():
            if name in buffers:
                buffers[name].copy_(value)
        _set_random_states(state["rng"][rank], _devices(session))
    else:
        seed = derive("resume", session.config.recipe.seed, session.position.step, rank)
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)


def require_fit(model: nn.Module, weights: Mapping[str, Any]) -> None:
    """See that weights have the names and shapes of a model.

    Raises:
        CheckpointError: naming at most ten that do not, and how many there are.
    """
    wanted = model.state_dict()
    faults = [f"{name} is missing" for name in wanted if name not in weights]
    faults += [f"{name} is unexpected" for name in weights if name not in wanted]
    for name, tensor in wanted.items():
        found = weights.get(name)
        if isinstance(tensor, Tensor) and isinstance(found, Tensor) and found.shape != tensor.shape:
            faults.append(f"{name} is {list(found.shape)} there and {list(tensor.shape)} here")
    if faults:
        more = f" and {len(faults) - MOST_NAMED} more" if len(faults) > MOST_NAMED else ""
        raise CheckpointError(
            f"the checkpoint is of another model: {len(faults)} of its tensors do not fit: "
            f"{'; '.join(faults[:MOST_NAMED])}{more}; take one of this model"
        )


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


def _masters(models: Sequence[nn.Module], optimizers: Sequence[Optimizer], names: Names) -> list[dict[str, Tensor]]:
    """Return, per model, the tensors that an optimizer holds in place of the model's own parameters."""
    own = {id(param) for model in models for param in model.parameters()}
    masters: list[dict[str, Tensor]] = [{} for _ in models]
    for optimizer, places in zip(optimizers, names, strict=True):
        for param, (index, name) in zip(owned_params(optimizer), places, strict=True):
            if id(param) not in own:
                masters[index][name] = param.detach()
    return masters


def _zeroed(optimizer: Optimizer) -> list[int]:
    """Return at which places gradients are zero tensors and not None, on which the sign of a zero may depend."""
    return [place for place, param in enumerate(owned_params(optimizer)) if param.grad is not None]


def _buffers(models: Sequence[nn.Module]) -> dict[str, Tensor]:
    return {
        f"{index}.{name}": buffer.detach()
        for index, model in enumerate(models)
        for name, buffer in model.named_buffers()
    }


def _differing(found: Mapping[str, Tensor], known: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the buffers of a rank that the saved model, which is that of the first rank, does not have alike."""
    return {
        name: value
        for name, value in found.items()
        if name not in known or not torch.equal(value.to(known[name].dtype), known[name].cpu())
    }


def _devices(session: Session) -> list[torch.device]:
    """Return the GPUs that this process trains on."""
    assembly = session.assembly
    if assembly.device.type != "cuda":
        return []
    several = next((model.device_ids for model in assembly.models if isinstance(model, nn.DataParallel)), [])
    return [torch.device("cuda", index) for index in several] or [assembly.device]


def _random_states(devices: Sequence[torch.device]) -> dict[str, Any]:
    """Return the states of all global generators of this process."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(device) for device in devices],
        "python": random.getstate(),
        "numpy": [str(name), torch.from_numpy(np.asarray(keys, np.int64)), int(position), int(has_gauss), float(gauss)],
    }


def _set_random_states(states: Mapping[str, Any], devices: Sequence[torch.device]) -> None:
    torch.set_rng_state(states["torch"].cpu())
    for device, state in zip(devices, states["cuda"], strict=False):
        torch.cuda.set_rng_state(state.cpu(), device)
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, keys.cpu().numpy().astype(np.uint32), position, has_gauss, cached))
