"""The table of options in docs/choosing.md."""

import re
from pathlib import Path

import pytest

from ampcompare.backends.arm import Arm
from ampcompare.backends.catalog import BUILT_IN

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "choosing.md"
HEAD = "| arm | take it when | bytes | what it costs |"
TABLE = PAGE.read_text(encoding="utf-8").partition(HEAD)[2].partition("\n\n")[0]
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TABLE.splitlines()[2:]]
ARMS = [arm for row in ROWS for arm in re.findall(r"`([a-z0-9]+(?::[^`]+)?)`", row[0]) if "PATTERNS" not in arm]


@pytest.mark.parametrize("backend", BUILT_IN)
def test_each_backend_has_a_row(backend: str) -> None:
    """A reader of `ampcompare list` finds when to take what it names."""
    assert backend in {arm.partition(":")[0] for arm in ARMS}


def test_rows_are_complete() -> None:
    """Each says when to take an arm that exists, its bytes, and its cost."""
    assert len(ROWS) >= 20
    for row in ROWS:
        assert len(row) == 4, row
        assert all(row), row
    for arm in ARMS:
        Arm.parse(arm)
