"""Find the mistakes of one document: a quick look at its text first, then its tree."""

import re
from collections.abc import Callable
from pathlib import Path

from ampcompare.source.lint.catalog import RULES
from ampcompare.source.lint.read.module import Finding, LintModule, Rule
from ampcompare.source.lint.rule_needs import WordsInText
from ampcompare.source.syntax import NEWLINE, SourceInvalid
from ampcompare.source.versions import LATEST, Versions

CODES = r"[A-Za-z]+[0-9]*(?:[\s,]+[A-Za-z]+[0-9]+)*"
OF_LINE = re.compile(rf"#\s*noqa\b(?:\s*:\s*(?P<codes>{CODES}))?", re.IGNORECASE)
OF_FILE = re.compile(rf"^\s*#\s*ampcompare\s*:\s*noqa\b(?:\s*:\s*(?P<codes>{CODES}))?", re.IGNORECASE)


def rules_that_may_match(
    text: str, is_code_selected: Callable[[str], bool] = lambda code: True
) -> list[Rule]:
    """Return the rules of selected codes that may find something in a text, by the words that they need."""
    words = WordsInText(text)
    return [
        rule for rule in RULES if words.has_all_needed(rule.needs) and any(map(is_code_selected, rule.codes))
    ]


def check_text(
    text: str,
    is_code_selected: Callable[[str], bool] = lambda code: True,
    versions: Versions = LATEST,
    path: Path | None = None,
) -> list[Finding]:
    """Return the findings of a module, by line, those that comments silence left out.

    Args:
        text: of the module.
        is_code_selected: which codes are wanted; rules of which none is are not run.
        versions: of the libraries that the module is for; the newest by default.
        path: of the module, for what it imports from files next to it.

    Raises:
        SourceInvalid: the text is not Python 3, and some rule may have findings in it.
    """
    rules = rules_that_may_match(text, is_code_selected)
    if not rules:
        return []
    module = LintModule(text, versions, path)
    found: dict[tuple[str, int, int], Finding] = {}
    for rule in rules:
        try:
            for finding in rule.check(module):
                if is_code_selected(finding.code):
                    found.setdefault((finding.code, finding.line, finding.column), finding)
        except RecursionError:
            raise SourceInvalid("nested too deeply") from None
    is_silenced = _make_silence_test(text)
    findings = sorted(found.values(), key=lambda finding: (finding.line, finding.column, finding.code))
    return [finding for finding in findings if not is_silenced(finding)]


def _make_silence_test(text: str) -> Callable[[Finding], bool]:
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
            of_file.append(_codes_in_comment(whole))
        elif part:
            by_line[number] = _codes_in_comment(part)

    def is_silenced(finding: Finding) -> bool:
        asked = [*of_file, *(by_line[line] for line in {finding.line, finding.last_line} if line in by_line)]
        return any(not codes or finding.code.startswith(codes) for codes in asked)

    return is_silenced


def _codes_in_comment(match: re.Match[str]) -> tuple[str, ...]:
    return tuple(code.upper() for code in re.split(r"[\s,]+", match["codes"])) if match["codes"] else ()
