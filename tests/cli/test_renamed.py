"""Options that were renamed keep their old names, as flags and as environment variables."""

from typing import Any

import click
import pytest

from ampcompare.cli import COMMANDS
from ampcompare.cli.group import cli
from ampcompare.cli.help import OLD_NAMES, variable_name

VALUES = {
    "--fail-below-loss-scale": "2", "--layerwise-lr": "larc", "--log-interval": "3", "--max-consecutive-skips": "4",
    "--objective": "memory", "--progress-interval": "5s", "--size": "small", "--sweep": "workers=0,1", "--target": "97",
}  # fmt: skip
GROUP = click.Context(cli, **cli.context_settings)


def _command(name: str) -> click.Command:
    command = cli.get_command(GROUP, name)
    assert command is not None
    return command


def _parse(name: str, *words: str) -> dict[str, Any]:
    """Return the parameters that a command reads from words."""
    required = [param for param in _command(name).params if isinstance(param, click.Argument) and param.required]
    return _command(name).make_context(name, [*words, *("x" for _ in required)], parent=GROUP).params


# Each flag with the first command that has it: all of them make their options in the same way.
FLAGS = {
    flag: name
    for name in reversed(COMMANDS)
    for param in _command(name).params
    if isinstance(param, click.Option)
    for flag in (*param.opts, *param.secondary_opts)
    if flag in OLD_NAMES
}


@pytest.mark.parametrize("flag", OLD_NAMES)
def test_an_old_name_sets_the_same_option(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old flag or variable gives what the new one gives, and the new variable wins."""
    name, old, value = FLAGS[flag], OLD_NAMES[flag], [VALUES[flag]] if flag in VALUES else []
    expected = _parse(name, flag, *value)
    assert _parse(name, old, *value) == expected != _parse(name)
    if flag.startswith("--no-"):
        return
    monkeypatch.setenv(variable_name(name, old), *value or ["1"])
    assert _parse(name) == expected
    if value == ["2"]:
        monkeypatch.setenv(variable_name(name, flag), "7")
        assert 7.0 in _parse(name).values()
