"""Rewrite the blocks of `amp.scale_loss`, and plain backward passes that feed the same step: `scaler.scale(loss)`."""

from __future__ import annotations

import ast

from ampcompare.migrate.core.autocast import optimizer_near
from ampcompare.migrate.core.context import Core
from ampcompare.migrate.read.sites import Backward, Unsure
from ampcompare.migrate.read.tree import Tree

__all__ = ["rewrite_backwards"]


def rewrite_backwards(core: Core) -> None:
    """Scale the loss of each backward pass by its scaler.

    Raises:
        Unsure: gradients are clipped or stepped inside of a block, or a loss has no name.
    """
    for backward in core.sites.backwards:
        _backward(core, backward)


def _optimizer_of(core: Core, backward: Backward) -> str | None:
    """Return the optimizer of a plain backward pass: that of the nearest block in its function."""
    if backward.optimizers:
        return backward.optimizers[0]
    blocks = [each for each in core.sites.backwards if each.scales and each.function is backward.function]
    near = min(blocks, key=lambda each: abs(each.statement.lineno - backward.statement.lineno), default=None)
    return near.optimizers[0] if near is not None and near.optimizers else optimizer_near(core, backward.statement)


def _backward(core: Core, backward: Backward) -> None:
    tree, edits, statement = core.tree, core.edits, backward.statement
    if backward in core.consumed:
        return
    loss = tree.source(backward.loss)
    inline: list[str] = []
    if backward in core.forward.inline:
        inline = [core.autocast(statement, _optimizer_of(core, backward)), f"{tree.unit}loss = {loss}"]
        loss = "loss"
    if backward.call is not None:  # the other file scales
        if inline:
            edits.before(statement, inline)
            edits.replace(backward.loss, loss)
        return
    scaler = core.scaler(statement, _optimizer_of(core, backward))
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
        if other is not None and not other.scales and ast.unparse(other.loss) == ast.unparse(backward.loss):
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
