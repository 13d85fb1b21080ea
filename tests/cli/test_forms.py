"""Each option of a command acts in a form of it, and is refused beside the others."""

import click
import pytest

from ampcompare.cli.forms import AllBut
from ampcompare.cli.group import cli
from ampcompare.cli.help import Command
from tests.cli.conftest import Call

CONTEXT = click.Context(cli)
COMMANDS = {name: cli.get_command(CONTEXT, name) for name in cli.list_commands(CONTEXT)}
WITH_FORMS = [name for name, command in COMMANDS.items() if isinstance(command, Command) and command.forms]


def test_the_commands_that_do_several_things_have_forms() -> None:
    """A command with an option that asks for another thing lists what acts beside it."""
    assert WITH_FORMS == ["compare", "convert", "diagnose", "exec", "explain", "judge", "migrate"]


@pytest.mark.parametrize("name", WITH_FORMS)
def test_every_option_acts_in_a_form(name: str) -> None:
    """No option is offered that no form reads, and no form reads what is not offered."""
    command = COMMANDS[name]
    assert isinstance(command, Command)
    offered = {parameter.name for parameter in command.get_params(CONTEXT) if parameter.expose_value}
    listed = {one for form in command.forms if not isinstance(form.reads, AllBut) for one in form.reads}  # type: ignore[attr-defined]
    assert {one for one in offered if not any(one in form.reads for form in command.forms)} == set()
    settings = {one for one in listed if one.startswith(("recipe__", "saving__", "parallel__"))}
    others = {"script", *["recipe_name", "size", "guards", "cpu_half", "launcher", "autocast_lists"]}
    unknown = listed - offered - settings - others
    assert unknown <= _SETTINGS, unknown
    assert command.forms[-1].asked_by == ""


def _names_of_settings() -> set[str]:
    from ampcompare.cli.shared_options import SETTING_OPTIONS

    return {*SETTING_OPTIONS}


_SETTINGS = _names_of_settings()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["judge", "--twin", "x"], 2, "--twin is for --logprobs A B; give both"),
        (["judge", "x.csv", "--logprobs", "a", "b"], 64, "TABLE is not for --logprobs A B; leave it out"),
        (["judge", "--logprobs", "a", "b", "--margin", "1"], 64, "--margin is not for --logprobs A B; leave it out"),
        (["diagnose", "--ahead", "--no-cures"], 2, "--no-cures is not for --ahead, which repeats no operation"),
        (["diagnose", "--ahead", "--no-preflight"], 2, "--no-preflight is not for --ahead"),
        (["migrate", "--verify", "--write", "x.py"], 2, "--write is not for --verify, which changes no file"),
        (["migrate", "--verify-resume", "3", "--verify", "x.py"], 2, "--verify is not for --verify-resume STEP"),
        (["convert", "a", "--inspect", "--to", "native"], 2, "--to is not for --inspect, which writes nothing"),
        (["explain", "O2", "--seed", "3"], 2, "--seed is for a script or a model named with --arch; give both"),
        (["explain", "O2", "--arch", "mlp", "--compat-torch"], 2, "--compat-torch is not for a model"),
        (["compare", "--verify-resume", "3", "--junit", "x", "--", "a.py"], 2, "--junit is not for --verify-resume"),
        (["exec", "--verify-resume", "3", "--no-guards", "a.py"], 2, "--no-guards is not for --verify-resume STEP"),
        (["exec", "--capsule", "3", "--max-steps", "4", "a.py"], 2, "--max-steps is not for --capsule STEP"),
        (["exec", "--autocast-lists", "cuda", "a.py"], 2, "--autocast-lists is for --arm"),
    ],
)
def test_an_option_of_another_form_is_refused(words: list[str], code: int, said: str, call: Call) -> None:
    """The message names the option as it was written, and what it is for or not for."""
    done = call(*words)
    assert done.code == code
    assert said in done.err
