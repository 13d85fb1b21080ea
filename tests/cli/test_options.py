"""Options of settings take their type, choices and default from the fields of `RunConfig`."""

from typing import Any, Literal, get_args, get_origin

import click
import pytest

from ampcompare.cli.compare_command import command
from ampcompare.cli.shared_options import RECIPE_OPTIONS, parameter_of
from ampcompare.settings.config import RunConfig

OPTIONS = {param.name: param for param in command.params}


def _field(path: str) -> Any:
    model: Any = RunConfig
    *parents, name = path.split(".")
    for parent in parents:
        model = model.model_fields[parent].annotation
    return model.model_fields[name]


@pytest.mark.parametrize("path", [path for _, path, _ in RECIPE_OPTIONS])
def test_an_option_follows_its_field(path: str) -> None:
    """A field with fixed values gives a choice of exactly these, and help ends with the default unless it is none."""
    option, field = OPTIONS[parameter_of(path)], _field(path)
    assert isinstance(option, click.Option)
    if get_origin(field.annotation) is Literal:
        assert isinstance(option.type, click.Choice)
        assert tuple(option.type.choices) == get_args(field.annotation)
    else:
        assert not isinstance(option.type, click.Choice)
    default = "on" if field.default is True else field.default
    shown = "" if default in (None, False, "none", ()) else f"  [default: {default}]"
    assert option.help == f"{field.description}{shown}"
