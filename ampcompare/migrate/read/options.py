"""Look up the dict that a call gets as `**options`."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from ampcompare.migrate.read.tree import Tree
from ampcompare.source.syntax import dotted

__all__ = ["UNSEEN", "entries", "lookups"]

UNSEEN = ast.Constant(...)  # stands for a value that only some runs give
# What the rewriting asks of a dict of options that only a run knows; the defaults are those of amp.initialize.
ASKED = {"enabled": '.get("enabled", True)', "opt_level": '.get("opt_level", "O1")', "loss_scale": '.get("loss_scale")'}


def entries(tree: Tree, options: ast.expr, optional: frozenset[str]) -> dict[str, ast.expr] | None:
    """Return the entries of a dict that one statement above makes; None if something else may change it.

    What it holds is evaluated there and used at the call, so a name in it must not be bound again in between.

    Args:
        options: what stands behind `**`.
        optional: keys that may also be set in between; their value is `UNSEEN`.
    """
    if isinstance(options, (ast.Dict, ast.Call)):
        return _literal(options)
    if not isinstance(options, ast.Name):
        return None
    scope = tree.function(options) or tree.module
    found: dict[str, ast.expr] | None = None
    later: set[str] = set()
    for node in ast.walk(scope):
        if not isinstance(node, ast.Name) or node.id != options.id or node is options:
            continue
        parent = tree.parent(node)
        if isinstance(parent, ast.Assign) and parent.targets == [node] and found is None:
            found = _literal(parent.value)
            if found is None or not _runs_before(tree, parent, options) or _rebinds(scope, parent, options):
                return None
        elif isinstance(parent, ast.Subscript) and isinstance(parent.ctx, ast.Store) and parent.value is node:
            key = parent.slice.value if isinstance(parent.slice, ast.Constant) else None
            if key not in optional or not isinstance(tree.parent(parent), ast.Assign):
                return None
            later.add(str(key))
        else:
            return None
    return None if found is None else found | dict.fromkeys(later, UNSEEN)


def lookups(tree: Tree, options: ast.expr, given: Iterable[str]) -> dict[str, ast.expr] | None:
    """Return look-ups in a dict that only a run knows, such as one of a configuration; None where it has no plain name.

    Args:
        options: what stands behind `**`.
        given: arguments of the call that the dict cannot hold.
    """
    if dotted(options) is None:
        return None
    text = tree.source(options)
    return {name: tree.make(f"{text}{lookup}") for name, lookup in ASKED.items() if name not in given}


def _literal(value: ast.expr) -> dict[str, ast.expr] | None:
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "dict":
        known = not value.args and all(each.arg is not None for each in value.keywords)
        return {str(each.arg): each.value for each in value.keywords} if known else None
    if not isinstance(value, ast.Dict):
        return None
    keys = [each.value for each in value.keys if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    return dict(zip(keys, value.values, strict=True)) if len(keys) == len(value.keys) else None


def _runs_before(tree: Tree, statement: ast.stmt, use: ast.expr) -> bool:
    """Return whether a statement always runs before a use: it stands above, in a block around the use."""
    around = [tree.statement(use), *tree.ancestors(tree.statement(use))]
    return statement.lineno < use.lineno and any(each in around for each in tree.block(statement))


def _rebinds(scope: ast.AST, statement: ast.Assign, use: ast.expr) -> bool:
    read = {each.id for each in ast.walk(statement.value) if isinstance(each, ast.Name)}
    return any(
        isinstance(each, ast.Name)
        and isinstance(each.ctx, ast.Store)
        and each.id in read
        and statement.lineno < each.lineno < use.lineno
        for each in ast.walk(scope)
    )
