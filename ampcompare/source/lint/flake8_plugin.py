"""The rules as a plugin of flake8, which finds it by its entry point."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from ampcompare.base.version import __version__
from ampcompare.source.lint.check import check_text
from ampcompare.source.syntax import SourceInvalid
from ampcompare.source.versions import known_versions

__all__ = ["Flake8Plugin"]


class Flake8Plugin:
    """What flake8 makes of each file; flake8 itself knows `# noqa` and which codes are wanted.

    Args:
        tree: of the file.
        lines: of the file, with their newlines.
    """

    name = "ampcompare"
    version = __version__

    def __init__(self, tree: ast.AST, lines: Sequence[str]) -> None:
        self._text = "".join(lines)

    def run(self) -> Iterator[tuple[int, int, str, type[Flake8Plugin]]]:
        """Yield line, column and text of each finding."""
        try:
            findings = check_text(self._text, versions=known_versions())
        except SourceInvalid:  # flake8 says so itself
            return
        for finding in findings:
            yield finding.line, finding.column, f"{finding.code} {finding.message}", type(self)
