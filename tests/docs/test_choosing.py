"""The table of options in docs/choosing.md, and the page of symptoms and messages in the words of users."""

import re
import shlex
from pathlib import Path

import click
import pytest

from ampcompare.backends.arm import Arm
from ampcompare.backends.catalog import BUILT_IN
from ampcompare.cli.group import cli
from ampcompare.source.lint.catalog import CODES

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "choosing.md"
HEAD = "| arm | take it when | bytes | what it costs |"
TABLE = PAGE.read_text(encoding="utf-8").partition(HEAD)[2].partition("\n\n")[0]
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TABLE.splitlines()[2:]]
ARMS = [
    arm for row in ROWS for arm in re.findall(r"`([a-z0-9]+(?::[^`]+)?)`", row[0]) if "PATTERNS" not in arm
]


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


ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", TEXT, flags=re.DOTALL | re.MULTILINE))


def _commands(section: str) -> list[str]:
    lines = [
        line
        for block in re.findall(r"```\n(.*?)```", section, flags=re.DOTALL)
        for line in block.splitlines()
    ]
    parts = [part for line in lines for part in line.partition("  #")[0].split("&&")]
    return [part.strip() for part in parts if part.strip()]


@pytest.mark.parametrize("symptom", SECTIONS)
def test_each_symptom_has_a_command_that_is_understood(symptom: str) -> None:
    """Each section has a command, whose options exist, and names only codes of lint that exist."""
    commands = _commands(SECTIONS[symptom])
    assert commands
    for line in commands:
        program, name, *words = shlex.split(line)
        assert program == "ampcompare"
        command = cli.get_command(click.Context(cli), name)
        assert command is not None, name
        command.make_context(name, words, resilient_parsing=False)
    assert set(re.findall(r"AMP\d{3}", SECTIONS[symptom])) <= set(CODES)
