"""Rewrite the core of `apex.amp` for ampcompare's own contract, which keeps O2 and O3 and serves every other arm."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ampcompare.migrate.core.autocast import note_missing_forward, wrap_forward
from ampcompare.migrate.core.state_dict import optimizer_of_state
from ampcompare.migrate.read.sites import Backward, Unsure
from ampcompare.source.syntax import dotted

if TYPE_CHECKING:
    from ampcompare.migrate.core.context import Core

__all__ = ["rewrite_for_precision"]


def rewrite_for_precision(core: Core) -> None:
    """Rewrite all but `amp.initialize`.

    Raises:
        Unsure: a scaler out of reach, or several.
    """
    tree, edits = core.tree, core.edits
    if len(core.scalers.names) > 1:
        raise Unsure(core.sites.initializes[0].call, "several loss scalers; use ampcompare.apex, which has loss_id")
    note_missing_forward(core)
    wrap_forward(core)
    for backward in core.sites.backwards:
        if backward.block:
            precision = core.scaler(backward.statement, backward.optimizers[0])
            edits.replace(_call(backward), f"{precision}.scale_loss({_arguments(core, backward)})")
    for step in core.sites.steps:
        if step.options:
            raise Unsure(step.call, "step of the contract takes no options; set them before it by hand")
        edits.replace(step.call, f"{core.scaler(step.call, step.optimizer)}.step({step.optimizer})")
    for call in core.sites.masters:
        key = dotted(call.args[0])
        edits.replace(call, f"{core.scaler(call, key)}.unscale({key})")
    for call in (*core.sites.saves, *core.sites.loads):
        method = "state_dict" if call in core.sites.saves else "load_state_dict"
        _, end = tree.span(call.func)
        precision = core.scaler(call, optimizer_of_state(core, call))
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
                raise Unsure(backward.statement, "delay_overflow_check is not an option of the contract")
            parts.append(f"{name}={tree.source(backward.arguments[name])}")
    return ", ".join(parts)
