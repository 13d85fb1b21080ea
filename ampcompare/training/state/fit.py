"""Check that a checkpoint fits the models and optimizers of a run, entry by entry, before any of it is loaded."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampcompare.checkpoint.convert.between_arms import has_masters
from ampcompare.checkpoint.convert.scaler_numbers import parse_scale, parse_step_count
from ampcompare.checkpoint.store.layout import CONVERTED, as_list
from ampcompare.environment.versions import installed_version
from ampcompare.errors import CheckpointError
from ampcompare.precision.base import Precision, owned_params

__all__ = ["Names", "Owned", "owned_by", "require_fit", "require_training_fits"]

MAX_NAMED = 10
MOVING_SCALES = ("scale", "loss_scale")
MOVING_COUNTS = ("unskipped", "_growth_tracker", "good_steps", "actnn_forwards")

Names = Sequence[Sequence[tuple[int, str]]]
"""Per optimizer and parameter, in order: the index of the model, and the name of the parameter in it."""


@dataclass(frozen=True)
class Owned:
    """What the optimizers of a run hold before `Precision.prepare` replaces parameters by masters.

    Attributes:
        names: of the parameters.
        slots: per optimizer and parameter, the names of its state, and whether each has the shape of the parameter.
    """

    names: Names
    slots: Sequence[Sequence[Mapping[str, bool]]]


def owned_by(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> Owned:
    """Map the parameters of torch optimizers to names in their models. Call it before `Precision.prepare`."""
    names = {id(param): (index, name) for index, model in enumerate(models) for name, param in model.named_parameters()}
    return Owned(
        [[names[id(param)] for param in owned_params(optimizer)] for optimizer in optimizers],
        [list(_slots(optimizer)) for optimizer in optimizers],
    )


def _slots(optimizer: Optimizer) -> Iterator[Mapping[str, bool]]:
    """Yield the names of the state of each parameter, from a copy of the optimizer that makes one step on two zeros."""
    for group in optimizer.param_groups:
        probe = nn.Parameter(torch.zeros(2))
        probe.grad = torch.zeros(2)
        kind: Any = type(optimizer)
        copy = kind([{**group, "params": [probe]}], lr=group["lr"])
        copy.step()
        slots = {name: value.shape == probe.shape for name, value in copy.state[probe].items() if value is not None}
        for _ in group["params"]:
            yield slots


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
            f"the checkpoint holds {len(saved_models)} models and {len(saved_optimizers)} optimizers, and the run has "
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
        place = "optimizer" if len(optimizers) == 1 else f"optimizer.{index}"
        types = [
            torch.float32 if name in wanted[model] else param.dtype
            for param, (model, name) in zip(owned_params(optimizer), owned.names[index], strict=True)
        ]
        _Optimizer(optimizer, types, owned.slots[index], place, stateless[index], own=own).require(saved)
        if "arm" in state:
            _require_settings(optimizer, saved, place, rates_stay=rates_stay, complete=own and _same_torch(state))
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
        if name in weights and (fault := _unlike(weights[name], tensor, same_type=same_types)):
            faults.append(f"{name} {fault}")
    if faults:
        more = f" and {len(faults) - MAX_NAMED} more" if len(faults) > MAX_NAMED else ""
        raise CheckpointError(
            f"the checkpoint is of another model: {len(faults)} of its tensors do not fit: "
            f"{'; '.join(faults[:MAX_NAMED])}{more}; use one of this model"
        )


def _unlike(found: Any, wanted: Any, *, same_type: bool = True) -> str:
    """Return how a tensor differs in kind, shape or dtype; "" if it does not."""
    if not isinstance(wanted, Tensor):
        return ""
    if not isinstance(found, Tensor):
        return f"is a {type(found).__name__} there and a tensor here"
    if found.shape != wanted.shape:
        return f"is {list(found.shape)} there and {list(wanted.shape)} here"
    castable = found.is_floating_point() and wanted.is_floating_point() and not same_type
    if found.dtype is not wanted.dtype and not castable:
        return f"is {found.dtype} there and {wanted.dtype} here"
    return ""


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
            if name in found and (fault := _unlike(found[name], param.detach().float())):
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


class _Optimizer:
    """Checks the state dict of one optimizer."""

    def __init__(
        self,
        optimizer: Optimizer,
        types: Sequence[torch.dtype],
        slots: Sequence[Mapping[str, bool]],
        place: str,
        stateless: Sequence[int] | None,
        *,
        own: bool,
    ) -> None:
        self.stateless = stateless
        self.optimizer = optimizer
        self.types = types
        self.slots = slots
        self.place = place
        self.own = own

    def refuse(self, entry: str, text: str) -> NoReturn:
        raise CheckpointError(
            f"the optimizer of the checkpoint does not fit {type(self.optimizer).__name__}: {self.place}.{entry} "
            f"{text}; use one of this recipe"
        )

    def require(self, saved: Any) -> None:
        if not isinstance(saved, Mapping) or not isinstance(saved.get("state"), Mapping):
            raise CheckpointError(f"{self.place} of the checkpoint has no state; use one of this recipe")
        numbers = self._numbers(saved.get("param_groups"))
        for number in saved["state"]:
            if number not in numbers:
                self.refuse(f"state.{number!r}", "belongs to no parameter")
        params = owned_params(self.optimizer)
        for at, (number, param) in enumerate(zip(numbers, params, strict=True)):
            entry = saved["state"].get(number, {})
            if not isinstance(entry, Mapping):
                self.refuse(f"state.{number}", f"is a {type(entry).__name__}")
            if self.stateless is not None and (at in self.stateless) != (not entry):
                self.refuse(f"state.{number}", "is missing" if not entry else "exists, and did not when it was saved")
            if entry:
                self._entry(entry, at, param, f"state.{number}")

    def _numbers(self, groups: Any) -> list[Any]:
        """Return the numbers of all parameters, group by group."""
        own = self.optimizer.param_groups
        if not isinstance(groups, list) or len(groups) != len(own):
            self.refuse("param_groups", f"is not of {len(own)} groups")
        for index, (group, here) in enumerate(zip(groups, own, strict=True)):
            params = group.get("params") if isinstance(group, Mapping) else None
            if not isinstance(params, list) or len(params) != len(here["params"]):
                self.refuse(f"param_groups.{index}.params", f"is not of {len(here['params'])} parameters")
        numbers = list(chain.from_iterable(group["params"] for group in groups))
        if not all(type(number) is int for number in numbers) or len(set(numbers)) != len(numbers):
            self.refuse("param_groups", "names a parameter twice, or not by a number")
        if self.own and numbers != list(range(len(numbers))):
            self.refuse("param_groups", "names the parameters in another order")
        return numbers

    def _entry(self, entry: Mapping[Any, Any], at: int, param: Tensor, place: str) -> None:
        slots = self.slots[at]
        for name in slots:
            if name not in entry:
                self.refuse(place, f"has no {name}")
        for name, value in entry.items():
            if name not in slots:
                if self.own or isinstance(value, Tensor):
                    self.refuse(f"{place}.{name}", "is not a state of it")
            elif slots[name]:
                if value is None and not self.own:
                    continue
                if fault := _unlike(value, param.detach().to(self.types[at]), same_type=self.own):
                    self.refuse(f"{place}.{name}", fault)
            else:
                self._scalar(value, f"{place}.{name}")

    def _scalar(self, value: Any, place: str) -> None:
        """Check that a value counts steps."""
        if isinstance(value, Tensor):
            if value.numel() != 1 or (self.own and (value.dtype is not torch.float32 or value.dim())):
                self.refuse(place, f"is {value.dtype} of shape {list(value.shape)}, and a count of steps")
            value = value.item()
        elif self.own:
            self.refuse(place, f"is a {type(value).__name__} there and a tensor here")
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(place, f"is a {type(value).__name__}, and counts steps")
        if not 0 <= value < 2**53 or value != int(value):
            self.refuse(place, f"is {value}, and counts steps")


def _same_torch(state: Mapping[str, Any]) -> bool:
    """Return whether this torch wrote the state: another one may have fewer settings of an optimizer."""
    versions = state.get("versions")
    return isinstance(versions, Mapping) and versions.get("torch") == installed_version("torch")


def _require_settings(
    optimizer: Optimizer, saved: Mapping[str, Any], place: str, *, rates_stay: bool, complete: bool
) -> None:
    """Check that the settings of all groups are those of the recipe, which is the same.

    Args:
        complete: no setting may be missing.
    """
    for index, (there, here) in enumerate(zip(saved["param_groups"], optimizer.param_groups, strict=True)):
        for name, value in here.items():
            where = f"{place}.param_groups.{index}.{name}"
            if complete and name not in there:
                raise CheckpointError(f"{where} of the checkpoint is missing; take the checkpoint before it")
            if name == "params" or name not in there:
                continue
            found = there[name]
            moves = name == "lr" and not rates_stay
            if moves and type(found) is float and math.isfinite(found) and found >= 0:
                continue
            if moves or not _alike(found, value):
                raise CheckpointError(
                    f"{where} is {_short(found)} there and {_short(value)} here; resume with the settings that the "
                    "checkpoint was written with"
                )


def _alike(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, list | tuple):
        same_size = isinstance(found, list | tuple) and len(found) == len(wanted)
        return same_size and all(_alike(one, other) for one, other in zip(found, wanted, strict=True))
    if isinstance(found, Tensor) or isinstance(wanted, Tensor):
        both = isinstance(found, Tensor) and isinstance(wanted, Tensor)
        return both and not _unlike(found, wanted) and torch.equal(found, wanted)
    numbers = isinstance(found, int | float) and isinstance(wanted, int | float)
    same_kind = isinstance(found, bool) == isinstance(wanted, bool) if numbers else type(found) is type(wanted)
    return same_kind and bool(found == wanted)


def _short(value: Any) -> str:
    text = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


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
            fault = (
                "is unexpected" if name not in here else _unlike(value, here[name], same_type=CONVERTED not in state)
            )
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
            f"{place} of the checkpoint has {_short(sorted(map(str, found)))}, and this arm "
            f"{_short(sorted(wanted))}; use one of this arm"
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
        elif name in wanted and not _alike(value, wanted[name]):
            raise CheckpointError(f"{where} is {_short(value)} there and {_short(wanted[name])} here")


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
                if isinstance(value, Tensor) and bool(value.isnan().any()):
                    raise CheckpointError(f"optimizer.state.{number}.{name} is NaN, and the run had not diverged")
