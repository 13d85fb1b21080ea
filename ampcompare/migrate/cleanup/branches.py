"""Join the branches of an `if` that the rewriting has made equal, such as those for Apex and for fp32."""

from __future__ import annotations

import ast

from ampcompare.migrate.edits import Edits
from ampcompare.migrate.read.tree import Tree

__all__ = ["join_branches"]

MARKS = (".scale(", ".unscale_(", ".scale_loss(", ".get_scale()")


def join_branches(text: str) -> str:
    """Return a rewritten module without the `if` statements whose two branches scale a loss and are equal."""
    while any(mark in text for mark in MARKS):
        tree = Tree(text)
        equal = [node for node in tree.nodes if isinstance(node, ast.If) and _is_equal(tree, node)]
        if not equal:
            break
        edits = Edits(tree)
        for branch in equal:
            if not any(outer in equal for outer in tree.ancestors(branch)):
                edits.unwrap(branch, branch.orelse)
        text = edits.result()
    return text


def _is_equal(tree: Tree, node: ast.If) -> bool:
    if not node.orelse or any(isinstance(each, (ast.Call, ast.NamedExpr)) for each in ast.walk(node.test)):
        return False
    if tree.text.startswith("elif", tree.span(node)[0]) or len(node.body) != len(node.orelse):
        return False
    if isinstance(node.orelse[0], ast.If) and tree.text.startswith("elif", tree.span(node.orelse[0])[0]):
        return False
    if not any(mark in tree.source(node.body[0]) for mark in MARKS):
        return False
    return [ast.dump(each) for each in node.body] == [ast.dump(each) for each in node.orelse]
