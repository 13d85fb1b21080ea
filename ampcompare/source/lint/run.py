"""Examine files for the codes that the command line or pyproject.toml selects, and correct them where asked to."""

import contextlib
import functools
import gc
import tomllib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ampcompare.base.errors import ConfigError, EnvironmentUnfit, suggestion_text
from ampcompare.base.files.read import FileFault, read_text
from ampcompare.source.document import read_document, write_document
from ampcompare.source.edits import apply_edits
from ampcompare.source.lint.catalog import CODES
from ampcompare.source.lint.check import check_text, rules_that_may_match
from ampcompare.source.lint.read.module import Finding
from ampcompare.source.lint.report import LocatedFinding, Report, UnreadFile
from ampcompare.source.lint.share_work import map_files
from ampcompare.source.syntax import SourceInvalid, parse_tree
from ampcompare.source.versions import LATEST, Versions

KEYS = ("select", "ignore", "exclude")
TABLE = "tool.ampcompare.lint"
MAX_PASSES = 8


@dataclass(frozen=True)
class LintSelection:
    """What is reported, and which files are left out.

    Attributes:
        select: prefixes of codes; empty for all codes.
        ignore: prefixes of codes. Of two prefixes that fit a code the longer one decides, of equal ones this.
        exclude: patterns of files and folders.
        versions: of the libraries that the files are for; the newest by default.

    Raises:
        ConfigError: a prefix of no code.
    """

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    versions: Versions = LATEST

    def __post_init__(self) -> None:
        for prefix in (*self.select, *self.ignore):
            if not any(code.startswith(prefix) for code in CODES):
                raise ConfigError(f"no lint code begins with {prefix!r}; {suggestion_text(prefix, CODES)}")

    def reports_code(self, code: str) -> bool:
        """Return whether findings of a code are reported."""
        return code in _reported_codes(self.select, self.ignore)


@functools.cache
def _reported_codes(select: tuple[str, ...], ignore: tuple[str, ...]) -> frozenset[str]:
    def longest(prefixes: Iterable[str], code: str) -> int:
        return max((len(prefix) for prefix in prefixes if code.startswith(prefix)), default=0)

    chosen = set()
    for code in CODES:
        selected = longest(select, code) if select else 1
        if selected > longest(ignore, code):
            chosen.add(code)
    return frozenset(chosen)


def read_lint_selection(paths: Sequence[Path]) -> LintSelection:
    """Return the table `[tool.ampcompare.lint]` of the nearest pyproject.toml above the first path that has it.

    Raises:
        ConfigError: a key or a value that cannot be used, or a file that cannot be read.
    """
    start = (paths[0] if paths else Path()).absolute()
    for folder in (start, *start.parents):
        file = folder / "pyproject.toml"
        if file.is_file():
            table = _read_lint_table(file)
            if table is not None:
                return _make_selection(file, table)
    return LintSelection()


def _read_lint_table(file: Path) -> Any:
    try:
        table: Any = tomllib.loads(read_text(file))
    except (FileFault, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{file}: {error}") from None
    for key in TABLE.split("."):
        table = table.get(key) if isinstance(table, dict) else None
    return table


def _make_selection(file: Path, table: Any) -> LintSelection:
    if not isinstance(table, dict):
        raise ConfigError(f"{file}: {TABLE} is not a table")
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in KEYS:
            raise ConfigError(f"{file}: {TABLE} has no key {key!r}; it has {', '.join(KEYS)}")
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise ConfigError(f"{file}: {TABLE}.{key} must be a list of strings")
        values[key] = tuple(one if key == "exclude" else one.upper() for one in value)
    try:
        return LintSelection(**values)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def lint_files(
    files: Iterable[Path], selection: LintSelection, *, fix: bool = False, named_files: Collection[Path] = ()
) -> Report:
    """Return what is found in files; one that cannot be read does not keep the others from being examined.

    Args:
        files: Python files and notebooks.
        selection: which codes are reported.
        fix: whether to correct what surely can be, in the files; the report has what is left.
        named_files: files that must be Python, whether a rule has anything to say of them or not.
    """
    report = Report()
    if fix:
        parts: Iterable[Report] = (_examine_file(path, selection, named_files, fix=True) for path in files)
    else:
        parts = map_files(
            functools.partial(_examine_file, selection=selection, named_files=named_files), list(files)
        )
    for part in parts:
        report.files += part.files
        report.fixed += part.fixed
        report.findings += part.findings
        report.unread += part.unread
    return report


def _examine_file(
    path: Path, selection: LintSelection, named_files: Collection[Path], *, fix: bool = False
) -> Report:
    report = Report()
    try:
        with _pause_garbage_collection():
            _lint_file(path, selection, fix, report, must_parse=path in named_files)
    except FileFault as error:
        report.unread.append(UnreadFile(path, str(error)))
    except SourceInvalid as error:
        report.unread.append(
            UnreadFile(path, f"{error.kind}: {error}" if error.line else str(error), error.line)
        )
    return report


@contextlib.contextmanager
def _pause_garbage_collection() -> Iterator[None]:
    """Keep Python's collector of garbage from looking at a growing tree again and again; it comes behind each file."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _lint_file(path: Path, selection: LintSelection, fix: bool, report: Report, *, must_parse: bool) -> None:
    document = read_document(path)
    if path.suffix == ".pyi" and not must_parse:  # a stub, none of which ever runs
        report.files += 1
        return
    try:
        if must_parse and not rules_that_may_match(document.text, selection.reports_code):
            parse_tree(document.text)
        findings = check_text(document.text, selection.reports_code, selection.versions, path)
    except SourceInvalid as error:
        line = document.position_for_user(error.line).line if error.line else 0
        raise SourceInvalid(str(error), line) from None
    report.files += 1
    if fix and any(finding.edits for finding in findings):
        text, left, fixed = fixed_text_rest_and_num_fixes(document.text, findings, selection)
        try:
            write_document(document, text)
            report.fixed += fixed
            # Lines of a text are those of its file; the cells of a notebook may have others now.
            document = read_document(path) if document.notebook is not None else document
            findings = left
        except (FileFault, EnvironmentUnfit) as error:
            report.unread.append(UnreadFile(path, f"cannot be corrected: {error}"))
    for finding in findings:
        place = document.position_for_user(finding.line, finding.column)
        report.findings.append(
            LocatedFinding(path, place, finding.code, finding.message, bool(finding.edits))
        )


def fixed_text_rest_and_num_fixes(
    text: str, findings: list[Finding], selection: LintSelection
) -> tuple[str, list[Finding], int]:
    """Correct what findings have edits for, as often as that makes fewer of them.

    A set of edits whose result does not parse, or has as many findings as before, is not made.

    Args:
        text: of a module of Python.
        findings: in this text, as `check_text` returns them.
        selection: which rules count, and for which versions of libraries.

    Returns:
        The corrected text, the findings that are left in it, and how many were corrected.
    """
    fixed = 0
    for _ in range(MAX_PASSES):
        candidates = [finding.edits for finding in findings if finding.edits]
        for groups in (candidates, *([group] for group in candidates)):
            corrected, _ = apply_edits(text, groups)
            try:
                parse_tree(corrected)
                left = check_text(corrected, selection.reports_code, selection.versions)
            except SourceInvalid:
                continue
            if len(left) < len(findings):
                fixed += len(findings) - len(left)
                text, findings = corrected, left
                break
        else:
            break
    return text, findings, fixed
