"""The page on the seed documents: what it points to exists."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs" / "seeds.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE)


def test_many_tests_are_named() -> None:
    assert len(NAMED) > 25


def test_the_tests_that_it_names_exist() -> None:
    """A test that was renamed or removed is noticed here."""
    sources = {path: (ROOT / path).read_text(encoding="utf-8") for path, _ in NAMED}
    assert not [f"{path}::{name}" for path, name in NAMED if name and f"\ndef {name}(" not in sources[path]]


def test_every_row_says_how_and_what_was_seen() -> None:
    rows = [
        line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| in the seeds")
    ]
    assert len(rows) > 30
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split(" | ")]
        assert len(cells) == 3, row
        assert all(cells), row
