"""Source as LibCST trees, with names resolved through imports. This file needs LibCST, the extra `migrate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import libcst as cst
from libcst import metadata

from ampcompare.source.syntax import SourceInvalid, parse_tree

__all__ = ["NameResolver", "SourceInvalid", "dotted", "parse_module"]


def parse_module(text: str) -> cst.Module:
    """Return the tree of a module.

    Raises:
        SourceInvalid: it is not Python 3, or nested too deep.
    """
    parse_tree(text)  # LibCST's parser ends the process where nesting is too deep
    try:
        return cst.parse_module(text)
    except cst.ParserSyntaxError as error:
        raise SourceInvalid(" ".join(error.message.split()), error.raw_line) from None
    except RecursionError:
        raise SourceInvalid("nested too deep") from None


class NameResolver:
    """Full names of expressions, by the imports that are in force where they stand.

    Guarded imports (`try: from apex import amp` / `except ImportError: amp = None`), imports inside functions, `import
    apex`, `from apex import amp as mp`, star imports of modules whose names are given, and relative scopes are
    followed. A name that a parameter or a local assignment of another value hides has no full name.

    Args:
        wrapper: of the module; the nodes that are asked about are those of `wrapper.module`.
        stars: names that `from MODULE import *` brings, by module.
    """

    def __init__(self, wrapper: metadata.MetadataWrapper, stars: Mapping[str, Sequence[str]] | None = None) -> None:
        self._scopes: Mapping[cst.CSTNode, metadata.Scope | None] = wrapper.resolve(metadata.ScopeProvider)
        self._stars: dict[str, str] = {}
        for node in wrapper.module.body:
            for small in node.body if isinstance(node, cst.SimpleStatementLine) else ():
                if isinstance(small, cst.ImportFrom) and isinstance(small.names, cst.ImportStar):
                    module = "" if small.module is None else dotted(small.module) or ""
                    self._stars.update({name: f"{module}.{name}" for name in (stars or {}).get(module, ())})

    def name_of(self, node: cst.CSTNode) -> str | None:
        """Return the full name, such as `apex.amp.initialize`, or None where no import leads there."""
        names = self.names_of(node)
        return next(iter(sorted(names))) if names else None

    def names_of(self, node: cst.CSTNode) -> set[str]:
        """Return every full name that guarded imports allow for an expression."""
        text = dotted(node)
        if text is None:
            return set()
        head, _, rest = text.partition(".")
        scope = self._scopes.get(_innermost(node)) or self._scopes.get(node)
        if scope is None:
            return set()
        found = {
            name.name
            for name in scope.get_qualified_names_for(node)
            if name.source is metadata.QualifiedNameSource.IMPORT
        }
        if not found and head in self._stars and not scope[head]:
            return {f"{self._stars[head]}.{rest}" if rest else self._stars[head]}
        return found


def dotted(node: cst.CSTNode) -> str | None:
    """Return `a.b.c` as text, without a call's parentheses; None for any other expression."""
    if isinstance(node, cst.Call):
        return dotted(node.func)
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        above = dotted(node.value)
        return None if above is None else f"{above}.{node.attr.value}"
    return None


def _innermost(node: cst.CSTNode) -> cst.CSTNode:
    while True:
        if isinstance(node, cst.Call):
            node = node.func
        elif isinstance(node, cst.Attribute):
            node = node.value
        else:
            return node
