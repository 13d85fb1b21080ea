"""Numbers as people read them."""

from __future__ import annotations

import pytest

from ampcompare.base.formatting import format_count


@pytest.mark.parametrize(("number", "text"), [(0, "0 steps"), (1, "1 step"), (2, "2 steps"), (1200, "1200 steps")])
def test_a_count_has_its_noun_in_the_right_number(number: int, text: str) -> None:
    assert format_count(number, "step") == text
