"""The catalog: every mistake has its texts, its pair of examples, and its section in the documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ampcompare.guards import GUARDS
from ampcompare.source.lint.catalog import BY_NAME, CODES, GROUPS, MISTAKES
from ampcompare.source.lint.report import level_of

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "lint" / "codes.md").read_text(encoding="utf-8")
COUNTED = re.compile(r"(\d+)(?: \w+)? mistakes\]\([\w/.]*lint/index\.md")
SECTION = re.compile(r"^### (AMP\d{3}): ([\w-]+)$\n(.*?)(?=^##|\Z)", re.MULTILINE | re.DOTALL)


def test_codes_and_names_are_unique() -> None:
    """No code and no name has two meanings, and each code belongs to a group."""
    assert len(BY_NAME) == len(MISTAKES)
    assert len(CODES) == sum(bool(mistake.code) for mistake in MISTAKES)
    assert {code[:4] for code in CODES} == set(GROUPS)


def test_guards_are_in_the_catalog() -> None:
    for guard in GUARDS.values():
        mistake = BY_NAME[guard.name]
        assert (guard.mistake, guard.matters, guard.remedy) == (mistake.mistake, mistake.matters, mistake.remedy)
    assert {mistake.guard for mistake in MISTAKES if mistake.guard} <= set(GUARDS)


@pytest.mark.parametrize("code", CODES)
def test_a_mistake_has_its_section(code: str) -> None:
    """docs/lint/codes.md has the texts and both examples of each mistake."""
    mistake = CODES[code]
    sections = {found: (name, text) for found, name, text in SECTION.findall(PAGE)}

    name, text = sections[code]

    assert name == mistake.name
    for part in (mistake.mistake, mistake.matters, mistake.remedy, mistake.example.strip(), mistake.harmless.strip()):
        assert part in text
    assert ("`--fix`" in text) == mistake.fixable
    assert ("`--select`" in text) == (not mistake.by_default)
    assert f"({level_of(code)})" in text


def test_the_page_has_no_other_sections() -> None:
    assert [code for code, _, _ in SECTION.findall(PAGE)] == sorted(CODES)


def test_the_readme_counts_the_codes() -> None:
    counted = COUNTED.findall((ROOT / "README.md").read_text(encoding="utf-8"))

    assert counted == [str(len(CODES))]
