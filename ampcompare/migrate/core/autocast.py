"""Put the forward passes that were found under autocast."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ampcompare.migrate.core.context import Core

__all__ = ["note_missing_forward", "optimizer_near", "wrap_forward"]


def note_missing_forward(core: Core) -> None:
    """Note the losses whose forward pass is in another file, where the model does not cast by itself."""
    if core.sites.initializes:
        return
    context = "torch.autocast (migrate does that where it finds amp.initialize)"
    if core.target == "precision":
        context = "precision.autocast(), which only matters to arms other than those of Apex"
    for each in core.forward.missing:
        core.note(each.statement, f"the forward pass of this loss is in another file; it must run under {context}")


def wrap_forward(core: Core) -> None:
    """Put the forward passes that were found under autocast."""
    for first, last in core.forward.regions:
        core.edits.wrap(first, last, core.autocast(first, optimizer_near(core, first)))


def optimizer_near(core: Core, node: ast.AST) -> str | None:
    """Return an optimizer of the function around a node, else of the module."""
    function = core.tree.function(node)
    for backward in core.sites.backwards:
        if backward.optimizers and backward.function is function:
            return backward.optimizers[0]
    return core.sites.optimizers[0] if core.sites.optimizers else None
