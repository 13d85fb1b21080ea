"""Functions that O1 and autocast cast differently, where a module calls them."""

from __future__ import annotations

import ast

from ampcompare.migrate.finding import NOTE, Finding
from ampcompare.migrate.read.names import Names
from ampcompare.migrate.read.tree import Tree

__all__ = ["DIFFERENT", "cast_notes"]

# By name: what O1 does, what autocast does.
DIFFERENT = {
    "gelu": ("fp32", "the type of the input"),
    "std": ("fp32", "the type of the input"),
    "var": ("fp32", "the type of the input"),
    "softmax": ("the type of the input", "fp32"),
    "log_softmax": ("the type of the input", "fp32"),
    "log1p": ("the type of the input", "fp32"),
    "logsumexp": ("the type of the input", "fp32"),
    "cdist": ("the type of the input", "fp32"),
    "square": ("the type of the input", "fp32"),  # a pow, to autocast
    "einsum": ("the type of the input", "fp16"),
    "scaled_dot_product_attention": ("the type of the input", "fp16"),
}
ONLY_FUNCTIONAL = ("gelu",)
NOT_FUNCTIONAL = ("softmax", "log_softmax")  # O1 lists those of torch.nn.functional, and no others


def cast_notes(tree: Tree, names: Names) -> list[Finding]:
    """Return one note for each function with other casts, at its first call."""
    if not any(meaning == "apex.amp.initialize" for _, meaning in names.uses):
        return []
    found: dict[str, Finding] = {}
    for node in tree.nodes:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name = node.func.attr
        if name not in DIFFERENT or name in found:
            continue
        meaning = names.meaning(node.func) or ""
        functional = meaning.startswith("torch.nn.functional.")
        if name in ONLY_FUNCTIONAL and not functional:
            continue
        if functional and name in NOT_FUNCTIONAL:
            continue
        if not meaning.startswith("torch.") and name in ("std", "var", "einsum", "cdist", "square"):
            continue  # may be of numpy
        before, after = DIFFERENT[name]
        found[name] = Finding(
            node.lineno, node.col_offset, NOTE, f"{name}: O1 computes it in {before}, autocast in {after}"
        )
    return list(found.values())
