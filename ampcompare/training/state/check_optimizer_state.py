"""Check that the state of an optimizer in a checkpoint fits that of the run, entry by entry."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampcompare.base.errors import CheckpointError
from ampcompare.checkpoint.store.layout import TENSOR_SHARDS
from ampcompare.precision.base import owned_params
from ampcompare.tensors.sharded import shard_shapes
from ampcompare.training.state.flattened import is_flattened
from ampcompare.training.state.probe import StateProbe
from ampcompare.training.state.unlike import alike, short, unlike

__all__ = ["OptimizerFit", "require_settings"]


class OptimizerFit:
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


def require_settings(
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
            if moves or not alike(saved_value, value):
                raise CheckpointError(
                    f"{path} is {short(saved_value)} there and {short(value)} here; resume with the settings that the "
                    "checkpoint was written with"
                )


def _is_rate(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0 and value.is_floating_point() and _is_rate(value.item())
    return isinstance(value, float) and math.isfinite(value) and value >= 0
