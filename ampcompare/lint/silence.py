"""Comments that silence findings: `# noqa`, `# noqa: AMP201`, and for a file `# ampcompare: noqa`."""

from __future__ import annotations

import re
from collections.abc import Callable

from ampcompare.lint.finding import Finding

__all__ = ["silenced_lines"]

CODES = r"[A-Za-z]+[0-9]*(?:[\s,]+[A-Za-z]+[0-9]+)*"
OF_LINE = re.compile(rf"#\s*noqa\b(?:\s*:\s*(?P<codes>{CODES}))?", re.IGNORECASE)
OF_FILE = re.compile(rf"^\s*#\s*ampcompare\s*:\s*noqa\b(?:\s*:\s*(?P<codes>{CODES}))?", re.IGNORECASE)
NEWLINE = re.compile(r"\r\n|\r|\n")


def silenced_lines(text: str) -> Callable[[Finding], bool]:
    """Return the function that says whether a comment of the text silences a finding.

    A comment counts on the first and on the last line of the statement.
    """
    if "noqa" not in text.lower():
        return lambda finding: False
    by_line: dict[int, tuple[str, ...]] = {}
    of_file: list[tuple[str, ...]] = []
    for number, line in enumerate(NEWLINE.split(text), start=1):
        whole = OF_FILE.search(line)
        part = None if whole else OF_LINE.search(line)
        if whole:
            of_file.append(_codes(whole))
        elif part:
            by_line[number] = _codes(part)

    def silenced(finding: Finding) -> bool:
        asked = [*of_file, *(by_line[line] for line in {finding.line, finding.last_line} if line in by_line)]
        return any(not codes or finding.code.startswith(codes) for codes in asked)

    return silenced


def _codes(match: re.Match[str]) -> tuple[str, ...]:
    return tuple(code.upper() for code in re.split(r"[\s,]+", match["codes"])) if match["codes"] else ()
