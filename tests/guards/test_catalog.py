"""A guard is one class in one file: found, listed, reported and documented."""

import re
from pathlib import Path

from ampcompare.guards import GUARDS
from tests.modules import module_at

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "guards.md").read_text(encoding="utf-8")


def test_the_page_has_the_texts_of_the_catalog() -> None:
    """The table that the site puts into docs/guards.md has one row per guard, with its mistake and what that does."""
    hooks = module_at("docs/hooks/pages.py")
    rows = re.findall(r"^\| `([\w-]+)` \| (.+?) \| (.+?) \|$", hooks.guards_table(), re.MULTILINE)
    assert sorted(rows) == sorted((guard.name, guard.mistake, guard.matters) for guard in GUARDS.values())
    assert "<!-- guards -->" in PAGE


def test_the_page_says_how_each_guard_decides() -> None:
    """docs/guards.md has a paragraph for each guard that says when it reports."""
    assert sorted(re.findall(r"^- \*\*([\w-]+)\*\*: ", PAGE, re.MULTILINE)) == sorted(GUARDS)
