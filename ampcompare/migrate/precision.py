"""Rewrite the core of `apex.amp` for ampcompare's own contract, which keeps O2 and O3 and serves every other arm."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ampcompare.migrate.sites import Backward, Unsure
from ampcompare.source.syntax import dotted

if TYPE_CHECKING:
    from ampcompare.migrate.context import Core

__all__ = ["rewrite_for_precision"]


def rewrite_for_precision(core: Core) -> None:
    """Rewrite all but `amp.initialize`.

    Raises:
        Unsure: a scaler out of reach, or several.
    """
    tree, edits = core.tree, core.edits
    if core.scalers.home == "optimizer":
        node = (
            next((each.statement for each in core.sites.backwards), None)
            or ([*core.sites.masters, *core.sites.saves, *core.sites.loads][0])
        )
        raise Unsure(node, "amp.initialize is in another file; pass the precision from there by hand")
    if len(core.scalers.names) > 1:
        raise Unsure(core.sites.initializes[0].call, "several loss scalers; use ampcompare.apex, which has loss_id")
    precision = core.scaler(core.sites.initializes[0].call, None)
    for first, last in core.forward.regions:
        edits.wrap(first, last, f"with {precision}.autocast():")
    for backward in core.sites.backwards:
        if backward.block:
            edits.replace(_call(backward), f"{precision}.scale_loss({_arguments(core, backward)})")
    for step in core.sites.steps:
        edits.replace(step.call, f"{precision}.step({step.optimizer})")
    for call in core.sites.masters:
        edits.replace(call, f"{precision}.unscale({dotted(call.args[0])})")
    for call in (*core.sites.saves, *core.sites.loads):
        method = "state_dict" if call in core.sites.saves else "load_state_dict"
        _, end = tree.span(call.func)
        edits.replace(call, f"{precision}.{method}{tree.text[end : tree.span(call)[1]]}")


def _call(backward: Backward) -> ast.expr:
    assert isinstance(backward.statement, ast.With)
    return backward.statement.items[0].context_expr


def _arguments(core: Core, backward: Backward) -> str:
    tree = core.tree
    optimizers = backward.arguments["optimizers"]
    text = tree.source(optimizers)
    is_list = isinstance(optimizers, (ast.List, ast.Tuple)) or text.endswith("optimizers")
    parts = [tree.source(backward.loss), text if is_list else f"[{text}]"]
    for name in ("delay_unscale", "delay_overflow_check"):
        if name in backward.arguments:
            if name == "delay_overflow_check":
                raise Unsure(backward.statement, "delay_overflow_check is no option of the contract")
            parts.append(f"{name}={tree.source(backward.arguments[name])}")
    return ", ".join(parts)
