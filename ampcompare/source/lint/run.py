"""Examine files, and correct them where that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

from ampcompare.base.errors import EnvironmentUnfit
from ampcompare.base.files.read import FileFault
from ampcompare.source.document import Document, read_document, write_document
from ampcompare.source.edits import apply_edits
from ampcompare.source.find import find_sources
from ampcompare.source.lint.check import check_text, is_of_interest
from ampcompare.source.lint.module import Finding
from ampcompare.source.lint.report import Located, Report, Unread
from ampcompare.source.lint.selection import Selection
from ampcompare.source.syntax import SourceInvalid, parse_tree

__all__ = ["find_files", "fix_text", "lint_files"]

MAX_PASSES = 8


def find_files(
    paths: Iterable[Path], selection: Selection, *, unreadable: Callable[[Path, str], None] | None = None
) -> Iterator[Path]:
    """Yield the Python files and notebooks below paths, without those that a selection excludes; see `find_sources`."""
    return find_sources(paths, exclude=selection.exclude, unreadable=unreadable)


def lint_files(
    files: Iterable[Path], selection: Selection, *, fix: bool = False, named: Collection[Path] = ()
) -> Report:
    """Return what is found in files; one that cannot be read does not keep the others from being examined.

    Args:
        files: Python files and notebooks.
        selection: which codes are reported.
        fix: whether to correct what surely can be, in the files; the report has what is left.
        named: files that must be Python, whether a rule has anything to say of them or not.
    """
    report = Report()
    for path in files:
        try:
            _lint_file(path, selection, fix, report, must_parse=path in named)
        except FileFault as error:
            report.unread.append(Unread(path, str(error)))
        except SourceInvalid as error:
            report.unread.append(Unread(path, f"{error.kind}: {error}" if error.line else str(error), error.line))
    return report


def _lint_file(path: Path, selection: Selection, fix: bool, report: Report, *, must_parse: bool) -> None:
    document = read_document(path)
    try:
        if must_parse and not is_of_interest(document.text):
            parse_tree(document.text)
        findings = check_text(document.text, selection.reports)
    except SourceInvalid as error:
        line = document.place(error.line).line if error.line else 0
        raise SourceInvalid(str(error), line) from None
    report.files += 1
    if fix and any(finding.edits for finding in findings):
        text, left, fixed = fix_text(document.text, findings, selection)
        try:
            write_document(document, text)
            report.fixed += fixed
            document = _with_text(document, text)
            findings = left
        except (FileFault, EnvironmentUnfit) as error:
            report.unread.append(Unread(path, f"cannot be corrected: {error}"))
    for finding in findings:
        place = document.place(finding.line, finding.column)
        report.findings.append(Located(path, place, finding.code, finding.message, bool(finding.edits)))


def _with_text(document: Document, text: str) -> Document:
    return read_document(document.path) if document.cells is not None else document


def fix_text(text: str, findings: list[Finding], selection: Selection) -> tuple[str, list[Finding], int]:
    """Return a corrected text, the findings that are left, and how many were corrected.

    A set of edits whose result does not parse, or has as many findings as before, is not made.
    """
    fixed = 0
    for _ in range(MAX_PASSES):
        candidates = [finding.edits for finding in findings if finding.edits]
        for groups in (candidates, *([group] for group in candidates)):
            corrected, _ = apply_edits(text, groups)
            try:
                parse_tree(corrected)
                left = check_text(corrected, selection.reports)
            except SourceInvalid:
                continue
            if len(left) < len(findings):
                fixed += len(findings) - len(left)
                text, findings = corrected, left
                break
        else:
            break
    return text, findings, fixed
