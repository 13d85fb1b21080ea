"""Settings that follow from others: parallel kind, batch size of a process, learning rate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeGuard

from pydantic import BaseModel

from ampcompare.backends.arm import Arm
from ampcompare.base.errors import AmpCompareError
from ampcompare.settings.recipe import Recipe
from ampcompare.settings.task_defaults import with_task_defaults

__all__ = ["with_derived"]


def with_derived(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a `RunConfig` with those that follow from others filled in; the model fills in the rest.

    Raises:
        ValueError: two settings that determine each other have contradictory values.
    """
    values = dict(values)
    processes = values.get("processes", 1)
    recipe = _given(values.get("recipe"))
    if not isinstance(processes, int) or processes < 1 or recipe is None:
        return values
    recipe = with_task_defaults(recipe)
    kind = _parallel_of(values.get("arm")) or ("ddp" if processes > 1 else "")
    parallel = _given(values.get("parallel"))
    if kind and parallel is not None:
        values["parallel"] = {"kind": kind, **parallel}
    total = recipe.get("global_batch_size")
    if isinstance(total, int) and total > 0:
        if total % processes:
            raise ValueError(f"a total batch of {total} cannot be split over {processes} processes")
        if recipe.setdefault("batch_size", total // processes) != total // processes:
            raise ValueError(
                f"a total batch of {total} on {processes} processes is {total // processes} for each, but batch_size "
                f"is {recipe['batch_size']}; give only one of them"
            )
    batch_size = recipe.get("batch_size", Recipe.model_fields["batch_size"].default)
    given_optimizer = _given(recipe.get("optimizer"))
    optimizer: dict[str, Any] = {} if given_optimizer is None else given_optimizer
    base: Any = optimizer.get("lr_base")
    base_batch: Any = optimizer.get("lr_base_batch", 256)
    if _is_positive(base) and _is_positive(base_batch) and _is_positive(batch_size):
        ratio = batch_size * processes / base_batch
        lr = base * (math.sqrt(ratio) if optimizer.get("lr_rule") == "sqrt" else ratio)
        given = optimizer.setdefault("lr", lr)
        if isinstance(given, (int, float)) and not math.isclose(given, lr, rel_tol=1e-9):
            raise ValueError(
                f"lr_base {base} gives lr {lr:g} for a total batch of {batch_size * processes}, but lr is {given}; "
                f"give only one of them"
            )
        recipe["optimizer"] = optimizer
    if recipe:
        values["recipe"] = recipe
    return values


def _parallel_of(arm: Any) -> str:
    """Return the parallel kind that an arm implies; "" if none, or if it is not an arm."""
    if arm is None:
        return ""
    try:
        return (arm if isinstance(arm, Arm) else Arm.parse(str(arm))).spec.parallel
    except AmpCompareError:  # reported where the arm is checked
        return ""


def _is_positive(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and value > 0


def _given(group: Any) -> dict[str, Any] | None:
    """Return what was given of a group of settings, as a copy; None where it is not a group."""
    if group is None:
        return {}
    if isinstance(group, BaseModel):
        return {name: getattr(group, name) for name in group.model_fields_set}
    return dict(group) if isinstance(group, Mapping) else None
