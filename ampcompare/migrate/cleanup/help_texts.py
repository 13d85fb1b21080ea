"""Help texts of options that speak of Apex."""

from __future__ import annotations

import ast
import re

from ampcompare.migrate.edits import Edits
from ampcompare.migrate.read.names import Names
from ampcompare.migrate.read.tree import Tree

__all__ = ["rewrite_texts"]

PHRASES = (
    (re.compile(r"\b(?:NVIDIA|NVidia|nvidia|Nvidia)(?:'s)? [Aa](?:pex|PEX)(?: (?:amp|AMP))?\b"), "torch.amp"),
    (re.compile(r"\b[Aa](?:pex|PEX)[ .](?:amp|AMP)\b"), "torch.amp"),
    (re.compile(r"https://nvidia\.github\.io/apex/amp\.html"), "https://docs.pytorch.org/docs/stable/amp.html"),
)


def rewrite_texts(tree: Tree, edits: Edits, names: Names) -> None:
    """Name torch.amp instead of Apex in the help of `add_argument` and of click options."""
    if not any(meaning.startswith("apex.amp") for _, meaning in names.uses):
        return
    for node in tree.nodes:
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name not in ("add_argument", "option", "argument"):
            continue
        for keyword in node.keywords:
            if keyword.arg == "help":
                old = tree.source(keyword.value)
                new = old
                for pattern, text in PHRASES:
                    new = pattern.sub(text, new)
                if new != old:
                    edits.replace(keyword.value, new)
