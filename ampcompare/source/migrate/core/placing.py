"""Where the object that replaces `amp.initialize` is bound, and how long calls are written."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ampcompare.source.migrate.read.sites import Initialize
from ampcompare.source.module import Function, Module

if TYPE_CHECKING:
    from ampcompare.source.migrate.core.context import Core

__all__ = ["call_lines", "conditions_of", "declare_global"]

MAX_LENGTH = 100  # of a line; longer calls get a line for each argument


def conditions_of(module: Module, initialize: Initialize) -> list[ast.If]:
    """Return the `if` statements around a call, the innermost first, up to its function or loop."""
    found = []
    for outer in module.ancestors(initialize.statement):
        if isinstance(outer, ast.If):
            found.append(outer)
        elif isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef, ast.For, ast.While, ast.ClassDef)):
            break
    return found


def call_lines(core: Core, function: str, arguments: list[str]) -> list[str]:
    text = f"{function}({', '.join(arguments)})"
    if len(text) <= MAX_LENGTH and "\n" not in text:
        return [text]
    return [f"{function}(", *(f"{core.module.unit}{each}," for each in arguments), ")"]


def declare_global(core: Core, function: Function | None) -> None:
    """Make the scaler a global variable: a default at the top of the module, and `global` in the function."""
    assert function is not None
    module, edits, scalers = core.module, core.edits, core.scalers
    if function not in core.declared:
        core.declared.add(function)
        body = function.body
        first = body[1] if _is_docstring(body[0]) and len(body) > 1 else body[0]
        edits.before(first, [f"global {', '.join(scalers.names)}"])
    if len(core.declared) == 1 and not core.has_global:
        core.has_global = True
        default = [f"{name} = {core.off}" for name in scalers.names]
        outermost = module.outermost(function)
        first_use = next(
            each for each in module.tree.body if isinstance(each, (ast.FunctionDef, ast.ClassDef)) or each is outermost
        )
        edits.before(first_use, [f"{default[0]}  # {function.name} sets it", *default[1:], "", ""])


def _is_docstring(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )
