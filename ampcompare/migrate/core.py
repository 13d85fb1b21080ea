"""Rewrite the core of `apex.amp` for `torch.amp`: initialize, scale_loss, steps, gradients that are read, state."""

from __future__ import annotations

import ast

from ampcompare.migrate.carried import name_carried
from ampcompare.migrate.casting import note_missing_forward, optimizer_near, wrap_forward
from ampcompare.migrate.context import Core
from ampcompare.migrate.create import create_scalers
from ampcompare.migrate.edits import Edits
from ampcompare.migrate.evaluation import cast_evaluation
from ampcompare.migrate.finding import Finding
from ampcompare.migrate.forward import find_forward
from ampcompare.migrate.given_optimizers import find_helped
from ampcompare.migrate.names import Names
from ampcompare.migrate.native import check_native
from ampcompare.migrate.neighbours import Around
from ampcompare.migrate.order import find_order
from ampcompare.migrate.passed import drop_passed
from ampcompare.migrate.precision import rewrite_for_precision
from ampcompare.migrate.reads import place_unscale
from ampcompare.migrate.scalers import plan_scalers
from ampcompare.migrate.sites import Backward, Initialize, Sites, Step, Unsure, collect_sites
from ampcompare.migrate.state import rewrite_state
from ampcompare.migrate.timm_scaler import rewrite_timm, uses_timm_scaler
from ampcompare.migrate.tree import Function, Tree
from ampcompare.source.syntax import dotted

__all__ = ["rewrite_core"]


def rewrite_core(tree: Tree, names: Names, edits: Edits, torch: str, target: str, around: Around) -> list[Finding]:
    """Rewrite the core of a module, all of it.

    Args:
        around: what other modules have to do with it.

    Raises:
        Unsure: something cannot be rewritten surely; the edits are incomplete then and must not be used.
    """
    sites = collect_sites(tree, names)
    if not (sites.initializes or sites.backwards or sites.masters or sites.saves or sites.loads):
        return []
    _refuse(tree, names, sites)
    helped = find_helped(tree, sites, around)
    native = check_native(tree, names, sites)
    scalers = plan_scalers(tree, sites, "scaler" if target == "torch" else "precision", across=around.across or helped)
    order = find_order(tree, sites, scalers.name)
    core = Core(tree, names, edits, torch, target, sites, scalers, order, find_forward(tree, names, sites))
    core.native = native
    core.across, core.helped = around.across or helped, helped
    if target == "torch" and uses_timm_scaler(tree, sites):
        rewrite_timm(core)
        return core.findings
    create_scalers(core)
    name_carried(core)
    if target == "precision":
        if names.parameters:
            raise Unsure(names.parameters[0][1], "apex.amp is passed as a value; what is called on it cannot be seen")
        rewrite_for_precision(core)
        return core.findings
    note_missing_forward(core)
    wrap_forward(core)
    cast_evaluation(core)
    place_unscale(core)
    for backward in sites.backwards:
        _backward(core, backward)
    _steps(core)
    rewrite_state(core)
    drop_passed(tree, edits, names.parameters)
    return core.findings


def _refuse(tree: Tree, names: Names, sites: Sites) -> None:
    for initialize in sites.initializes if not sites.backwards else []:
        _refuse_library(tree, initialize)
    for use, name in names.uses:
        if name in ("apex", "apex.amp") and id(use) not in names.passed and _is_passed_on(tree, use):
            raise Unsure(use, f"{name} is passed as a value; what is called on it cannot be seen")
    for node in tree.nodes:
        if isinstance(node, ast.Attribute) and node.attr in ("scale_loss", "master_params"):
            if names.meaning(node) is None and isinstance(tree.parent(node), ast.Call):
                raise Unsure(node, f"{node.attr} is called on something that may be apex.amp or not")


def _refuse_library(tree: Tree, initialize: Initialize) -> None:
    """Refuse a trainer that inherits its backward pass from the one of transformers, which calls Apex itself."""
    holder = tree.class_of(initialize.function)
    bases = {dotted(base) for base in holder.bases} if holder is not None else set()
    for node in tree.nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "transformers" and not node.level:
            if any(alias.name == "Trainer" and (alias.asname or alias.name) in bases for alias in node.names):
                raise Unsure(
                    initialize.call,
                    "the backward pass is in transformers.Trainer, which is not migrated; let it use torch.amp, by the "
                    "arguments of the Trainer, and remove this branch by hand",
                )


def _is_passed_on(tree: Tree, node: ast.AST) -> bool:
    """Return whether a name of a module is used as a value, other than in a test for `None`."""
    parent = tree.parent(node)
    if isinstance(getattr(node, "ctx", None), ast.Store) or isinstance(parent, (ast.Compare, ast.Global)):
        return False
    return not (isinstance(parent, (ast.If, ast.BoolOp, ast.IfExp, ast.UnaryOp)))


# backward, step


def _optimizer_of(core: Core, backward: Backward) -> str | None:
    """Return the optimizer of a plain backward pass: that of the nearest block in its function."""
    if backward.optimizers:
        return backward.optimizers[0]
    blocks = [each for each in core.sites.backwards if each.block and each.function is backward.function]
    near = min(blocks, key=lambda each: abs(each.statement.lineno - backward.statement.lineno), default=None)
    return near.optimizers[0] if near is not None and near.optimizers else optimizer_near(core, backward.statement)


def _backward(core: Core, backward: Backward) -> None:
    tree, edits, statement = core.tree, core.edits, backward.statement
    if backward in core.consumed:
        return
    scaler = core.scaler(statement, _optimizer_of(core, backward))
    loss = tree.source(backward.loss)
    inline: list[str] = []
    if backward in core.forward.inline:
        inline = [core.autocast(statement, _optimizer_of(core, backward)), f"{tree.unit}loss = {loss}"]
        loss = "loss"
    if not backward.block:
        if inline:
            raise Unsure(statement, "the forward pass is inside the call of backward; give the loss a name")
        edits.replace(backward.loss, f"{scaler}.scale({loss})")
        return
    assert isinstance(statement, ast.With)
    if "delay_overflow_check" in backward.arguments:
        core.note(statement, "delay_overflow_check has no equivalent: GradScaler checks at the step")
    _refuse_inside(core, statement)
    uses = [
        node
        for node in tree.nodes
        if isinstance(node, ast.Name)
        and node.id == backward.name
        and tree.function(node) is backward.function
        and isinstance(node.ctx, ast.Load)
    ]
    inside = [node for node in uses if statement in tree.ancestors(node)]
    others = [
        each
        for each in core.sites.backwards
        if each is not backward and each.name == backward.name and each.function is backward.function
    ]
    later = [
        node
        for node in uses
        if node not in inside and not any(each.statement in tree.ancestors(node) for each in others)
    ]
    if len(inside) == 1 and not later and _backward_receiver(tree, inside[0]):
        call = tree.parent(tree.parent(inside[0]))
        _maybe_collapse(core, backward, statement, call, scaler, loss, inline)
        return
    header = [*inline, f"{backward.name} = {scaler}.scale({loss})"] if backward.name else inline
    edits.unwrap(statement, statement.body, header)


def _backward_receiver(tree: Tree, name: ast.Name) -> bool:
    attribute = tree.parent(name)
    return isinstance(attribute, ast.Attribute) and attribute.attr == "backward"


def _maybe_collapse(
    core: Core, backward: Backward, statement: ast.With, call: ast.AST, scaler: str, loss: str, inline: list[str]
) -> None:
    """Inline the scaled loss; where the other branch of an `if` is the plain backward pass, the `if` goes."""
    tree, edits = core.tree, core.edits
    assert isinstance(call, ast.Call)
    assert isinstance(call.func, ast.Attribute)
    branch = tree.parent(statement)
    alone = len(statement.body) == 1 and isinstance(statement.body[0], ast.Expr) and statement.body[0].value is call
    _, end = tree.span(call.func)
    scaled = f"{scaler}.scale({loss}).backward{tree.text[end : tree.span(call)[1]]}"
    if isinstance(branch, ast.If) and alone and len(branch.body) == 1 and len(branch.orelse) == 1:
        pair = {branch.body[0], branch.orelse[0]} - {statement}
        other = next((each for each in core.sites.backwards if each.statement in pair), None)
        if other is not None and not other.block and ast.unparse(other.loss) == ast.unparse(backward.loss):
            core.consumed.append(other)
            lines = [*inline, scaled]
            if tree.text.startswith("elif", tree.span(branch)[0]):
                lines = ["else:", *(f"{tree.unit}{each}" for each in lines)]
            edits.replace_statement(branch, lines)
            return
    edits.replace(call.func.value, f"{scaler}.scale({loss})")
    edits.unwrap(statement, statement.body, inline)


def _refuse_inside(core: Core, statement: ast.With) -> None:
    for read in core.sites.reads:
        if statement in core.tree.ancestors(read.statement) and isinstance(read.node, ast.Call):
            raise Unsure(
                read.node,
                "gradients are still scaled inside the block of scale_loss, so this clips almost everything; move it "
                "below the block",
            )
    for step in core.sites.steps:
        if statement in core.tree.ancestors(step.statement):
            raise Unsure(step.call, "the step is inside the block of scale_loss, where gradients are still scaled")


def _steps(core: Core) -> None:
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
