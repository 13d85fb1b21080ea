"""Which places of a function run under which tests, and whether two of them never run together."""

from __future__ import annotations

import ast
from itertools import product

from ampcompare.migrate.read.tree import Tree
from ampcompare.source.syntax import dotted

__all__ = ["conditions_around", "is_exclusive"]


def conditions_around(tree: Tree, node: ast.AST, within: ast.AST | None = None) -> set[str]:
    """Return the tests, as text, under which a node runs in each round of a loop, or in its function."""
    found = set()
    below = node
    for outer in tree.ancestors(node):
        if outer is within:
            break
        if isinstance(outer, ast.If):
            positive = any(each is below for each in outer.body)
            found.add(ast.unparse(outer.test) if positive else f"not ({ast.unparse(outer.test)})")
        below = outer
    return found


def is_exclusive(tree: Tree, one: ast.AST, other: ast.AST) -> bool:
    """Return whether two places never run together: a test of one is the opposite of a test of the other."""
    pairs = product(_parts(conditions_around(tree, one)), _parts(conditions_around(tree, other)))
    return any(_opposes(first, second) or _opposes(second, first) for first, second in pairs)


def _parts(tests: set[str]) -> set[str]:
    """Return tests together with those that `and` joins in them."""
    found = set(tests)
    for text in tests:
        test = ast.parse(text, mode="eval").body
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
            found |= {ast.unparse(each) for each in test.values}
    return found


def _opposes(first: str, second: str) -> bool:
    if second == f"not ({first})":
        return True
    asked = [_constant(text) for text in (first, second)]
    return None not in asked and asked[0][0] == asked[1][0] and asked[0][1] != asked[1][1]  # type: ignore[index]


def _constant(text: str) -> tuple[str, str] | None:
    """Return the two sides of a test such as `mode == "apex"` or `kind == Kind.APEX`; None for any other test."""
    test = ast.parse(text, mode="eval").body
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], ast.Eq):
        return None
    right = test.comparators[0]
    name = (dotted(right) or "").rpartition(".")[2]
    return (ast.unparse(test.left), ast.unparse(right)) if isinstance(right, ast.Constant) or name.isupper() else None
