"""Private methods and state that `amp.initialize` gives to optimizers, which scripts use where they resume.

They make fp32 copies of fp16 weights, or copy one to the other. Weights are fp32 under autocast: nothing takes their
place.
"""

from __future__ import annotations

import ast
import re

from ampcompare.source.branches import facts_at
from ampcompare.source.edits import Edits
from ampcompare.source.migrate.finding import BY_HAND, Finding
from ampcompare.source.module import Module
from ampcompare.source.syntax import dotted, walk

__all__ = ["INTERNALS", "drop_internals"]

STATE = ("_amp_stash", "_amp_scale_adjustment")
IDLE = ("_lazy_init_maybe_master_weights", "_amp_lazy_init", "_master_params_to_model_params", "_prepare_amp_backward")
NAMES = frozenset({*STATE, *IDLE, "_post_amp_backward"})
INTERNALS = re.compile(rf"\b(?:{'|'.join(sorted(NAMES))})\b")


def drop_internals(module: Module, edits: Edits, *, rewritten: bool) -> list[Finding]:
    """Remove the statements for which nothing is left to do, and return findings on other uses.

    Args:
        rewritten: whether `amp.initialize` is rewritten with the module, so that there are no fp16 weights.
    """
    uses = [(node, name) for node in module.nodes if (name := _internal(node)) is not None]
    by_hand = any(name == "_post_amp_backward" for _, name in uses)  # a backward pass of the script's own
    gone = {module.statement(node) for node, name in uses if rewritten and _is_idle(module, node, name, by_hand)}
    for statement in gone:
        edits.remove(statement)
    return [
        Finding(
            node.lineno,
            node.col_offset,
            BY_HAND,
            f"{name} is private to Apex, whose amp.initialize gave it to the optimizer; it has no equivalent",
        )
        for node, name in uses
        if module.statement(node) not in gone and not _is_guarded(module, node, gone)
    ]


def _internal(node: ast.AST) -> str | None:
    """Return the private name that an attribute has, or `getattr` without a default asks for."""
    name: object = node.attr if isinstance(node, ast.Attribute) else None
    if isinstance(node, ast.Call) and dotted(node.func) == "getattr" and len(node.args) == 2:
        name = getattr(node.args[1], "value", None)
    return str(name) if name in NAMES else None


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
