"""Rewrite `optimizer.step()` with scaled gradients: `scaler.step(optimizer)`, and `scaler.update()` after the last."""

from __future__ import annotations

import ast

from ampcompare.source.branches import is_exclusive
from ampcompare.source.migrate.core.context import Core
from ampcompare.source.migrate.read.sites import Step, Unsure
from ampcompare.source.module import Function
from ampcompare.source.roles import Roles
from ampcompare.source.syntax import dotted

__all__ = ["note_steps_apart", "rewrite_steps", "stepped_apart"]

APART = (
    "amp.initialize does not get {0}, so its gradients stay scaled, in a clip of all parameters too, as with Apex; if "
    "its parameters get gradients of the scaled loss, call scaler.unscale_({0}) and scaler.step({0})"
)


def rewrite_steps(core: Core) -> None:
    """Step each optimizer with scaled gradients by its scaler.

    Raises:
        Unsure: a step may follow torch.amp or Apex.
    """
    for step in core.sites.steps:
        if not _is_scaled(core, step.function, step.optimizer) or _is_first(core, step):
            continue
        if core.native:
            raise Unsure(step.call, "this step may follow torch.amp or Apex; remove the branch of Apex by hand")
        scaler = core.scaler(step.call, step.optimizer)
        core.edits.replace(step.call, f"{scaler}.step({', '.join([step.optimizer, *step.options])})")
        if core.order.updates.get(id(step.call), True):
            core.edits.after(_last(core, step), [f"{scaler}.update({core.update})"])


def stepped_apart(core: Core, function: Function | None) -> list[tuple[ast.Call, str]]:
    """Return the steps, below a scaled backward pass of a function, of optimizers that Apex has nothing to do with."""
    module, sites = core.module, core.sites
    known = {each.optimizer.rpartition(".")[2] for each in sites.steps}
    if any(each.function is function for each in sites.others):
        return []  # they have backward passes of their own
    passes = [each.statement for each in sites.backwards if each.scales and each.function is function]
    found, roles = [], Roles(module)
    for node, stepped in module.methods("step"):
        key = dotted(stepped)
        last = (key or "").rpartition(".")[2]
        if key is None or node.args or last in known or module.function(node) is not function:
            continue
        if roles.of(stepped, module.scope_of[node]) == "optimizer":
            if any(each.lineno < node.lineno and not is_exclusive(module, each, node) for each in passes):
                found.append((node, key))
    return found


def note_steps_apart(core: Core) -> None:
    """Note the optimizers that may step with gradients that are still scaled."""
    for function in dict.fromkeys(each.function for each in core.sites.backwards if each.scales):
        for call, key in stepped_apart(core, function):
            core.note(call, APART.format(key))


def _last(core: Core, step: Step) -> ast.stmt:
    """Return the statement to update the scale after: the `if` around the step, where others step above it anyway."""
    module = core.module
    name = core.scalers.name(step.optimizer)
    others = [
        each.statement
        for each in core.sites.steps
        if each.optimizer != step.optimizer and core.scalers.name(each.optimizer) == name
    ]
    found: ast.stmt = step.statement
    for outer in module.ancestors(step.statement):
        if not isinstance(outer, ast.If):
            break
        if any(each in others and each.lineno < outer.lineno for each in module.block(outer)):
            found = outer
    return found


def _is_first(core: Core, step: Step) -> bool:
    """Return whether a step comes before all backward passes of its function: GradScaler refuses such a step."""
    backwards = [each.statement for each in core.sites.backwards if each.function is step.function]
    around = [each for each in core.module.ancestors(step.statement) if isinstance(each, (ast.For, ast.While))]
    repeated = any(outer in core.module.ancestors(each) for outer in around for each in backwards)
    return bool(backwards) and not repeated and all(each.lineno > step.statement.lineno for each in backwards)


def _is_scaled(core: Core, function: Function | None, optimizer: str) -> bool:
    """Return whether a step uses scaled gradients: not where all backward passes of its function are plain ones."""
    if any(each.function is function for each in core.sites.backwards):
        return True
    return not any(core.module.function(call) is function for call, _ in core.module.methods("backward"))
