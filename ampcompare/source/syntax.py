"""Parse source with Python's own parser, which says what is wrong and where; dotted names in its trees."""

from __future__ import annotations

import ast
import sys
import warnings

__all__ = ["SourceInvalid", "dotted", "parse_tree"]


# What Python's parser says of statements that Python 2 had.
PYTHON_2 = (
    "Missing parentheses in call to",
    "inconsistent use of tabs",
    "leading zeros in decimal integer literals",
    "multiple exception types must be parenthesized",
)


class SourceInvalid(ValueError):
    """A text that is not Python 3, in one line.

    Attributes:
        line: from 1, where the parser stopped; 0 where it does not say.
        kind: "not Python 3, but Python 2", or that this version of Python cannot parse it: its syntax may be newer.
    """

    def __init__(self, message: str, line: int = 0) -> None:
        super().__init__(message)
        self.line = line
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        self.kind = "not Python 3, but Python 2" if message.startswith(PYTHON_2) else f"not Python {version}"


def parse_tree(text: str) -> ast.Module:
    """Return the syntax tree of a module.

    Raises:
        SourceInvalid: it is not Python 3, or nested too deeply.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes such as "\d"
            return ast.parse(text)
    except SyntaxError as error:
        raise SourceInvalid(" ".join(error.msg.split()), error.lineno or 0) from None
    except (RecursionError, MemoryError):
        raise SourceInvalid("nested too deeply") from None
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
