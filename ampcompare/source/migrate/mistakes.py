"""Which mistakes of a script `migrate` names next to what it rewrites: those of lint that change numbers."""

from __future__ import annotations

from ampcompare.source.lint.catalog import CODES
from ampcompare.source.lint.check import check_text
from ampcompare.source.lint.report import level_of

__all__ = ["find_mistakes"]


def find_mistakes(text: str) -> list[tuple[int, str, str]]:
    """Return line, code and message of what lint finds in a module: mistakes in numbers, those reported by default."""
    found = check_text(text, lambda code: level_of(code) == "error" and CODES[code].by_default)
    return [(each.line, each.code, each.message) for each in found]
