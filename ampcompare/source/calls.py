"""The arguments of a call, and the parameters of a function, by name."""

from __future__ import annotations

import ast
from collections.abc import Sequence

__all__ = ["HIDDEN", "argument", "arguments", "is_literal", "last_name", "parameters", "passed"]

HIDDEN = {"*", "**"}  # of what has no name where it is given


def argument(call: ast.Call, name: str, position: int | None = None) -> ast.expr | None:
    """Return the value of an argument, by keyword or by position; None where it is not given, or behind a `*`."""
    for one in call.keywords:
        if one.arg == name:
            return one.value
    if position is not None and len(call.args) > position:
        value = call.args[position]
        return None if isinstance(value, ast.Starred) else value
    return None


def arguments(call: ast.Call, names: Sequence[str] = ()) -> dict[str, ast.expr]:
    """Return the arguments of a call by name; what stands behind `*` or `**` is under one of `HIDDEN`.

    Args:
        names: of the positional parameters.
    """
    found: dict[str, ast.expr] = {}
    for name, value in zip(names, call.args, strict=False):
        if isinstance(value, ast.Starred):
            break
        found[name] = value
    if any(isinstance(value, ast.Starred) for value in call.args):
        found["*"] = next(value for value in call.args if isinstance(value, ast.Starred))
    return found | {one.arg or "**": one.value for one in call.keywords}


def passed(call: ast.Call) -> list[ast.expr]:
    """Return the values of all arguments of a call."""
    return [*call.args, *(one.value for one in call.keywords)]


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef, *, positional: bool = False) -> list[str]:
    """Return the names of the parameters of a function, without those with a star.

    Args:
        positional: only those that can be given by position.
    """
    given = function.args
    return [each.arg for each in (*given.posonlyargs, *given.args, *(() if positional else given.kwonlyargs))]


def last_name(node: ast.AST) -> str:
    """Return the last part of the name of a function or object, such as `step`; empty for any other expression."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def is_literal(node: ast.expr | None, value: object) -> bool:
    """Return whether an expression is a literal of a value: `None`, `True`, `False`, a number or text."""
    return isinstance(node, ast.Constant) and type(node.value) is type(value) and node.value == value
