"""Check that a checkpoint fits the models and optimizers of a run, entry by entry, before any of it is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampcompare.base.environment.versions import installed_version
from ampcompare.base.errors import CheckpointError
from ampcompare.checkpoint.convert.between_arms import has_masters
from ampcompare.checkpoint.convert.scaler_numbers import parse_scale, parse_step_count
from ampcompare.checkpoint.store.layout import CONVERTED, as_list
from ampcompare.precision.base import Precision, owned_params
from ampcompare.tensors.tree import tensors_in
from ampcompare.training.state.check_optimizer_state import OptimizerFit, require_settings
from ampcompare.training.state.probe import StateProbe
from ampcompare.training.state.unlike import alike, short, unlike

__all__ = ["Names", "Owned", "owned_by", "require_fit", "require_training_fits"]

MAX_NAMED = 10
MOVING_SCALES = ("scale", "loss_scale")
MOVING_COUNTS = ("unskipped", "_growth_tracker", "good_steps", "actnn_forwards", "rounding_steps")

Names = Sequence[Sequence[tuple[int, str]]]
"""Per optimizer and parameter, in order: the index of the model, and the name of the parameter in it."""


@dataclass(frozen=True)
class Owned:
    """What the optimizers of a run hold before `Precision.prepare` replaces parameters by masters.

    Attributes:
        names: of the parameters.
        probes: per optimizer, the state that it keeps.
    """

    names: Names
    probes: Sequence[StateProbe]


def owned_by(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> Owned:
    """Map the parameters of torch optimizers to names in their models. Call it before `Precision.prepare`."""
    names = {id(param): (index, name) for index, model in enumerate(models) for name, param in model.named_parameters()}
    return Owned(
        [[names[id(param)] for param in owned_params(optimizer)] for optimizer in optimizers],
        [StateProbe(optimizer) for optimizer in optimizers],
    )


def require_training_fits(
    state: Mapping[str, Any],
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    precision: Precision,
    owned: Owned,
    *,
    rates_stay: bool = False,
) -> None:
    """Check that weights, optimizers, masters and precision of a state are those of this run, in name, shape and type.

    The state of a run of this arm must have the same dtypes and settings. One that was converted, or that another
    program wrote, may have other dtypes that can be cast.

    Args:
        models, optimizers: as `Precision.prepare` returned them.
        rates_stay: no schedule changes the learning rates.

    Raises:
        CheckpointError: names the entry that does not fit.
    """
    own = "arm" in state and CONVERTED not in state
    saved_models, saved_optimizers = as_list(state["model"]), as_list(state["optimizer"])
    if len(saved_models) != len(models) or len(saved_optimizers) != len(optimizers):
        raise CheckpointError(
            f"the checkpoint holds {len(saved_models)} models and {len(saved_optimizers)} optimizers, but the run has "
            f"{len(models)} and {len(optimizers)}; use one of this model"
        )
    for model, weights in zip(models, saved_models, strict=True):
        require_fit(model, weights, same_types=own)
    masters = as_list(state.get("masters") or {})
    wanted = _wanted_masters(state, models, optimizers, owned)
    if "arm" in state or any(masters):
        _require_masters(masters, wanted, models, complete="arm" in state, alone=own)
    if own:
        _require_rounded(masters, saved_models, wanted)
    stateless = state.get("stateless") or [None] * len(optimizers)
    if len(stateless) != len(optimizers):
        raise CheckpointError(f"stateless of the checkpoint is of {len(stateless)} optimizers; use one of this recipe")
    for index, (optimizer, saved) in enumerate(zip(optimizers, saved_optimizers, strict=True)):
        key = "optimizer" if len(optimizers) == 1 else f"optimizer.{index}"
        types = [
            torch.float32 if name in wanted[model] else param.dtype
            for param, (model, name) in zip(owned_params(optimizer), owned.names[index], strict=True)
        ]
        fit = OptimizerFit(
            optimizer, types, owned.probes[index], key, stateless[index], own=own, held=precision.state_dtype
        )
        fit.require(saved, added=precision.added_state)
        if "arm" in state:
            require_settings(optimizer, saved, key, rates_stay=rates_stay, complete=own and _same_torch(state))
    _require_zeroed(state, optimizers)
    _require_buffers(state, models)
    _require_precision(state, precision, own=own)
    if own:
        _require_finite(state, saved_models, saved_optimizers, models)


def require_fit(model: nn.Module, weights: Any, *, same_types: bool = False) -> None:
    """Check that weights have the names and shapes of a model, and its dtypes if asked for.

    Raises:
        CheckpointError: names at most ten that do not, and their number.
    """
    if not isinstance(weights, Mapping):
        raise CheckpointError(f"the weights of the checkpoint are a {type(weights).__name__}; use one of this model")
    wanted = model.state_dict()
    faults = [f"{name} is missing" for name in wanted if name not in weights]
    faults += [f"{name} is unexpected" for name in weights if name not in wanted]
    for name, tensor in wanted.items():
        if name in weights and (fault := unlike(weights[name], tensor, same_type=same_types)):
            faults.append(f"{name} {fault}")
    if faults:
        more = f" and {len(faults) - MAX_NAMED} more" if len(faults) > MAX_NAMED else ""
        raise CheckpointError(
            f"the checkpoint is of another model: {len(faults)} of its tensors do not fit: "
            f"{'; '.join(faults[:MAX_NAMED])}{more}; use one of this model"
        )


def _wanted_masters(
    state: Mapping[str, Any], models: Sequence[nn.Module], optimizers: Sequence[Optimizer], owned: Owned
) -> list[dict[str, Tensor]]:
    """Return, per model, the parameters by name that have masters now or will have them after the first step.

    Apex makes masters at the first `zero_grad`; until then its optimizers hold the model's own parameters.
    """
    made_later = has_masters(str(state["arm"])) if "arm" in state else True
    params = [dict(model.named_parameters()) for model in models]
    wanted: list[dict[str, Tensor]] = [{} for _ in models]
    for optimizer, places in zip(optimizers, owned.names, strict=True):
        for held, (index, name) in zip(owned_params(optimizer), places, strict=True):
            param = params[index].get(name)
            narrow = param is not None and param.dtype in (torch.float16, torch.bfloat16)
            if param is not None and (held is not param or (made_later and narrow)):
                wanted[index][name] = param
    return wanted


def _require_masters(
    masters: list[Any], wanted: list[dict[str, Tensor]], models: Sequence[nn.Module], *, complete: bool, alone: bool
) -> None:
    """Check that masters exist with the shapes of their parameters.

    Args:
        complete: every parameter that has a master in this run must have one.
        alone: no other parameter may have one.
    """
    expected = len(models) if any(wanted) or len(models) == 1 else len(masters)
    if len(masters) != expected or not all(isinstance(entry, Mapping) for entry in masters):
        raise CheckpointError(f"masters of the checkpoint are of {len(masters)} models, and the run has {len(models)}")
    faults: list[str] = []
    for found, params in zip(masters, wanted, strict=False):
        if complete:
            faults += [f"{name} is missing" for name in params if name not in found]
        if alone:
            faults += [f"{name} is unexpected" for name in found if name not in params]
        for name, param in params.items():
            if name in found and (fault := unlike(found[name], param.detach().float())):
                faults.append(f"{name} {fault}")
    if faults:
        more = f" and {len(faults) - MAX_NAMED} more" if len(faults) > MAX_NAMED else ""
        raise CheckpointError(
            f"{len(faults)} fp32 masters of the checkpoint do not fit: {'; '.join(faults[:MAX_NAMED])}{more}; use "
            "one of this arm and this model"
        )


def _require_rounded(masters: list[Any], saved_models: list[Any], wanted: list[dict[str, Tensor]]) -> None:
    """Check that weights are their masters, rounded: every step that moves the masters writes the weights."""
    for found, weights, params in zip(masters, saved_models, wanted, strict=False):
        for name, param in params.items():
            rounded, weight = found[name].to(param.dtype), weights[name].to(param.dtype)
            if not torch.equal(rounded.nan_to_num(), weight.nan_to_num()):
                raise CheckpointError(
                    f"masters.{name} of the checkpoint does not round to its {param.dtype} weight; one of the two is "
                    "of another step, use the checkpoint before it"
                )


def _same_torch(state: Mapping[str, Any]) -> bool:
    """Return whether this torch wrote the state: another one may have fewer settings of an optimizer."""
    versions = state.get("versions")
    return isinstance(versions, Mapping) and versions.get("torch") == installed_version("torch")


def _require_zeroed(state: Mapping[str, Any], optimizers: Sequence[Optimizer]) -> None:
    zeroed = state.get("zeroed", [])
    if zeroed and len(zeroed) != len(optimizers):
        raise CheckpointError(
            f"zeroed of the checkpoint is of {len(zeroed)} optimizers, and the run has another number"
        )
    for places, optimizer in zip(zeroed, optimizers, strict=False):
        if len(set(places)) != len(places) or any(place >= len(owned_params(optimizer)) for place in places):
            raise CheckpointError("zeroed of the checkpoint names parameters that the optimizer does not have")


def _require_buffers(state: Mapping[str, Any], models: Sequence[nn.Module]) -> None:
    here = {f"{index}.{name}": buffer for index, model in enumerate(models) for name, buffer in model.named_buffers()}
    for rank, buffers in enumerate(state.get("buffers", ())):
        for name, value in buffers.items():
            fault = "is unexpected" if name not in here else unlike(value, here[name], same_type=CONVERTED not in state)
            if fault:
                raise CheckpointError(f"buffers.{rank}.{name} of the checkpoint {fault}; use one of this model")


def _require_precision(state: Mapping[str, Any], precision: Precision, *, own: bool) -> None:
    """Check that loss scalers are those of this arm, with scales and counts that training can continue with."""
    if precision.key not in state:
        if own:
            raise CheckpointError(f"the checkpoint has no {precision.key}, the state of its loss scalers")
        return
    _require_scaling(state[precision.key], precision.state_dict(), precision.key, own=own)


def _require_scaling(found: Any, wanted: Mapping[str, Any], place: str, *, own: bool) -> None:
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{place} of the checkpoint is a {type(found).__name__}, not the state of a loss scaler")
    if own and set(found) != set(wanted):
        raise CheckpointError(
            f"{place} of the checkpoint has {short(sorted(map(str, found)))}, and this arm "
            f"{short(sorted(wanted))}; use one of this arm"
        )
    for name, value in found.items():
        where = f"{place}.{name}"
        if name in MOVING_SCALES:
            parse_scale(value, where)
        elif name in MOVING_COUNTS:
            parse_step_count(value, where)
        elif isinstance(value, Mapping):
            inner = wanted.get(name, {"loss_scale": 1.0, "unskipped": 0})
            if "loss_scale" not in value or "unskipped" not in value:
                raise CheckpointError(f"{where} of the checkpoint is not the state of a loss scaler")
            _require_scaling(value, inner, where, own=own)
        elif not own:  # growth and backoff of another program's scaler, which it brings along
            parse_scale(value, where)
        elif name in wanted and not alike(value, wanted[name]):
            raise CheckpointError(f"{where} is {short(value)} there and {short(wanted[name])} here")


def _require_finite(
    state: Mapping[str, Any], weights: list[Any], optimizers: list[Any], models: Sequence[nn.Module]
) -> None:
    """Check that weights are finite unless the run had diverged, which is detected before each save."""
    if state.get("parts", {}).get("watch", {}).get("diverged_step") is not None:
        return
    for model, saved in zip(models, weights, strict=True):
        for name, param in model.named_parameters():
            if name in saved and not bool(saved[name].to(param.dtype).isfinite().all()):
                raise CheckpointError(f"model.{name} of the checkpoint is not finite, and the run had not diverged")
        for name, value in saved.items():
            if name.endswith("running_var") and bool((value < 0).any()):
                raise CheckpointError(f"model.{name} of the checkpoint holds a negative variance")
    for saved in optimizers:
        for number, entry in saved["state"].items():
            for name, value in entry.items():
                if any(bool(tensor.isnan().any()) for tensor in tensors_in(value)):
                    raise CheckpointError(f"optimizer.state.{number}.{name} is NaN, and the run had not diverged")
