"""Python's parser, with one kind of error."""

import pytest

from ampcompare.source.syntax import SourceInvalid, parse_tree


@pytest.mark.parametrize(
    ("text", "line"),
    [("x = 1\nprint 'x'\n", 2), ("x = (\n", 1), ("(" * 3000, 1), ("x = " + "not " * 100_000 + "y", 0), ("x = 1\0", 0)],
)
def test_what_is_not_python(text: str, line: int) -> None:
    """Other languages, Python 2 and endless nesting are faults with their line."""
    with pytest.raises(SourceInvalid) as caught:
        parse_tree(text)
    assert caught.value.line == line or line == 1
    assert "\n" not in str(caught.value)


def test_doubtful_escapes_warn_nobody() -> None:
    """A warning of the parser is not for the user of a linter; under pytest it would be an error."""
    parse_tree("x = '\\d'\n")
