"""Private methods and state that `amp.initialize` gives to optimizers, which scripts use where they resume.

They make fp32 copies of fp16 weights, or copy one to the other. Weights are fp32 under autocast: nothing takes their
place.
"""

from __future__ import annotations

import ast
import re

from ampcompare.source.edits import Edits
from ampcompare.source.migrate.finding import BY_HAND, Finding
from ampcompare.source.module import Module
from ampcompare.source.syntax import walk

__all__ = ["INTERNALS", "drop_internals"]

STATE = ("_amp_stash", "_amp_scale_adjustment")
IDLE = ("_lazy_init_maybe_master_weights", "_amp_lazy_init", "_master_params_to_model_params", "_prepare_amp_backward")
NAMES = frozenset({*STATE, *IDLE, "_post_amp_backward"})
INTERNALS = re.compile(r"\.(?:" + "|".join(sorted(NAMES)) + r")\b")


def drop_internals(module: Module, edits: Edits, *, rewritten: bool) -> list[Finding]:
    """Remove the statements for which nothing is left to do, and return findings on other uses.

    Args:
        rewritten: whether `amp.initialize` is rewritten with the module, so that there are no fp16 weights.
    """
    uses = [node for node in module.nodes if isinstance(node, ast.Attribute) and node.attr in NAMES]
    gone = {module.statement(node) for node in uses if rewritten and _is_idle(module, node, uses)}
    for statement in gone:
        edits.remove(statement)
    return [
        Finding(
            node.lineno,
            node.col_offset,
            BY_HAND,
            f"{node.attr} is private to Apex, whose amp.initialize gave it to the optimizer; it has no equivalent",
        )
        for node in uses
        if module.statement(node) not in gone and not _is_guarded(module, node, gone)
    ]


def _is_idle(module: Module, node: ast.Attribute, uses: list[ast.Attribute]) -> bool:
    """Return whether a statement does no more than make or copy master weights, or say that they are made."""
    statement, call = module.statement(node), module.parent(node)
    if node.attr in IDLE and isinstance(statement, ast.Expr) and statement.value is call:
        by_hand = any(each.attr == "_post_amp_backward" for each in uses)  # a backward pass of the script's own
        return node.attr != "_prepare_amp_backward" or not by_hand
    return (
        isinstance(statement, ast.Assign)
        and node.attr in STATE
        and all(node in walk(target) and isinstance(target, ast.Attribute) for target in statement.targets)
        and not any(isinstance(each, ast.Call) for each in walk(statement.value))
    )


def _is_guarded(module: Module, node: ast.Attribute, gone: set[ast.stmt]) -> bool:
    """Return whether a use is in the test of an `if` that goes, or below a test whether there is such a thing."""
    for outer in (each for each in module.ancestors(node) if isinstance(each, ast.If)):
        if all(each in gone for block in module.blocks(outer) for each in block):
            return True
        if any(isinstance(each, ast.Constant) and each.value in NAMES for each in walk(outer.test)):
            return True
    return False
