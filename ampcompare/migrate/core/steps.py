"""Rewrite `optimizer.step()` with scaled gradients: `scaler.step(optimizer)`, and `scaler.update()` after the last."""

from __future__ import annotations

import ast

from ampcompare.migrate.core.context import Core
from ampcompare.migrate.read.sites import Step, Unsure
from ampcompare.migrate.read.tree import Function

__all__ = ["rewrite_steps"]


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


def _last(core: Core, step: Step) -> ast.stmt:
    """Return the statement to update the scale after: the `if` around the step, where others step above it anyway."""
    tree = core.tree
    name = core.scalers.name(step.optimizer)
    others = [
        each.statement
        for each in core.sites.steps
        if each.optimizer != step.optimizer and core.scalers.name(each.optimizer) == name
    ]
    found: ast.stmt = step.statement
    for outer in tree.ancestors(step.statement):
        if not isinstance(outer, ast.If):
            break
        if any(each in others and each.lineno < outer.lineno for each in tree.block(outer)):
            found = outer
    return found


def _is_first(core: Core, step: Step) -> bool:
    """Return whether a step comes before all backward passes of its function: GradScaler refuses such a step."""
    backwards = [each.statement for each in core.sites.backwards if each.function is step.function]
    around = [each for each in core.tree.ancestors(step.statement) if isinstance(each, (ast.For, ast.While))]
    repeated = any(outer in core.tree.ancestors(each) for outer in around for each in backwards)
    return bool(backwards) and not repeated and all(each.lineno > step.statement.lineno for each in backwards)


def _is_scaled(core: Core, function: Function | None, optimizer: str) -> bool:
    """Return whether a step uses scaled gradients: not in a function that has plain backward passes only."""
    blocks = [each for each in core.sites.backwards if each.block]
    if any(each.function is function for each in blocks):
        return True
    tree = core.tree
    inside = [node for node in tree.nodes if isinstance(node, ast.Call) and tree.function(node) is function]
    return not any(isinstance(each.func, ast.Attribute) and each.func.attr == "backward" for each in inside)
