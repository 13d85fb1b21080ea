"""Check that a checkpoint fits the models and optimizers of a run, entry by entry, before any of it is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor, equal, nn
from torch.optim import Optimizer

from ampcompare.base.environment.packages import installed_version
from ampcompare.base.errors import CheckpointError
from ampcompare.base.tensors.sharded import shard_shapes
from ampcompare.training.checkpoint.convert.between_arms import has_masters
from ampcompare.training.checkpoint.convert.scalers import parse_scale, parse_step_count
from ampcompare.training.checkpoint.store.layout import CONVERTED, TENSOR_CLASS, TENSOR_SHARDS, as_list
from ampcompare.training.precision.base import Precision, owned_params
from ampcompare.training.state.flattened import class_name, flattened, is_flattened, is_wrapped

__all__ = ["Names", "Owned", "StateProbe", "owned_by", "require_fit", "require_training_fits", "unlike"]

# Their state depends on a parameter's shape in one way: some tensors have it. A step on two zeros shows which.
LIKE_ANY_SHAPE = ("SGD", "Adam", "AdamW", "FusedAdam", "FusedLAMB", "FusedNovoGrad", "FusedSGD", "FusedAdagrad")
PACKAGES = ("torch", "apex", "ampcompare")
SMALL = torch.Size([2])
SETTINGS = (bool, int, float, str)
MAX_NAMED = 10
MOVING_SCALES = ("scale", "loss_scale")
MOVING_COUNTS = ("unskipped", "_growth_tracker", "good_steps", "actnn_forwards", "rounding_steps")


class StateProbe:
    """The state that an optimizer keeps of each of its parameters. Make it before `Precision.prepare`.

    Args:
        optimizer: as `make_optimizer` returned it; other libraries may put it into one of their own later.

    Attributes:
        kinds: classes of tensors among the state that has been asked for, by the names that a checkpoint gives them.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._kind: Any = type(optimizer)
        groups = optimizer.param_groups
        self._groups = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        # An optimizer may keep settings outside its groups, such as the size of the blocks that share a scale.
        self._settings = {name: value for name, value in vars(optimizer).items() if type(value) in SETTINGS}
        self._group_of = [index for index, group in enumerate(groups) for _ in group["params"]]
        known = self._kind.__module__.partition(".")[0] in PACKAGES and self._kind.__name__ in LIKE_ANY_SHAPE
        self._probe_shape = SMALL if known else None
        # One of another package may have kernels for the device of its parameters alone.
        self._device = torch.device("cpu") if known else groups[0]["params"][0].device
        self._seen: dict[tuple[int, torch.Size, torch.dtype], dict[str, Any]] = {}
        self.kinds: dict[str, type] = {}

    def state_of(self, at: int, shape: torch.Size, dtype: torch.dtype) -> Mapping[str, Any]:
        """Return the state by name after a step on a parameter.

        Args:
            at: the place of the parameter among all.
            shape, dtype: those of the tensor that the optimizer holds.

        Returns:
            A meta tensor for each tensor; for a tensor subclass what `flattened` makes of it, with meta tensors; None
            for a plain number; a dictionary of these where the state dict of the optimizer has one.
        """
        probed = shape if self._probe_shape is None else self._probe_shape
        key = (self._group_of[at], probed, dtype)
        if key not in self._seen:
            self._seen[key] = self._step(*key)
        return {
            name: torch.empty(shape, dtype=kept.dtype, device="meta")
            if isinstance(kept, Tensor) and kept.shape == probed
            else kept
            for name, kept in self._seen[key].items()
        }

    def _step(self, group: int, shape: torch.Size, dtype: torch.dtype) -> dict[str, Any]:
        probe = nn.Parameter(torch.zeros(shape, dtype=dtype, device=self._device))
        probe.grad = torch.zeros_like(probe)
        settings = self._groups[group]
        copy = self._kind([{**settings, "params": [probe]}], lr=settings["lr"])
        vars(copy).update(self._settings)
        with _uncompiled():
            copy.step()
        state = copy.state_dict()["state"][0]
        self.kinds.update((class_name(type(value)), type(value)) for value in state.values() if is_wrapped(value))
        return {name: _on_meta(flattened(value)) for name, value in state.items() if value is not None}


def _on_meta(value: Any) -> Any:
    if is_flattened(value):
        return {**value, "tensors": _on_meta(value["tensors"])}
    if isinstance(value, dict):
        return {name: _on_meta(inner) for name, inner in value.items()}
    return value.to("meta") if isinstance(value, Tensor) else None


def _uncompiled() -> AbstractContextManager[Any]:
    """Let an optimizer that compiles its step make one without waiting for a compiler; torch before 2.6 compiles it."""
    set_stance = getattr(torch.compiler, "set_stance", None)
    return nullcontext() if set_stance is None else set_stance("force_eager")


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
    stateless = state.get("stateless") or [None] * len(optimizers)
    if len(stateless) != len(optimizers):
        raise CheckpointError(f"stateless of the checkpoint is of {len(stateless)} optimizers; use one of this recipe")
    for index, (optimizer, saved) in enumerate(zip(optimizers, saved_optimizers, strict=True)):
        key = "optimizer" if len(optimizers) == 1 else f"optimizer.{index}"
        types = [
            torch.float32 if name in wanted[model] else param.dtype
            for param, (model, name) in zip(owned_params(optimizer), owned.names[index], strict=True)
        ]
        fit = _OptimizerFit(
            optimizer, types, owned.probes[index], key, stateless[index], own=own, held=precision.state_dtype
        )
        fit.require(saved, added=precision.added_state)
        if "arm" in state:
            _require_settings(optimizer, saved, key, rates_stay=rates_stay, complete=own and _same_torch(state))
    _require_buffers(state, models)
    _require_precision(state, precision, own=own)


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


def _same_torch(state: Mapping[str, Any]) -> bool:
    """Return whether this torch wrote the state: another one may have fewer settings of an optimizer."""
    versions = state.get("versions")
    return isinstance(versions, Mapping) and versions.get("torch") == installed_version("torch")


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


class _OptimizerFit:
    """Checks the state dict of one optimizer."""

    def __init__(
        self,
        optimizer: Optimizer,
        types: Sequence[torch.dtype],
        probe: StateProbe,
        place: str,
        stateless: Sequence[int] | None,
        *,
        own: bool,
        held: torch.dtype | None = None,
    ) -> None:
        self.held = held
        self.stateless = stateless
        self.optimizer = optimizer
        self.types = types
        self.probe = probe
        self.place = place
        self.own = own

    def refuse(self, entry: str, text: str) -> NoReturn:
        raise CheckpointError(
            f"the optimizer of the checkpoint does not fit {type(self.optimizer).__name__}: {self.place}.{entry} "
            f"{text}; use one of this recipe"
        )

    def require(self, saved: Any, *, added: Sequence[str] = ()) -> None:
        """Check a state dict.

        Args:
            added: what the precision keeps in the state of 16-bit parameters, in their type.
        """
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
                names = added if param.dtype is not torch.float32 else ()
                self._added(entry, names, param, f"state.{number}")
                own_entry = {name: value for name, value in entry.items() if name not in names}
                self._entry(own_entry, at, param, f"state.{number}")

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

    def _added(self, entry: Mapping[Any, Any], names: Sequence[str], param: Tensor, place: str) -> None:
        for name in names:
            if name not in entry and self.own:
                self.refuse(place, f"has no {name}")
            if name in entry and (fault := unlike(entry[name], param.detach(), same_type=self.own)):
                self.refuse(f"{place}.{name}", fault)

    def _entry(self, entry: Mapping[Any, Any], at: int, param: Tensor, place: str) -> None:
        slots = self._slots(entry, at, param)
        for name in slots:
            if name not in entry:
                self.refuse(place, f"has no {name}")
        for name, value in entry.items():
            if name not in slots:
                if self.own or isinstance(value, Tensor):
                    self.refuse(f"{place}.{name}", "is not a state of it")
            elif isinstance(slots[name], Mapping):
                if fault := unlike(value, slots[name]):
                    self.refuse(f"{place}.{name}", fault)
            elif (wanted := slots[name]) is not None and wanted.dim():
                if value is None and not self.own:
                    continue
                # A step on fp32 copies leaves state in the type of the weights, whatever the optimizer would keep.
                narrow = isinstance(value, Tensor) and value.dtype is self.types[at]
                if wanted.shape == param.shape and (self.held is not None or narrow):
                    wanted = wanted.to(self.held or self.types[at])
                if fault := unlike(value, wanted, same_type=self.own):
                    self.refuse(f"{place}.{name}", fault)
            else:
                self._scalar(value, f"{place}.{name}", is_tensor=wanted is not None, counts=name == "step")

    def _slots(self, entry: Mapping[Any, Any], at: int, param: Tensor) -> dict[str, Any]:
        """Return the state that a parameter has on this run's ranks, by name, as `StateProbe.state_of` does."""
        slots = dict(self.probe.state_of(at, param.shape, self.types[at]))
        shapes = shard_shapes(param)
        if len(shapes) == 1 or not any(isinstance(value, Mapping) for value in (*slots.values(), *entry.values())):
            return slots
        # Which class a tensor is of may depend on the size of the part that a rank holds.
        parts = [self.probe.state_of(at, shape, self.types[at]) for shape in shapes]
        for name, slot in slots.items():
            of_ranks = [part[name] for part in parts]
            if any(map(is_flattened, of_ranks)):
                slots[name] = {TENSOR_SHARDS: of_ranks}
            elif is_flattened(slot):
                slots[name] = torch.empty(param.shape, dtype=of_ranks[0].dtype, device="meta")
        return slots

    def _scalar(self, value: Any, place: str, *, is_tensor: bool, counts: bool) -> None:
        """Check that a value is a number, and one of steps if it counts them."""
        if isinstance(value, Tensor):
            if value.numel() != 1 or (self.own and (value.dtype is not torch.float32 or value.dim())):
                self.refuse(place, f"is {value.dtype} of shape {list(value.shape)}, and a count of steps")
            value = value.item()
        elif self.own and is_tensor:
            self.refuse(place, f"is a {type(value).__name__} there and a tensor here")
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(place, f"is a {type(value).__name__}, and counts steps")
        if not counts and math.isfinite(value):
            return
        if not 0 <= value < 2**53 or value != int(value):
            self.refuse(place, f"is {value}, and counts steps")


def _require_settings(
    optimizer: Optimizer, saved: Mapping[str, Any], place: str, *, rates_stay: bool, complete: bool
) -> None:
    """Check that the settings of all groups are those of the recipe, which is the same.

    Args:
        complete: no setting may be missing.
    """
    for index, (there, here) in enumerate(zip(saved["param_groups"], optimizer.param_groups, strict=True)):
        for name, value in here.items():
            path = f"{place}.param_groups.{index}.{name}"
            if complete and name not in there:
                raise CheckpointError(f"{path} of the checkpoint is missing; take the checkpoint before it")
            if name == "params" or name not in there:
                continue
            saved_value = there[name]
            moves = name == "lr" and not rates_stay
            if moves and type(saved_value) is type(value) and _is_rate(saved_value):
                continue
            if moves or not _alike(saved_value, value):
                raise CheckpointError(
                    f"{path} is {_short(saved_value)} there and {_short(value)} here; resume with the settings that "
                    "the checkpoint was written with"
                )


def _is_rate(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0 and value.is_floating_point() and _is_rate(value.item())
    return isinstance(value, float) and math.isfinite(value) and value >= 0


def unlike(found: Any, wanted: Any, *, same_type: bool = True) -> str:
    """Return how a tensor differs in kind, shape or dtype; "" if it does not.

    Args:
        wanted: a tensor, what `plain_state` makes of a tensor subclass, or a dictionary of these; anything fits
            other values.
    """
    if isinstance(wanted, Mapping):
        compare = (
            _unlike_shards
            if TENSOR_SHARDS in wanted
            else _unlike_flattened
            if TENSOR_CLASS in wanted
            else _unlike_mapping
        )
        return compare(found, wanted)
    if not isinstance(wanted, Tensor):
        return ""
    if not isinstance(found, Tensor):
        return f"is {_kind_of(found)} there and a tensor here"
    if found.shape != wanted.shape:
        return f"is {list(found.shape)} there and {list(wanted.shape)} here"
    castable = found.is_floating_point() and wanted.is_floating_point() and not same_type
    if found.dtype is not wanted.dtype and not castable:
        return f"is {found.dtype} there and {wanted.dtype} here"
    return ""


def _unlike_shards(found: Any, wanted: Mapping[str, Any]) -> str:
    """Compare the parts of a sharded tensor, which are of as many ranks or do not fit."""
    parts = found.get(TENSOR_SHARDS) if isinstance(found, Mapping) else None
    if not isinstance(parts, list) or len(parts) != len(wanted[TENSOR_SHARDS]):
        return f"is {_kind_of(found)} there and {_kind_of(wanted)} here"
    faults = (unlike(part, each) for part, each in zip(parts, wanted[TENSOR_SHARDS], strict=True))
    return next((f"has a shard that {fault}" for fault in faults if fault), "")


def _unlike_flattened(found: Any, wanted: Mapping[str, Any]) -> str:
    """Compare what a tensor subclass is made of.

    Its dtype is what it shows to others; the types of the tensors that it holds do not depend on it.
    """
    if not is_flattened(found) or found[TENSOR_CLASS] != wanted[TENSOR_CLASS]:
        return f"is {_kind_of(found)} there and {_kind_of(wanted)} here"
    if set(found) != set(wanted):
        return f"lacks a part of {_kind_of(wanted)}"
    for name in ("shape", "stride", "attributes"):
        if not _made_alike(found[name], wanted[name]):
            return f"has {name} {_short(found[name])} there and {_short(wanted[name])} here"
    return _unlike_mapping(found["tensors"], wanted["tensors"])


def _unlike_mapping(found: Any, wanted: Mapping[str, Any]) -> str:
    if not isinstance(found, Mapping):
        return f"is {_kind_of(found)} there and {_kind_of(wanted)} here"
    if set(found) != set(wanted):
        return f"holds {_short(list(found))} there and {_short(list(wanted))} here"
    faults = ((name, unlike(found[name], inner)) for name, inner in wanted.items())
    return next((f"has {name}, which {fault}" for name, fault in faults if fault), "")


def _made_alike(found: Any, wanted: Any) -> bool:
    """Return whether two values are equal, where any floating dtype is as good as another."""
    if isinstance(wanted, list | tuple):
        same_size = isinstance(found, list | tuple) and len(found) == len(wanted)
        return same_size and all(_made_alike(one, other) for one, other in zip(found, wanted, strict=True))
    if isinstance(wanted, torch.dtype):
        return isinstance(found, torch.dtype) and found.is_floating_point == wanted.is_floating_point
    return _alike(found, wanted)


def _kind_of(value: Any) -> str:
    if is_flattened(value):
        return f"of class {str(value[TENSOR_CLASS]).rpartition('.')[2][:60]}"
    if isinstance(value, Mapping) and TENSOR_SHARDS in value:
        count = len(value[TENSOR_SHARDS]) if isinstance(value[TENSOR_SHARDS], list) else "some"
        return f"in shards of {count} ranks"
    return "a whole tensor" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _alike(found: Any, wanted: Any) -> bool:
    """Return whether two plain values or tensors are equal, of the same type."""
    if isinstance(wanted, list | tuple):
        same_size = isinstance(found, list | tuple) and len(found) == len(wanted)
        return same_size and all(_alike(one, other) for one, other in zip(found, wanted, strict=True))
    if isinstance(found, Tensor) or isinstance(wanted, Tensor):
        both = isinstance(found, Tensor) and isinstance(wanted, Tensor)
        return both and not unlike(found, wanted) and equal(found, wanted)
    numbers = isinstance(found, int | float) and isinstance(wanted, int | float)
    same_kind = isinstance(found, bool) == isinstance(wanted, bool) if numbers else type(found) is type(wanted)
    return same_kind and bool(found == wanted)


def _short(value: Any) -> str:
    """Return a value as a few words of a message."""
    text = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:59]}…"
