"""Put the forward passes that were found under autocast."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ampcompare.source.calls import passed
from ampcompare.source.syntax import dotted

if TYPE_CHECKING:
    from ampcompare.source.migrate.core.context import Core

__all__ = ["note_handed_on", "note_missing_forward", "optimizer_near", "wrap_forward"]


def note_missing_forward(core: Core) -> None:
    """Note the losses whose forward pass is in another file, where the model does not cast by itself."""
    if core.sites.initializes:
        return
    context = "torch.autocast (migrate does that where it finds amp.initialize)"
    if core.target == "precision":
        context = "precision.autocast(), which only matters to arms other than those of Apex"
    for each in core.forward.missing:
        core.note(each.statement, f"the forward pass of this loss is in another file; it must run under {context}")


def note_handed_on(core: Core) -> None:
    """Note the calls of functions of other files that get a loss with an optimizer, and may scale it."""
    known = {key.rpartition(".")[2] for key in core.sites.optimizers} | {
        each.optimizer.rpartition(".")[2] for each in core.sites.steps
    }
    followed = {id(each.call) for each in core.sites.backwards}
    for node in core.module.calls:
        if id(node) in followed or core.names.meaning(node.func) is not None:
            continue
        key = dotted(node.func)
        given = [dotted(each) or "" for each in passed(node)]
        if (
            key is None
            or key in core.module.functions
            or not any(each.rpartition(".")[2] in known for each in given if each)
        ):
            continue
        if any("loss" in each.rpartition(".")[2].lower() for each in given):
            core.note(
                node,
                f"{key} gets the loss and the optimizer, and is no function of this file; if it scales the loss, the "
                "forward pass must run under torch.autocast here, or in the model",
            )


def wrap_forward(core: Core) -> None:
    """Put the forward passes that were found under autocast."""
    for first, last in core.forward.regions:
        core.edits.wrap(first, last, core.autocast(first, optimizer_near(core, first)))


def optimizer_near(core: Core, node: ast.AST) -> str | None:
    """Return an optimizer of the function around a node, else of the module."""
    function = core.module.function(node)
    for backward in core.sites.backwards:
        if backward.optimizers and backward.function is function:
            return backward.optimizers[0]
    return core.sites.optimizers[0] if core.sites.optimizers else None
