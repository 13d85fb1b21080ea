"""Which expressions are surely True or False: `torch.autocast(enabled=...)` takes nothing else."""

from __future__ import annotations

import ast

from ampcompare.migrate.read.tree import Tree

__all__ = ["as_bool"]

FUNCTIONS = {"bool", "hasattr", "isinstance", "callable"}


def as_bool(tree: Tree, text: str) -> str:
    """Return an expression with `bool(...)` around it, unless it is one already."""
    return text if _is_bool(ast.parse(text, mode="eval").body, _flags(tree)) else f"bool({text})"


def _is_bool(node: ast.expr, flags: set[str]) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, bool)
    if isinstance(node, ast.BoolOp):
        return all(_is_bool(each, flags) for each in node.values)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS
    if isinstance(node, (ast.Name, ast.Attribute)):
        return (node.attr if isinstance(node, ast.Attribute) else node.id) in flags
    return isinstance(node, ast.Compare) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not))


def _flags(tree: Tree) -> set[str]:
    """Return names that the file makes boolean: options with `store_true`, annotations, assignments."""
    found: set[str] = set()
    for node in tree.nodes:
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            given = {each.arg: each.value for each in node.keywords}
            action = given.get("action")
            if isinstance(action, ast.Constant) and action.value in ("store_true", "store_false"):
                names = [each.value for each in (*node.args, given.get("dest")) if isinstance(each, ast.Constant)]
                found |= {str(name).lstrip("-").replace("-", "_") for name in names}
        elif isinstance(node, ast.arg | ast.AnnAssign):
            if isinstance(node.annotation, ast.Name) and node.annotation.id == "bool":
                target = node.arg if isinstance(node, ast.arg) else getattr(node.target, "id", "")
                found.add(str(target))
    return found
