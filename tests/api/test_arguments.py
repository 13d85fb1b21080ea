"""Functions that take the parameters of an options class, and options of the command line with what they say."""

from __future__ import annotations

import inspect
from typing import Any, Literal, get_type_hints

import click
import pytest

import ampcompare
from ampcompare.api.arguments import parameter_docs_of, takes_parameters_of
from ampcompare.cli.help import make_option_from_signature
from ampcompare.experiment.run_options import CompareOptions, LaunchOptions, RunOptions

API = {"compare": CompareOptions, "run": RunOptions}


class Options:
    """What is taken.

    Args:
        name: who is greeted, over
            two lines; by default nobody.
        times: how often.
        kind: which greeting.
        loud: in capitals.
        quick: at once.

    Raises:
        ValueError: never.
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        times: int = 2,
        kind: Literal["hello", "bye"] = "hello",
        loud: bool = False,
        quick: bool = True,
        **settings: Any,
    ) -> None:
        self.greeting = f"{kind} {name}" * times
        self.settings = settings


@takes_parameters_of(Options)
def greet(options: Options) -> str:
    """Greet someone.

    Returns:
        The greeting.
    """
    return f"{options.greeting} {options.settings}"


def test_a_function_takes_the_parameters_of_its_options() -> None:
    """It is called with them, and has their signature, types and texts next to its own."""
    assert greet("you", times=1, device="cpu") == "hello you {'device': 'cpu'}"
    expected = inspect.signature(Options).replace(return_annotation="str")
    assert inspect.signature(greet) == expected
    assert get_type_hints(greet)["times"] is int
    assert get_type_hints(greet)["return"] is str
    documented = inspect.getdoc(greet) or ""
    assert documented.startswith(
        "Greet someone.\n\nArgs:\n    name: who is greeted, over\n        two lines;"
    )
    assert documented.endswith("    quick: at once.\n\nReturns:\n    The greeting.")
    assert greet.__module__ == __name__
    assert greet.__name__ == "greet"


def test_a_wrong_call_names_the_function() -> None:
    """The error is about what the caller wrote, not about a class that the caller does not know."""
    with pytest.raises(TypeError, match=r"^greet\(\): too many positional arguments$"):
        greet("you", 2)  # type: ignore[misc, call-arg]


@pytest.mark.parametrize("name", API)
def test_each_argument_of_the_interface_has_a_text(name: str) -> None:
    """The texts are those of the signature, in its order, and help() of the public function has them."""
    function = getattr(ampcompare, name)
    texts = parameter_docs_of(API[name])
    parameters = list(inspect.signature(function).parameters)
    assert [text for text in texts if text in parameters] == parameters
    assert all(f"    {parameter}: " in (inspect.getdoc(function) or "") for parameter in parameters)
    assert parameter_docs_of(LaunchOptions).keys() == inspect.signature(LaunchOptions).parameters.keys()


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["--name"], ("who is greeted, over two lines  [default: nobody]", None, "text")),
        (["--times", "-t"], ("how often", 2, "integer")),
        (["--kind"], ("which greeting", "hello", "choice")),
        (["--loud"], ("in capitals", False, "boolean")),
        (["--quick/--slow"], ("at once  [default: on]", True, "boolean")),
    ],
)
def test_an_option_of_the_command_line_is_that_of_the_parameter(
    names: list[str], expected: tuple[Any, ...]
) -> None:
    """Text, default and type come from the class, and a value from the parser goes by the name of the parameter."""

    @click.command()
    @make_option_from_signature(Options)(*names)
    def command() -> None:
        pass

    (option,) = command.params
    assert isinstance(option, click.Option)
    value = command.make_context("greet", []).params[str(option.name)]
    assert (option.help, value, option.type.name) == expected
    assert option.name in inspect.signature(Options).parameters
