"""Functions that scale a loss for an optimizer that they are given, and that is stepped by their callers."""

from __future__ import annotations

from ampcompare.source.calls import parameters
from ampcompare.source.migrate.finding import Unsure
from ampcompare.source.migrate.read.neighbours import Around
from ampcompare.source.migrate.read.sites import Backward, Initialize, Sites
from ampcompare.source.module import Module
from ampcompare.source.syntax import dotted

__all__ = ["find_helped"]


def find_helped(module: Module, sites: Sites, around: Around) -> bool:
    """Return whether such a function is in the module, so that the optimizer must carry the scaler to it.

    Raises:
        Unsure: no step is seen, or it may stay as it is.
    """
    stepped = {_tail(each.optimizer) for each in sites.steps}
    helped = False
    for backward in sites.backwards:
        for key in backward.optimizers:
            if _tail(key) in stepped:
                continue
            if not _is_parameter(backward, key) or not (_steps_all(sites.initializes, stepped) or around.steps):
                raise Unsure(
                    backward.statement,
                    f"no {key}.step() is in this file; it must become scaler.step({key}) together with this block",
                )
            helped = True
    return helped


def _is_parameter(backward: Backward, key: str) -> bool:
    return backward.function is not None and key in parameters(backward.function)


def _steps_all(initializes: list[Initialize], stepped: set[str]) -> bool:
    """Return whether a module initializes, and steps all that it initializes."""
    keys: list[str | None] = []
    for each in initializes:
        value = each.arguments.get("optimizers")
        keys += [dotted(one) for one in getattr(value, "elts", [value])]
    return bool(keys) and all(key is not None and _tail(key) in stepped for key in keys)


def _tail(key: str) -> str:
    return key.rpartition(".")[2]
