"""Private state of Apex that scripts use: of optimizers where they resume, and of the loss scaler.

Methods of optimizers make fp32 copies of fp16 weights, or copy one to the other. Weights are fp32 under autocast:
nothing takes their place.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ampcompare.source.branches import facts_at
from ampcompare.source.migrate.read.sites import Unsure
from ampcompare.source.module import Module
from ampcompare.source.syntax import dotted_name, walk

if TYPE_CHECKING:
    from ampcompare.source.migrate.core.context import Core

__all__ = ["AMP_STATE", "INTERNALS", "NO_EQUIVALENT", "find_internals", "rewrite_internals"]

AMP_STATE = "apex.amp._amp_state"
STATE = ("_amp_stash", "_amp_scale_adjustment")
IDLE = ("_lazy_init_maybe_master_weights", "_amp_lazy_init", "_master_params_to_model_params", "_prepare_amp_backward")
NAMES = frozenset({*STATE, *IDLE, "_post_amp_backward"})
INTERNALS = re.compile(rf"\b(?:{'|'.join(sorted(NAMES))})\b")
NO_EQUIVALENT = "{0} is private to Apex, whose amp.initialize gave it to the optimizer; it has no equivalent"


def rewrite_internals(core: Core) -> None:
    """Remove the statements for which nothing is left to do.

    Raises:
        Unsure: another use.
    """
    uses = list(find_internals(core.module))
    by_hand = any(name == "_post_amp_backward" for _, name in uses)  # a backward pass of the script's own
    gone = {core.module.statement(node) for node, name in uses if _is_idle(core.module, node, name, by_hand)}
    for statement in gone:
        core.edits.remove(statement)
    for node, name in uses:
        if core.module.statement(node) not in gone and not _is_guarded(core.module, node, gone):
            raise Unsure(node, NO_EQUIVALENT.format(name))
    for use, meaning in core.names.uses:
        if meaning.startswith(AMP_STATE):
            raise Unsure(use, f"{meaning.removeprefix('apex.')} is internal to Apex, with no equivalent")


def find_internals(module: Module) -> Iterator[tuple[ast.expr, str]]:
    """Yield each use of what `amp.initialize` gives an optimizer, as attribute or by `getattr` without a default."""
    for node in module.nodes:
        name: object = None
        if isinstance(node, ast.Call) and dotted_name(node.func) == "getattr" and len(node.args) == 2:
            name = getattr(node.args[1], "value", None)
        elif isinstance(node, ast.Attribute):
            name = node.attr
        if name in NAMES and isinstance(node, ast.expr):
            yield node, str(name)


def _is_idle(module: Module, node: ast.expr, name: str, by_hand: bool) -> bool:
    """Return whether a statement does no more than make or copy master weights, or say that they are made."""
    statement, call = module.statement(node), module.parent(node)
    if name in IDLE and isinstance(statement, ast.Expr) and statement.value is call:
        return name != "_prepare_amp_backward" or not by_hand
    return (
        isinstance(statement, ast.Assign)
        and name in STATE
        and all(node in walk(target) and isinstance(target, ast.Attribute) for target in statement.targets)
        and not any(isinstance(each, ast.Call) for each in walk(statement.value))
    )


def _is_guarded(module: Module, node: ast.expr, gone: set[ast.stmt]) -> bool:
    """Return whether a use is in the test of an `if` that goes, or in the branch where there is such a thing."""
    around = (each for each in module.ancestors(node) if isinstance(each, ast.If))
    if any(all(each in gone for block in module.blocks(outer) for each in block) for outer in around):
        return True
    asked = [text for text, holds in facts_at(module, node).items() if holds is True]
    return any(f"'{name}'" in text for text in asked for name in NAMES)
