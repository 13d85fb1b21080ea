"""In which order backward passes, reads of gradients and steps happen, across the functions of a module."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ampcompare.migrate.read.sites import Backward, Read, Sites, Step, Unsure
from ampcompare.source.module import Function, Module
from ampcompare.source.syntax import dotted

__all__ = ["Order", "find_order", "functions_by_name"]

MAX_DEPTH = 6


@dataclass
class Order:
    """What follows from the order of events.

    Attributes:
        updates: steps (by `id` of the call) after which the scale is updated.
        pending: optimizers whose gradients are scaled and not yet used, at each read (by `id` of its node).
    """

    updates: dict[int, bool] = field(default_factory=dict)
    pending: dict[int, tuple[str, ...]] = field(default_factory=dict)


def functions_by_name(module: Module) -> dict[str, list[Function]]:
    """Return the functions of a module by the key that a call has: `name`, or `self.name` for methods."""
    found: dict[str, list[Function]] = {}
    for node in module.nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            key = f"self.{node.name}" if module.class_of(node) is not None else node.name
            found.setdefault(key, []).append(node)
    return found


def find_order(module: Module, sites: Sites, group: Callable[[str], str]) -> Order:
    """Return the order of events.

    Args:
        group: the scaler of an optimizer.

    Raises:
        Unsure: a step is met in two orders that ask for different updates.
    """
    order = Order()
    local: dict[int, Backward | Step | Read] = {}
    for backward in sites.backwards:
        local[id(backward.statement if backward.call is None else backward.call)] = backward
    for step in sites.steps:
        local[id(step.call)] = step
    for read in sites.reads:
        local[id(read.node)] = read
    named = functions_by_name(module)
    per_function: dict[Function | None, list[Backward | Step | Read | str]] = {}
    for node in _in_order(module):
        event = local.get(id(node))
        function = module.function(node)
        if event is not None:
            per_function.setdefault(function, []).append(event)
        elif isinstance(node, ast.Call) and (key := dotted(node.func)) in named:
            per_function.setdefault(function, []).append(str(key))
    called = {event for events in per_function.values() for event in events if isinstance(event, str)}
    roots = [function for function in per_function if not _is_called(module, function, called)]
    for function in [*roots, *per_function]:
        events = list(_expand(function, per_function, named, 0))
        if function not in roots and all(id(each.call) in order.updates for each in events if isinstance(each, Step)):
            continue
        _simulate(events, order, sites, group)
    return order


def _in_order(module: Module) -> Iterator[ast.AST]:
    """Yield the nodes in the order of the text, a call after its arguments."""
    nodes = [node for node in module.nodes if isinstance(node, (ast.With, ast.Call, ast.Attribute, ast.Expr))]
    return iter(sorted(nodes, key=lambda node: (node.lineno, node.col_offset)))


def _is_called(module: Module, function: Function | None, called: set[str]) -> bool:
    if function is None:
        return False
    return (f"self.{function.name}" if module.class_of(function) is not None else function.name) in called


def _expand(
    function: Function | None,
    per_function: dict[Function | None, list[Backward | Step | Read | str]],
    named: dict[str, list[Function]],
    depth: int,
) -> Iterator[Backward | Step | Read]:
    for event in per_function.get(function, []):
        if not isinstance(event, str):
            yield event
        elif depth < MAX_DEPTH and len(named[event]) == 1 and named[event][0] is not function:
            yield from _expand(named[event][0], per_function, named, depth + 1)


def _beside(plain: Backward, sites: Sites) -> list[str]:
    """Return the optimizers of the blocks in the function of a plain backward pass, whose other branch it is."""
    near = [each for each in sites.backwards if each.scales and each.function is plain.function]
    return [key for each in near for key in each.optimizers]


def _simulate(events: list[Backward | Step | Read], order: Order, sites: Sites, group: Callable[[str], str]) -> None:
    pending: list[str] = []
    for index, event in enumerate(events):
        if isinstance(event, Backward):
            pending += [key for key in event.optimizers or _beside(event, sites) if key not in pending]
        elif isinstance(event, Read):
            if pending:
                order.pending[id(event.node)] = tuple(pending)
        else:
            tail = event.optimizer.rpartition(".")[2]
            if event.optimizer in pending:
                pending.remove(event.optimizer)
            else:
                pending = [key for key in pending if key.rpartition(".")[2] != tail]
            # What is never stepped in this order, such as a list of optimizers, must not hold the update back.
            later = {each.optimizer for each in events[index + 1 :] if isinstance(each, Step)}
            waits = any(key in later and group(key) == group(event.optimizer) for key in pending)
            if order.updates.setdefault(id(event.call), not waits) != (not waits):
                raise Unsure(event.call, "this step comes last in one place and not in another; split it in two")
