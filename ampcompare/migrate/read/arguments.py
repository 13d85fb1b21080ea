"""The arguments of a call of Apex, as far as a module shows them."""

from __future__ import annotations

import ast

from ampcompare.migrate.finding import Unsure
from ampcompare.migrate.read.options import entries, lookups
from ampcompare.migrate.read.tree import Tree, walk

__all__ = ["bind", "members", "unknown_options"]

# Options that torch.amp has nothing for, so that it does not matter whether a run gives them.
WITHOUT_TWIN = frozenset({"keep_batchnorm_fp32", "master_weights", "verbosity"})


def bind(call: ast.Call, names: tuple[str, ...], tree: Tree | None = None) -> dict[str, ast.expr]:
    """Return the arguments of a call by name.

    Args:
        tree: to look up the dict of `**options` in; without it such a call is refused.
    """
    spread = [each.value for each in call.keywords if each.arg is None]
    bound = dict(zip(names, call.args, strict=False))
    bound |= {str(each.arg): each.value for each in call.keywords if each.arg is not None}
    options = None
    if tree is not None and len(spread) == 1:
        options = entries(tree, spread[0], WITHOUT_TWIN) or lookups(tree, spread[0], bound)
    if any(isinstance(each, ast.Starred) for each in call.args) or (spread and options is None):
        raise Unsure(call, "its arguments are passed as * or **, so they cannot be seen here; write them out")
    bound |= options or {}
    unknown = next((name for name in bound if name not in names), None)
    if unknown is not None:
        raise Unsure(call, f"Apex has no argument {unknown}")
    return bound


def unknown_options(tree: Tree, call: ast.Call) -> ast.expr | None:
    """Return the dict behind `**` in a call if only a run knows what it holds."""
    spread = [each.value for each in call.keywords if each.arg is None]
    return spread[0] if spread and entries(tree, spread[0], WITHOUT_TWIN) is None else None


def members(tree: Tree, value: ast.expr) -> list[ast.expr]:
    """Return the elements of a list, or of all lists that a local variable is bound to; else the value alone."""
    if isinstance(value, (ast.List, ast.Tuple)):
        return list(value.elts)
    if not isinstance(value, ast.Name):
        return [value]
    found: dict[str, ast.expr] = {}
    for node in walk(tree.function(value) or tree.module):
        if not isinstance(node, ast.Name) or node.id != value.id or node is value:
            continue
        bound = tree.parent(node)
        if isinstance(bound, ast.Assign) and bound.targets == [node] and isinstance(bound.value, (ast.List, ast.Tuple)):
            found |= {tree.source(each): each for each in bound.value.elts}
        elif isinstance(node.ctx, ast.Store) or isinstance(bound, ast.Attribute):
            return [value]  # it is another list, or `append` changes it
    return list(found.values()) or [value]
