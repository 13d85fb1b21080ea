"""A typed command with other options: each stays a command that `compare` can parse."""

import shlex

import pytest

from ampcompare.cli.compare_command import command as compare
from ampcompare.results.analysis.conclusions.next_step import TypedCommand


def parsed(typed: TypedCommand) -> dict[str, object]:
    """Return the parameters that click reads from a command."""
    return compare.make_context("compare", shlex.split(str(typed))[2:]).params


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ampcompare run",
        "a; b",
        "ampcompare 'compare",
        "ampcompare compare -o a; ampcompare compare -o b",
    ],
)
def test_other_commands_are_not_edited(text: str) -> None:
    """What is no single compare gives no command."""
    assert TypedCommand.parse(text) is None


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--seeds 0-2 -q", "--seeds 0-4 -q"),
        ("--seeds=0-2 -q", "--seeds 0-4 -q"),
        ("-q", "-q --seeds 0-4"),
        ("--seeds 0 -q --seeds=1", "--seeds 0-4 -q"),
        ("--tag 'two words' --seeds 0-2", "--tag 'two words' --seeds 0-4"),
        ("--seeds 0 -- train.py --seeds 3", "--seeds 0-4 -- train.py --seeds 3"),
    ],
)
def test_an_option_is_replaced_in_its_place(options: str, expected: str) -> None:
    """An option has its new value where it stood, or at the end, but before a script."""
    typed = TypedCommand.parse(f"ampcompare compare {options}")
    assert typed is not None
    assert str(typed.with_option("--seeds", "0-4")) == f"ampcompare compare {expected}"


@pytest.mark.parametrize("written", ["-o r", "--output-dir r", "--output-dir=r", "-o r/"])
def test_another_folder(written: str) -> None:
    """Every way to write the run directory is found."""
    typed = TypedCommand.parse(f"ampcompare compare {written} --lr 0.1")
    assert typed is not None
    other = typed.elsewhere("gpu", same_recipe=True).with_option("--lr", "0.2")
    assert parsed(other)["output_dir"] == "r-gpu"
    assert str(other) == "ampcompare compare -o r-gpu --lr 0.2"
