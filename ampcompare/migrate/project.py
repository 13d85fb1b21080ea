"""Migrate files and folders; a file that cannot be read or parsed is reported and leaves the others alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path

from ampcompare.base.files.read import FileFault
from ampcompare.migrate.finding import BY_HAND
from ampcompare.migrate.read.neighbours import look_around
from ampcompare.migrate.rewrite import Migration, may_use_apex, migrate_text
from ampcompare.source.document import Document, parse_document, read_bytes, write_document
from ampcompare.source.find import find_sources
from ampcompare.source.syntax import SourceInvalid, parse_tree

__all__ = ["FileMigration", "find_files", "migrate_file"]

SIGNS = (b"apex", b"amp_C", b"\0")  # a null byte: text in UTF-16, or no text


@dataclass(frozen=True)
class FileMigration:
    """The result for a file.

    Attributes:
        path: of the file.
        document: None if it was not read, or cannot use Apex.
        migration: None if it was not parsed.
        fault: why it was not read or parsed, with the line; None if it was.
    """

    path: Path
    document: Document | None = None
    migration: Migration | None = None
    fault: str | None = None

    @property
    def changed(self) -> bool:
        """Whether the text is another one."""
        return self.document is not None and self.migration is not None and self.migration.text != self.document.text

    @property
    def by_hand(self) -> int:
        """How many lines are left by hand."""
        found = [] if self.migration is None else self.migration.findings
        return sum(each.kind == BY_HAND for each in found)

    def diff(self) -> str:
        """Return the change as a patch that `git apply` and `patch -p1` take."""
        if self.document is None or self.migration is None:
            return ""
        name = self.path.as_posix().removeprefix("./").lstrip("/")
        old, new = (text.splitlines(keepends=True) for text in (self.document.text, self.migration.text))
        lines = []
        for line in unified_diff(old, new, f"a/{name}", f"b/{name}"):
            lines.append(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")
        return "".join(lines)

    def lines(self) -> list[str]:
        """Return the findings, one per line: place, kind, message."""
        if self.fault is not None:
            return [f"{self.path}: not migrated: {self.fault}"]
        if self.document is None or self.migration is None:
            return []
        return [
            f"{self.path}:{self.document.place(each.line, each.column)}: {each.kind}: {each.message}"
            for each in self.migration.findings
        ]

    def write(self) -> None:
        """Replace the file in one move; it keeps its mode.

        Raises:
            FileFault: it may not be written.
        """
        if self.document is not None and self.migration is not None and self.changed:
            write_document(self.document, self.migration.text)


def find_files(paths: Iterable[str], *, unreadable: Callable[[Path, str], None] | None = None) -> Iterator[Path]:
    """Yield the Python files and notebooks below paths."""
    return find_sources(paths, unreadable=unreadable)


def migrate_file(path: Path, target: str = "torch", *, must_parse: bool = False) -> FileMigration:
    """Return what becomes of a file; nothing is written.

    Args:
        target: "torch" or "precision".
        must_parse: whether it must be Python even if it does not use Apex.
    """
    try:
        content = read_bytes(path)
        if not must_parse and not any(sign in content for sign in SIGNS):
            return FileMigration(path)
        document = parse_document(path, content)
    except FileFault as fault:
        return FileMigration(path, fault=str(fault))
    try:
        if must_parse and not may_use_apex(document.text):
            parse_tree(document.text)
            return FileMigration(path)
        around = look_around(path, document.text)
        return FileMigration(path, document, migrate_text(document.text, target, around))
    except SourceInvalid as error:
        where = f"line {document.place(error.line).line}: {error.kind}: " if error.line else ""
        return FileMigration(path, document, fault=f"{where}{error}")
    except RecursionError:
        return FileMigration(path, document, fault="nested too deeply")
    except ValueError as error:
        return FileMigration(path, document, fault=str(error))
