"""What lint found in files, and in which form it is written: text, JSON, annotations of GitHub, SARIF."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

from ampcompare.base.formatting import printable_line
from ampcompare.base.notebook_display import ShownInNotebook
from ampcompare.base.version import __version__
from ampcompare.source.document import UserPosition
from ampcompare.source.lint.catalog import CODES

LONGEST = 600
# The version of SARIF that code scanning reads, and where its schema is.
SARIF_VERSION = "2.1.0"
SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
FINGERPRINT = "codeAndMessage/v1"


@dataclass(frozen=True)
class LocatedFinding:
    """A finding in a file.

    Attributes:
        path: of the file, as it was named.
        place: line and column, and the cell of a notebook.
        code: of the mistake.
        message: what was seen there.
        fixable: whether `--fix` corrects it.
    """

    path: Path
    place: UserPosition
    code: str
    message: str
    fixable: bool


@dataclass(frozen=True)
class UnreadFile:
    """A file that could not be examined, or a fix that could not be written.

    Attributes:
        path: of the file.
        reason: why.
        line: where the parser stopped, 0 if that means nothing.
    """

    path: Path
    reason: str
    line: int = 0

    def __str__(self) -> str:
        line = f":{self.line}" if self.line else ""
        return printable_line(f"{self.path}{line}: {self.reason}", LONGEST)


@dataclass
class Report(ShownInNotebook):
    """All that one call of lint found.

    Attributes:
        findings: by file, then by line.
        unread: what could not be examined or written.
        files: how many files were examined.
        fixed: how many findings were corrected.
    """

    findings: list[LocatedFinding] = field(default_factory=list)
    unread: list[UnreadFile] = field(default_factory=list)
    files: int = 0
    fixed: int = 0

    _view: ClassVar[str] = "ampcompare.results.report.html.notebook:lint_text_and_html"

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """Return the place, code, level, message and remedy of each finding."""
        return [
            (
                f"{one.path}:{one.place}",
                one.code,
                level_of_code(one.code),
                one.message,
                CODES[one.code].remedy,
            )
            for one in self.findings
        ]

    def summary(self) -> str:
        """Return the counts in one line."""
        fixed = f"{_count_text(self.fixed, 'finding')} fixed; " if self.fixed else ""
        files = len({finding.path for finding in self.findings})
        fixable = sum(finding.fixable for finding in self.findings)
        hint = f"; --fix corrects {fixable} of them" if fixable else ""
        examined = _count_text(self.files, "file")
        where = f" in {files} of {examined}" if files else f" in {examined}"
        unread = f"; {_count_text(len(self.unread), 'file')} not read" if self.unread else ""
        return f"{fixed}{_count_text(len(self.findings), 'finding')}{where}{hint}{unread}"


def level_of_code(code: str) -> str:
    """Return `error` for misuse, `warning` for what is deprecated or style."""
    return "error" if code.startswith(("AMP1", "AMP2")) else "warning"


def _count_text(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _text_lines(report: Report) -> Iterator[str]:
    for one in report.findings:
        fix = " [*]" if one.fixable else ""
        yield printable_line(
            f"{one.path}:{one.place}: {one.code}{fix} {one.message}; {CODES[one.code].remedy}", LONGEST
        )


def _json_lines(report: Report) -> Iterator[str]:
    findings = [
        {
            "path": one.path.as_posix(),
            "cell": one.place.cell,
            "line": one.place.line,
            "column": one.place.column,
            "code": one.code,
            "name": CODES[one.code].name,
            "level": level_of_code(one.code),
            "message": one.message,
            "matters": CODES[one.code].matters,
            "remedy": CODES[one.code].remedy,
            "fixable": one.fixable,
        }
        for one in report.findings
    ]
    unread = [
        {"path": one.path.as_posix(), "line": one.line or None, "reason": one.reason} for one in report.unread
    ]
    document = {
        "schema_version": 1,
        "ampcompare_version": __version__,
        "files": report.files,
        "fixed": report.fixed,
        "findings": findings,
        "unread": unread,
    }
    yield json.dumps(document, indent=2)


def _github_lines(report: Report) -> Iterator[str]:
    for one in report.findings:
        cell = "" if one.place.cell is None else f"cell {one.place.cell}: "
        line = f",line={one.place.line},col={one.place.column}" if one.place.cell is None else ""
        title = _escape_github_property(f"{one.code} {CODES[one.code].name}")
        message = _escape_github_message(f"{cell}{one.message}; {CODES[one.code].remedy}")
        path = _escape_github_property(one.path.as_posix())
        yield f"::{level_of_code(one.code)} file={path}{line},title={title}::{message}"
    for unread in report.unread:
        line = f",line={unread.line}" if unread.line else ""
        path = _escape_github_property(unread.path.as_posix())
        yield f"::error file={path}{line}::{_escape_github_message(unread.reason)}"


def _escape_github_message(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_github_property(text: str) -> str:
    return _escape_github_message(text).replace(":", "%3A").replace(",", "%2C")


def _sarif_lines(report: Report) -> Iterator[str]:
    codes = sorted({one.code for one in report.findings})
    results: list[dict[str, Any]] = []
    seen: Counter[tuple[str, str, str]] = Counter()
    for one in report.findings:
        cell = "" if one.place.cell is None else f"cell {one.place.cell}, line {one.place.line}: "
        # A notebook is JSON, in which a line of a cell is not a line of the file.
        region = (
            {"startLine": one.place.line, "startColumn": one.place.column} if one.place.cell is None else None
        )
        key = (one.path.as_posix(), one.code, one.message)
        digest = hashlib.sha256(
            "\0".join((*key, str(seen[key]))).encode("utf-8", "surrogateescape")
        ).hexdigest()
        seen[key] += 1
        results.append(
            {
                "ruleId": one.code,
                "ruleIndex": codes.index(one.code),
                "level": level_of_code(one.code),
                "message": {"text": f"{cell}{one.message}; {CODES[one.code].remedy}"},
                "locations": [_sarif_location(one.path, region)],
                # Code scanning knows a finding again by this when lines above it come or go.
                "partialFingerprints": {FINGERPRINT: digest},
            }
        )
    unread = [
        {
            "level": "error",
            "message": {"text": one.reason},
            "locations": [_sarif_location(one.path, {"startLine": one.line} if one.line else None)],
        }
        for one in report.unread
    ]
    driver = {
        "name": "ampcompare lint",
        "version": __version__,
        "rules": [_sarif_rule(code) for code in codes],
    }
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "invocations": [{"executionSuccessful": not unread, "toolExecutionNotifications": unread}],
        "results": results,
    }
    yield json.dumps({"$schema": SARIF_SCHEMA, "version": SARIF_VERSION, "runs": [run]}, indent=2)


def _sarif_rule(code: str) -> dict[str, Any]:
    mistake = CODES[code]
    return {
        "id": code,
        "name": mistake.name,
        "shortDescription": {"text": mistake.mistake},
        "fullDescription": {"text": f"{mistake.mistake}: {mistake.matters}"},
        "help": {"text": mistake.remedy},
        "defaultConfiguration": {"level": level_of_code(code)},
        "properties": {"tags": ["mixed-precision"]},
    }


def _sarif_location(path: Path, region: dict[str, int] | None) -> dict[str, Any]:
    """Return a place in a file; a path is a URI there, relative to the folder in which lint runs."""
    uri = path.as_uri() if path.is_absolute() else quote(path.as_posix().encode("utf-8", "surrogateescape"))
    place: dict[str, Any] = {"artifactLocation": {"uri": uri}}
    if region is not None:
        place["region"] = region
    return {"physicalLocation": place}


FORMATS: dict[str, Callable[[Report], Iterator[str]]] = {
    "text": _text_lines,
    "json": _json_lines,
    "github": _github_lines,
    "sarif": _sarif_lines,
}
