"""Parameters of a script's own functions that are always given the module `apex.amp`, and their removal."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from ampcompare.migrate.read.tree import Function, Tree

if TYPE_CHECKING:
    from ampcompare.migrate.edits import Edits

__all__ = ["Passed", "drop_passed", "find_passed"]

# The function, its parameter, and the argument of each call.
Passed: TypeAlias = tuple[Function, ast.arg, list[ast.expr]]


Meaning: TypeAlias = Callable[[ast.AST], str | None]


def find_passed(tree: Tree, imported: Callable[[str], str | None], meaning: Meaning) -> list[Passed]:
    """Return the parameters, in a file that is run as a script: no other file calls its functions.

    A function that initializes is left out: what it asks of the parameter before that has no equivalent.

    Args:
        imported: the full name in Apex of an imported name.
        meaning: the full name of an expression.
    """
    if not any(isinstance(node, ast.Constant) and node.value == "__main__" for node in tree.nodes):
        return []
    functions = [node for node in tree.module.body if isinstance(node, ast.FunctionDef) and not _initializes(node)]
    found: list[Passed] = []
    for function in functions:
        for parameter in (*function.args.args, *function.args.kwonlyargs):
            if imported(parameter.arg) != "apex.amp":
                continue
            arguments = _arguments(tree, meaning, function, parameter)
            if arguments:
                found.append((function, parameter, arguments))
    return found


def _initializes(function: ast.FunctionDef) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr == "initialize" for node in ast.walk(function))


def _arguments(tree: Tree, meaning: Meaning, function: ast.FunctionDef, parameter: ast.arg) -> list[ast.expr]:
    """Return the arguments of all calls if each is `apex.amp`, under the name that the parameter has; else none."""
    place = next((i for i, each in enumerate(function.args.args) if each is parameter), None)
    found: list[ast.expr] = []
    for node in tree.nodes:
        if not isinstance(node, ast.Name) or node.id != function.name:
            continue
        call = tree.parent(node)
        if not (isinstance(call, ast.Call) and call.func is node):
            return []
        if any(isinstance(each, ast.Starred) for each in call.args) or any(each.arg is None for each in call.keywords):
            return []
        given = [each.value for each in call.keywords if each.arg == parameter.arg]
        if place is not None and place < len(call.args):
            given.append(call.args[place])
        if len(given) != 1 or meaning(given[0]) != "apex.amp":
            return []
        found += given
    return found


def drop_passed(tree: Tree, edits: Edits, parameters: list[Passed]) -> None:
    """Remove the parameters and their arguments: the scaler is in reach of all functions."""
    for function, parameter, arguments in parameters:
        _drop(tree, edits, parameter, _default(function, parameter) or parameter)
        for argument in arguments:
            outer = tree.parent(argument)
            whole = outer if isinstance(outer, ast.keyword) else argument
            _drop(tree, edits, whole, whole)


def _default(function: Function, parameter: ast.arg) -> ast.expr | None:
    arguments = function.args
    if parameter in arguments.kwonlyargs:
        return arguments.kw_defaults[arguments.kwonlyargs.index(parameter)]
    place = arguments.args.index(parameter) - (len(arguments.args) - len(arguments.defaults))
    return arguments.defaults[place] if place >= 0 else None


def _drop(tree: Tree, edits: Edits, first: ast.AST, last: ast.AST) -> None:
    """Remove a member of a list with one of its commas."""
    start, end = tree.span(first)[0], tree.span(last)[1]
    rest = tree.text[end:]
    if rest.lstrip().startswith(","):
        comma = end + len(rest) - len(rest.lstrip()) + 1
        after = tree.text[comma:]
        blank = len(after) - len(after.lstrip(" "))
        edits.replace_span(start, comma + blank, "")
        return
    head = tree.text[:start].rstrip()
    edits.replace_span(len(head) - 1 if head.endswith(",") else start, end, "")
