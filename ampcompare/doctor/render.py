"""The report as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Callable

from ampcompare.doctor.examine import Examination
from ampcompare.doctor.finding import Check, Verdict
from ampcompare.doctor.needs import ArmNeeds

__all__ = ["render"]

MARKS: dict[Verdict, str] = {"ok": "ok", "note": "note", "warning": "WARNING", "problem": "PROBLEM"}
PLURALS: dict[Verdict, str] = {"problem": "problems", "warning": "warnings"}
NAMED = 18  # columns of a name


def render(examination: Examination, *, width: int, style: Callable[[str, Verdict], str]) -> str:
    """Return the report, wrapped to `width` columns; a line to be pasted is never wrapped.

    Args:
        style: gives a word the color of its verdict.
    """
    lines: list[str] = []
    group = None
    for finding in examination.findings:
        if finding.group != group:
            lines += ["", finding.group]
            group = finding.group
        lines += _finding(finding, width, style)
    if examination.arms:
        lines += ["", "Arms"]
        for arm in examination.arms:
            lines += _arm(arm, width, style)
    return "\n".join([*lines[1:], "", *_summary(examination, width, style), ""])


def _finding(finding: Check, width: int, style: Callable[[str, Verdict], str]) -> list[str]:
    text = _sentence(finding.value, finding.reason)
    return _entry(finding.name, finding.verdict, text, finding.remedy, width, style)


def _arm(arm: ArmNeeds, width: int, style: Callable[[str, Verdict], str]) -> list[str]:
    verdict: Verdict = "ok" if arm.fits else "problem"
    said = _sentence(
        f"runs on {arm.device}" if arm.fits else "cannot run here", ". ".join(arm.notes if arm.fits else arm.missing)
    )
    return _entry(arm.arm, verdict, said, arm.remedy, width, style)


def _sentence(value: str, reason: str) -> str:
    return f"{value}; {reason}" if reason else value


def _entry(
    name: str,
    verdict: Verdict,
    text: str,
    remedy: tuple[str, ...],
    width: int,
    style: Callable[[str, Verdict], str],
) -> list[str]:
    indent = " " * (2 + 8 + NAMED)
    wrapped = textwrap.wrap(
        " ".join(text.split()), max(width - len(indent), 30), break_long_words=False, break_on_hyphens=False
    )
    if len(name) >= NAMED:
        wrapped.insert(0, "")
    mark = style(MARKS[verdict], verdict) + " " * (8 - len(MARKS[verdict]))
    first = f"  {mark}{name:<{NAMED}}{wrapped[0]}".rstrip()
    return [first, *(indent + line for line in wrapped[1:]), *(f"{indent}$ {line}" for line in remedy)]


def _summary(examination: Examination, width: int, style: Callable[[str, Verdict], str]) -> list[str]:
    lines = []
    for verdict, plural in PLURALS.items():
        names = [finding.name for finding in examination.findings if finding.verdict == verdict]
        if verdict == "problem":
            names += [arm.arm for arm in examination.arms if not arm.fits]
        if names:
            count = style(f"{len(names)} {plural if len(names) > 1 else verdict}", verdict)
            lines += textwrap.wrap(f"{count}: {', '.join(names)}", width)
    return lines or ["No problems found."]
