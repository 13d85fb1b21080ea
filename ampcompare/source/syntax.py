"""Parse source with Python's own parser, which says what is wrong and where; dotted names in its trees."""

from __future__ import annotations

import ast
import warnings

__all__ = ["SourceInvalid", "dotted", "parse_tree"]


class SourceInvalid(ValueError):
    """A text that is not Python 3, in one line.

    Attributes:
        line: from 1, where the parser stopped; 0 where it does not say.
    """

    def __init__(self, message: str, line: int = 0) -> None:
        super().__init__(message)
        self.line = line


def parse_tree(text: str) -> ast.Module:
    """Return the syntax tree of a module.

    Raises:
        SourceInvalid: it is not Python 3, or nested too deep.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes such as "\d"
            return ast.parse(text)
    except SyntaxError as error:
        raise SourceInvalid(" ".join(error.msg.split()), error.lineno or 0) from None
    except (RecursionError, MemoryError):
        raise SourceInvalid("nested too deep") from None
    except ValueError as error:  # such as a null byte
        raise SourceInvalid(str(error)) from None


def dotted(node: ast.AST | None) -> str | None:
    """Return `a.b.c` as text for a name or a chain of attributes; None for any other expression."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return ".".join([node.id, *reversed(parts)])
