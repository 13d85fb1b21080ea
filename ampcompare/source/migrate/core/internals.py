"""Private state of Apex that scripts use: of optimizers where they resume, and of the loss scaler.

Methods of optimizers make fp32 copies of fp16 weights, or copy one to the other. Weights are fp32 under autocast:
nothing takes their place.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ampcompare.source.branches import conditions_around, facts_at
from ampcompare.source.migrate.read.order import find_order
from ampcompare.source.migrate.read.sites import Read, Unsure
from ampcompare.source.module import Module
from ampcompare.source.syntax import dotted, walk

if TYPE_CHECKING:
    from ampcompare.source.migrate.core.context import Core

__all__ = ["AMP_STATE", "INTERNALS", "NO_EQUIVALENT", "find_internals", "rewrite_internals"]

AMP_STATE = "apex.amp._amp_state"
STATE = ("_amp_stash", "_amp_scale_adjustment")
IDLE = ("_lazy_init_maybe_master_weights", "_amp_lazy_init", "_master_params_to_model_params", "_prepare_amp_backward")
NAMES = frozenset({*STATE, *IDLE, "_post_amp_backward"})
INTERNALS = re.compile(rf"\b(?:{'|'.join(sorted(NAMES))})\b")
NO_EQUIVALENT = "{0} is private to Apex, whose amp.initialize gave it to the optimizer; it has no equivalent"
POKED = (
    "the loss scale is set while gradients are scaled by the one before: GradScaler would divide them by the new one; "
    "set it below the step"
)


def rewrite_internals(core: Core) -> None:
    """Remove the statements for which nothing is left to do, and read or set the loss scale by its scaler.

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
            _rewrite_loss_scale(core, use, meaning)


def find_internals(module: Module) -> Iterator[tuple[ast.expr, str]]:
    """Yield each use of what `amp.initialize` gives an optimizer, as attribute or by `getattr` without a default."""
    for node in module.nodes:
        name: object = None
        if isinstance(node, ast.Call) and dotted(node.func) == "getattr" and len(node.args) == 2:
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


def _rewrite_loss_scale(core: Core, node: ast.expr, meaning: str) -> None:
    """Rewrite `amp._amp_state.loss_scalers[0].loss_scale()`, or what reads or sets its `_loss_scale`."""
    module, scaler = core.module, core.only_scaler()
    subscript = module.parent(node)
    attribute, statement = module.parent(subscript), module.statement(node)
    if meaning == f"{AMP_STATE}.loss_scalers" and isinstance(subscript, ast.Subscript) and scaler is not None:
        call = module.parent(attribute)
        if isinstance(attribute, ast.Attribute) and attribute.attr == "loss_scale" and isinstance(call, ast.Call):
            core.edits.replace(call, f"{scaler}.get_scale()")
            return
        if isinstance(attribute, ast.Attribute) and attribute.attr == "_loss_scale":
            if isinstance(attribute.ctx, ast.Load):
                core.edits.replace(attribute, f"{scaler}.get_scale()")
                return
            if isinstance(statement, ast.Assign) and statement.targets == [attribute]:
                core.sites.reads.append(Read(attribute, statement, module.function(node), ()))
                scaled = id(attribute) in find_order(module, core.sites, core.scalers.name).pending
                if scaled or _accumulates(core, node):
                    raise Unsure(node, POKED)
                state = f'{{**{scaler}.state_dict(), "scale": {module.source(statement.value)}}}'
                core.edits.replace_statement(statement, [f"{scaler}.load_state_dict({state})"])
                return
    raise Unsure(node, f"{meaning.removeprefix('apex.')} is internal to Apex, with no equivalent")


def _accumulates(core: Core, node: ast.AST) -> bool:
    """Return whether a loop around a place steps in some rounds only: gradients of earlier rounds may be there."""
    module = core.module
    loop = next((each for each in module.within_function(node) if isinstance(each, (ast.For, ast.While))), None)
    tests = conditions_around(module, node, loop)
    steps = [each.statement for each in core.sites.steps if loop is not None and module.is_in(each.statement, [loop])]
    return any(conditions_around(module, each, loop) - tests for each in steps)
