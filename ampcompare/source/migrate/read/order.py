"""In which order backward passes, reads of gradients and steps happen, across the functions of a module."""

import ast
from dataclasses import dataclass, field

from ampcompare.source.call_order import DEFINITIONS, CallFollower, Frame
from ampcompare.source.migrate.read.sites import Backward, Read, Sites, Step, Unsure
from ampcompare.source.module import Module, Scope
from ampcompare.source.syntax import dotted_name


@dataclass
class Order:
    """What follows from the order of events.

    Attributes:
        updates: steps (by `id` of the call) after which the scale is updated.
        scaled: steps (by `id` of the call) that a backward pass for their optimizer precedes.
        pending: optimizers whose gradients are scaled and not yet used, at each read (by `id` of its node).
    """

    updates: dict[int, bool] = field(default_factory=dict)
    scaled: set[int] = field(default_factory=set)
    pending: dict[int, tuple[str, ...]] = field(default_factory=dict)


def find_order(module: Module, sites: Sites) -> Order:
    """Return the order of events."""
    order = Order()
    events = _Events(module, sites)
    called = {dotted_name(call.func) for call in module.calls}
    by_key = [(key, module.scope_from[each]) for key, named in module.functions.items() for each in named]
    scopes = [module.top, *(scope for _, scope in by_key)]
    roots = [module.top, *(scope for key, scope in by_key if key not in called)]
    for scope in [*roots, *(each for each in scopes if each not in roots)]:
        found = events.of(scope)
        if scope not in roots and all(id(each.call) in order.updates for each in found if isinstance(each, Step)):
            continue
        _simulate(found, order, sites)
    return order


class _Events(CallFollower):
    """The events of a function, with those of the functions that it calls."""

    kinds = (ast.Call, ast.Attribute)
    apart = (*DEFINITIONS, ast.Name, ast.Constant)

    def __init__(self, module: Module, sites: Sites) -> None:
        super().__init__(module)
        self._local: dict[int, Backward | Step | Read] = {}
        self._scaling = {each.function for each in sites.backwards if module.class_of(each.function) is not None}
        for backward in sites.backwards:
            self._local[id(backward.node)] = backward
        for step in sites.steps:
            self._local[id(step.call)] = step
        for read in sites.reads:
            self._local[id(read.node)] = read

    def of(self, scope: Scope) -> list[Backward | Step | Read]:
        """Return the events of a function or of the module."""
        self._found: list[Backward | Step | Read] = []
        self.follow(scope)
        return self._found

    def reach(self, node: ast.AST, statement: ast.stmt, frame: Frame) -> None:
        event = self._local.get(id(node))
        if event is not None:
            self._found.append(event)
        elif isinstance(node, ast.Call):
            self.inline(node.func, frame, node)

    def callee(self, node: ast.expr, frame: Frame) -> Scope | None:
        """Return also a method that only another class has: one of a base, or of an object that scales a loss."""
        found, call = super().callee(node, frame), self.module.parent(node)
        named = self.module.functions.get(dotted_name(node) or "", []) if found is None else []
        if found is None and not named and isinstance(node, ast.Attribute) and isinstance(call, ast.Call) and call.args:
            named = [each for each in self._scaling if each is not None and each.name == node.attr]
        return self.module.scope_from[named[0]] if len(named) == 1 else found


def _beside(plain: Backward, sites: Sites) -> list[str]:
    """Return the optimizers of the blocks in the function of a plain backward pass, whose other branch it is."""
    near = [each for each in sites.backwards if each.block and each.function is plain.function]
    return [key for each in near for key in each.optimizers]


def _simulate(events: list[Backward | Step | Read], order: Order, sites: Sites) -> None:
    pending: list[str] = []
    for index, event in enumerate(events):
        if isinstance(event, Backward):
            pending += [key for key in event.optimizers or _beside(event, sites) if key not in pending]
        elif isinstance(event, Read):
            if pending:
                order.pending[id(event.node)] = tuple(pending)
        else:
            tail = event.optimizer.rpartition(".")[2]
            if any(key.rpartition(".")[2] == tail for key in pending):
                order.scaled.add(id(event.call))
            if event.optimizer in pending:
                pending.remove(event.optimizer)
            else:
                pending = [key for key in pending if key.rpartition(".")[2] != tail]
            # What is never stepped in this order, such as a list of optimizers, must not hold the update back.
            later = {each.optimizer for each in events[index + 1 :] if isinstance(each, Step)}
            waits = any(key in later for key in pending)
            if order.updates.setdefault(id(event.call), not waits) != (not waits):
                raise Unsure(event.call, "this step comes last in one place and not in another; split it in two")
