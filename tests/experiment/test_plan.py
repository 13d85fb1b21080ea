"""The text of seeds."""

import pytest

from ampcompare.base.errors import ConfigError
from ampcompare.experiment.plan import parse_seeds


@pytest.mark.parametrize(
    ("text", "seeds"),
    [("7", (7,)), ("0-4", (0, 1, 2, 3, 4)), ("0,2,5-6", (0, 2, 5, 6)), ("3, 1", (3, 1)), ("2-2", (2,))],
)
def test_seeds_are_read(text: str, seeds: tuple[int, ...]) -> None:
    """Numbers and ranges, joined by commas, are read in their order."""
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "0-", "-1", "a", "1.5", "4-0", "0,0", "0-2,1", "0-99999999", "0,,1"])
def test_seeds_that_cannot_be_read(text: str) -> None:
    """Anything else, a seed given twice, and a range too large are refused."""
    with pytest.raises(ConfigError, match="seeds"):
        parse_seeds(text)
