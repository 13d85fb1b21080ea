"""The settings that flags, variables and arguments of a command ask for, and the script after `--` with its options."""

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from ampcompare.base.errors import ConfigError
from ampcompare.base.formatting import printable_line
from ampcompare.cli.forms import refuse_given_parameters
from ampcompare.cli.help import OUTPUT, SCRIPT, Command, add_options, option
from ampcompare.cli.shared_options import RECIPE_OPTIONS, parameter_name_of_setting
from ampcompare.cli.values import WordChoice
from ampcompare.experiment.sources import SettingsRequest, collect_settings
from ampcompare.settings.config import RunConfig
from ampcompare.settings.layers import Layer, parse_path_and_value, set_value_at_path
from ampcompare.settings.reads import GIVE_OWN_OPTION, OF_OWN_LOOP, CommandReads
from ampcompare.settings.script import ScriptConfig, script_config

Function = TypeVar("Function", bound=Callable[..., Any])
OTHER_PARAMETERS = {"guards": "guards", "processes": "processes", "seed": "recipe.seed", "arm_text": "arm"}
DERIVED = {"processes": "number of requested processes", "arm_text": "flags of the arm"}
OWN = ("metric", "list_metrics", "seed_arg", "shift_seeds", "compat_torch", "mask")
NOT_FOR_SCRIPTS = (
    *("sweep", "timing_rounds", "verify_resume", "recipe_name"),
    *("size", "config_file", "overrides", "model_args"),
    *("slurm_options", "dist_url"),
)


def settings_request_from(parameters: Mapping[str, Any]) -> SettingsRequest:
    """Return the settings that the present command asks for: `--set` below variables, and these below flags."""
    layers = []
    for text in parameters["overrides"]:
        values: dict[str, Any] = {}
        set_value_at_path(values, *parse_path_and_value(text, "--set"))
        layers.append(Layer(f"--set {text}", values))
    paths = {parameter_name_of_setting(path): path for _, path, _ in RECIPE_OPTIONS} | OTHER_PARAMETERS
    from_environment: dict[str, Any] = {}
    from_flags: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name, path in paths.items():
        if parameters.get(name) is None:
            continue
        is_variable, origins[path] = _variable_flag_and_source_name(name)
        set_value_at_path(from_environment if is_variable else from_flags, path, parameters[name])
    for text in parameters["model_args"]:
        name, value = parse_path_and_value(text, "--model-arg")
        set_value_at_path(from_flags, f"recipe.model.args.{name}", value)
        origins[f"recipe.model.args.{name}"] = "flag --model-arg"
    layers += [Layer("environment", from_environment, origins), Layer("flag", from_flags, origins)]
    if (script := _settings_layer_of_script(parameters)) is not None:
        layers.append(script)
    return SettingsRequest(
        parameters.get("recipe_name"), parameters.get("size"), parameters.get("config_file"), tuple(layers)
    )


def _variable_flag_and_source_name(name: str) -> tuple[bool, str]:
    """Return whether a parameter of the present command came from the environment, and what to call its source."""
    context = click.get_current_context()
    option = next((param for param in context.command.params if param.name == name), None)
    source = context.get_parameter_source(name)
    if option is None or source == click.core.ParameterSource.DEFAULT:  # derived from flags of other names
        return False, DERIVED.get(name, "flag")
    if source == click.core.ParameterSource.ENVIRONMENT:
        return True, f"environment {option.envvar}"
    return False, f"flag {max(option.opts, key=len)}" if isinstance(option, click.Option) else "argument"


class ScriptCommand(Command):
    """A command that leaves everything after `--` to a script."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = args
        dashes = []
        words = []
        if "--" in args:
            place = args.index("--")
            own = args[:place]
            dashes = ["--"]
            words = args[place + 1 :]
        try:
            rest = super().parse_args(ctx, list(own))
        except click.UsageError:
            if (script := None if dashes else self._find_script_among(own, ctx)) is not None:
                place = own.index(script)
                line = shlex.join(["ampcompare", str(ctx.info_name), *own[:place], "--", *own[place:]])
                raise ConfigError(f"a script comes after --, with its own arguments: {line}") from None
            raise
        ctx.params["script"] = words if dashes else None
        return rest

    def _find_script_among(self, words: list[str], ctx: click.Context) -> str | None:
        """Return the first word that no option takes, if it may begin a script: a file, or the option -m."""
        parser = self.make_parser(ctx)
        parser.ignore_unknown_options = True
        try:
            rest = parser.parse_args(list(words))[1]
        except click.UsageError:
            return None
        return next(
            (word for word in rest if word == "-m" or word.endswith(".py") or Path(word).exists()), None
        )

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- SCRIPT [ARGS]...]"]


COMPAT_TORCH = option(
    "--compat-torch",
    is_flag=True,
    group=SCRIPT,
    help="with -- SCRIPT: restore removed and changed APIs of torch, numpy and Python",
)
SEED_ARG = option(
    "--seed-arg", metavar="FLAG", group=SCRIPT, help="with -- SCRIPT: pass the seed as FLAG SEED"
)
SHIFT_SEEDS = option(
    "--shift-seeds",
    type=WordChoice(["global", "all"]),
    is_flag=False,
    flag_value="global",
    metavar="[all]",
    group=SCRIPT,
    help="with -- SCRIPT: add an offset for each seed to what the script seeds global generators with; all: also to "
    "what it seeds its own with",
)


def add_script_options(function: Function) -> Function:
    """Add the options that only a script after `--` has."""
    options = [
        option(
            "--metric",
            multiple=True,
            metavar="NAME[:WORD...][=REGEX]",
            group=SCRIPT,
            help="with -- SCRIPT: a number that it prints, as in 'top1:max=Acc@1 ([\\d.]+)', or logs; words are max, "
            "min, last, best, first, and points (compare differences); verdicts use the first metric; repeatable "
            " [default: its training loss]",
        ),
        option(
            "--list-metrics",
            is_flag=True,
            group=SCRIPT,
            help="with -- SCRIPT: run it briefly and list the metrics it shows",
        ),
        SEED_ARG,
        SHIFT_SEEDS,
        COMPAT_TORCH,
        option(
            "--mask",
            multiple=True,
            metavar="PATTERN",
            group=SCRIPT,
            help="with -- SCRIPT: keep the values of its arguments, and of environment variables, of such names out of "
            "all files, as those of --token, --password, *_KEY and others are; repeatable",
        ),
    ]
    return add_options(options, function)


# Parameters of `add_watched_script_options`, with the script itself.
WATCHED = ("script", "seed", "seed_arg", "shift_seeds", "compat_torch", "nproc_per_node")


def add_watched_script_options(function: Function) -> Function:
    """Add the seed, and the options of a script that is watched as it trains."""
    options = [
        option(
            "--seed",
            type=int,
            metavar="N",
            group=OUTPUT,
            help="random seed of weights and batches; for a script, set before it starts",
        ),
        SEED_ARG,
        SHIFT_SEEDS,
        COMPAT_TORCH,
        option(
            "--nproc-per-node",
            type=click.IntRange(1),
            metavar="N",
            group=SCRIPT,
            help="with -- SCRIPT: ranks of torchrun",
        ),
    ]
    return add_options(options, function)


def config_of_watched_arm(parameters: Mapping[str, Any], arm: str, reads: CommandReads) -> RunConfig:
    """Return the settings of an arm that a command watches as it trains."""
    derived = {"arm_text": arm, "processes": parameters["nproc_per_node"], "metric": ()}
    return collect_settings(settings_request_from({**parameters, **derived}), reads, one_run=True).config


def _settings_layer_of_script(parameters: Mapping[str, Any]) -> Layer | None:
    """Return the setting of the script after `--`; None without one."""
    words = parameters.get("script")
    if words is None:
        command = click.get_current_context().info_name
        refuse_given_parameters(
            OWN, "is for a script", f"write: ampcompare {command} [OPTIONS] -- SCRIPT ARGS..."
        )
        return None
    refuse_given_parameters(NOT_FOR_SCRIPTS, OF_OWN_LOOP, GIVE_OWN_OPTION)
    script: ScriptConfig = script_config(
        words,
        metrics=parameters["metric"],
        seed_arg=parameters["seed_arg"],
        shift_seeds=parameters["shift_seeds"],
        max_steps=parameters.get(parameter_name_of_setting("recipe.max_steps")),
        compat_torch=parameters["compat_torch"],
        mask=parameters.get("mask") or (),
        torchrun=parameters["nproc_per_node"] is not None,
    )
    return Layer("script after --", {"script": script.model_dump()})


def print_script_metrics(config: RunConfig) -> int:
    """Print what metrics a script shows, each with the option to paste, and return the exit code."""
    from tabulate import tabulate

    from ampcompare.experiment.launch.script.listing import run_script_briefly, step_count_of_short_run

    found, steps = run_script_briefly(config), step_count_of_short_run(config)
    rows = [
        [printable_line(one.name, 40), one.source, one.count, f"{one.last:g}", one.option]
        for one in found.seen
    ]
    if rows:
        click.echo(tabulate(rows, headers=["metric", "from", "values", "last", "to take it"]))
    else:
        click.echo(
            f"the script showed no number that looks like a metric in {steps} steps; its training loss is always there"
        )
    if found.is_cut:
        click.echo(
            f"ampcompare: the script was ended after {steps} steps, so what it shows only later, as at the end of an "
            f"epoch, is not listed; let it run longer: --max-steps {10 * steps}",
            err=True,
        )
    if found.error is not None:
        click.echo(f"ampcompare: {found.error}", err=True)
    return 0 if found.error is None else 3
