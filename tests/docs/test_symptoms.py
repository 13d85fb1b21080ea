"""The page of symptoms and messages: the words of users, commands that exist, and a site whose search finds them."""

import re
import shlex
from pathlib import Path

import click
import pytest

from ampcompare.cli.group import cli
from ampcompare.source.lint.catalog import CODES

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", TEXT, flags=re.DOTALL | re.MULTILINE))


def _commands(section: str) -> list[str]:
    lines = [line for block in re.findall(r"```\n(.*?)```", section, flags=re.DOTALL) for line in block.splitlines()]
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
