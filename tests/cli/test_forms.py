"""Each option of a command acts in a form of it, and is refused beside the others."""

import click
import pytest

from ampcompare.cli.group import cli
from ampcompare.cli.help import Command
from ampcompare.cli.shared_options import SETTING_OPTIONS
from tests.cli.conftest import Call

CONTEXT = click.Context(cli)
COMMANDS = {name: cli.get_command(CONTEXT, name) for name in cli.list_commands(CONTEXT)}
WITH_FORMS = [name for name, command in COMMANDS.items() if isinstance(command, Command) and command.forms]


def test_the_commands_that_do_several_things_have_forms() -> None:
    """A command with an option that asks for another thing lists what acts beside it."""
    names = "compare config convert diagnose exec explain judge list migrate run shim"
    assert sorted(WITH_FORMS) == names.split()


@pytest.mark.parametrize("name", WITH_FORMS)
def test_every_option_acts_in_a_form(name: str) -> None:
    """No option is offered that no form reads, and no form reads what is not offered."""
    command = COMMANDS[name]
    assert isinstance(command, Command)
    offered = {parameter.name for parameter in command.params if parameter.expose_value}
    assert [one for one in offered if not any(one in form.reads for form in command.forms)] == []
    listed = {one for form in command.forms if isinstance(form.reads, frozenset) for one in form.reads}
    assert listed - offered - {"script", *SETTING_OPTIONS} == set()
    assert command.forms[-1].asked_by == ""


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["judge", "--twin", "x"], 2, "--twin is for --logprobs A B; give both"),
        (["judge", "x.csv", "--logprobs", "a", "b"], 64, "TABLE is not for --logprobs A B; leave it out"),
        (
            ["judge", "--logprobs", "a", "b", "--margin", "1"],
            64,
            "--margin is not for --logprobs A B; leave it out",
        ),
        (
            ["diagnose", "--ahead", "--no-cures"],
            2,
            "--no-cures is not for --ahead, which repeats no operation",
        ),
        (["diagnose", "--ahead", "--no-preflight"], 2, "--no-preflight is not for --ahead"),
        (["migrate", "--verify", "--write", "x.py"], 2, "--write is not for --verify, which changes no file"),
        (
            ["migrate", "--verify", "--torch-version", "2.2", "x.py"],
            2,
            "--torch-version is not for --verify, which",
        ),
        (
            ["migrate", "--adapter", "--torch-version", "2.2", "x"],
            2,
            "--torch-version is not for --adapter, which",
        ),
        (
            ["migrate", "--verify-resume", "3", "--verify", "x.py"],
            2,
            "--verify is not for --verify-resume STEP",
        ),
        (
            ["convert", "a", "--inspect", "--to", "native"],
            2,
            "--to is not for --inspect, which writes nothing",
        ),
        (
            ["explain", "O2", "--seed", "3"],
            2,
            "--seed is for a script or a model named with --arch; give both",
        ),
        (["explain", "O2", "--arch", "mlp", "--compat-torch"], 2, "--compat-torch is not for a model"),
        (
            ["compare", "--verify-resume", "3", "--junit", "x", "--", "a.py"],
            2,
            "--junit is not for --verify-resume",
        ),
        (
            ["compare", "--capsule", "3", "--arm", "O2", "--", "a.py"],
            2,
            "--arm is not for --capsule STEP, which keeps",
        ),
        (
            ["compare", "--capsule", "3", "--shift-seeds", "--", "a.py"],
            2,
            "--shift-seeds is not for --capsule STEP",
        ),
        (
            ["compare", "--capsule", "3", "--warmup-steps", "2", "--", __file__],
            2,
            "compare --capsule does not read warm",
        ),
        (["compare", "--dry-run", "--emit-cells", "x"], 2, "--emit-cells is not for --dry-run; leave it out"),
        (["run", "--dry-run", "--verify-resume"], 2, "--verify-resume is not for --dry-run; leave it out"),
        (
            ["run", "--list-metrics", "--dry-run", "--", "a.py"],
            2,
            "--dry-run is not for --list-metrics; leave it out",
        ),
        (
            ["shim", "status", "--for", "timm"],
            2,
            "--for is for shim on; write: ampcompare shim on --for LIBRARY",
        ),
        (
            ["exec", "--verify-resume", "3", "--no-guards", "a.py"],
            2,
            "--no-guards is not for --verify-resume STEP",
        ),
        (["exec", "--capsule", "0", "--max-steps", "4", "a.py"], 2, "--max-steps is not for --capsule STEP"),
        (["exec", "--twin", "a.py"], 2, "--arm script trains the script as it is"),
        (
            ["exec", "--arm", "O2", "--opt-level", "O1", "a.py"],
            2,
            "--opt-level is not for --arm ARM, which sets it",
        ),
        (["exec", "--stack", "old=python", "--engine", "nvidia", "a.py"], 2, "--engine is not for --stack"),
        (
            ["exec", "--arm", "O2,engine=nvidia", "--engine", "compat", "a.py"],
            2,
            "--engine is not for arm apex:O2,engine=nvidia, which names its own",
        ),
        (["list", "arms", "x"], 2, "FOLDER is for list runs; write: ampcompare list runs FOLDER"),
        (["config", "schema", "--lr", "1"], 2, "--lr 1 is not for config schema; leave it out"),
        (["config", "schema", "--origin"], 2, "--origin is not for config schema; leave it out"),
    ],
)
def test_an_option_of_another_form_is_refused(words: list[str], code: int, said: str, call: Call) -> None:
    """The message names the option as it was written, and what it is for or not for."""
    done = call(*words)
    assert done.code == code
    assert said in done.err


WITH_RULES = [name for name, command in COMMANDS.items() if isinstance(command, Command) and command.rules]
# What a command without options lacks.
NEEDED = {
    "floor": ["needs a script"],
    "judge": ["needs one table"],
    "convert": ["needs OUT and --to native or --to apex"],
}


@pytest.mark.parametrize("name", WITH_RULES)
def test_every_rule_asks_for_options_of_its_command(name: str) -> None:
    """A rule is answered from the parameters of its command; a call without options breaks only what it lacks."""
    command = COMMANDS[name]
    assert isinstance(command, Command)
    with command.make_context(
        name, ["x"] if name in ("convert", "exec", "migrate") else [], parent=CONTEXT
    ) as context:
        assert [rule.why for rule in command.rules if rule.is_broken(context.params)] == NEEDED.get(name, [])


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["floor"], 2, "floor needs a script; write: ampcompare floor [OPTIONS] -- SCRIPT ARGS..."),
        (["convert", "a.pt"], 2, "convert needs OUT and --to native or --to apex; give both, or --inspect"),
        (["convert", "a.pt", "b.pt"], 2, "convert needs OUT and --to native or --to apex"),
        (
            ["judge", "x.csv", "--example"],
            2,
            "judge needs one table; name a CSV or Markdown file, or give --example",
        ),
        (
            ["judge", "--against", "x.csv"],
            64,
            "--against OLD needs new results; name them: ampcompare judge NEW",
        ),
        (
            ["compare", "--verify-resume", "3"],
            2,
            "--verify-resume STEP needs a script; write: ampcompare compare",
        ),
        (
            ["compare", "--capsule", "3"],
            2,
            "--capsule STEP needs a script; write: ampcompare compare --capsule",
        ),
        (
            ["compare", "--opt-level", "O2", "--arm", "fp32"],
            2,
            "--opt-level is not for --arm, whose text has its",
        ),
        (
            ["config", "show", "--dtype", "bf16"],
            2,
            "--dtype needs --backend NAME, whose option it is; give both",
        ),
        (["diagnose", "--arm", "O1,O2"], 2, "--arm with several arms needs --ahead; give one arm, or both"),
        (
            ["exec", "--guard-passes", "3", "--no-guards", "a.py"],
            2,
            "--guard-passes N is not for --no-guards; give only",
        ),
        (
            ["exec", "--arm", "O1", "--shift-seeds", "all", "a.py"],
            2,
            "--shift-seeds needs --seed N, whose offset it",
        ),
        (
            ["exec", "--verify-resume", "3", "--arm", "script@old", "a.py"],
            2,
            "--verify-resume STEP is not for an arm",
        ),
        (
            ["migrate", "--verify", "--adapter", "--rewrite", "x.py"],
            2,
            "--rewrite is not for --adapter, which keeps",
        ),
        (
            ["migrate", "--adapter", "--rewrite", "x.py"],
            2,
            "--rewrite is not for --adapter, which keeps the code",
        ),
        (
            ["report", "--open", "--format", "md"],
            2,
            "--open is not for --format, unless that is html; give only one",
        ),
        (["compare", "--slurm-option", "time=1"], 2, "--slurm-option needs --launcher slurm; give both"),
        (
            ["compare", "--timing-rounds", "1", "--jobs", "2"],
            2,
            "--timing-rounds is not for --jobs, Slurm or Ray",
        ),
        (["run", "--slurm-option", "time=1"], 2, "--slurm-option needs --launcher slurm; give both"),
        (
            ["run", "--stack", "old=python"],
            2,
            "--stack old needs an arm that trains there; name one, as in --arm",
        ),
        (
            ["compare", "--stack", "old=python"],
            2,
            "--stack old needs an arm that trains there; name one, as in --arm",
        ),
    ],
)
def test_an_option_that_breaks_a_rule_is_refused(words: list[str], code: int, said: str, call: Call) -> None:
    """The message says what the option needs or is not for, and what to do, in one form of sentence."""
    done = call(*words)
    assert done.code == code
    assert said in done.err
