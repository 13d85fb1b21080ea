"""Options in groups, the common ones in `-h` and all of them in `--help`."""

import inspect
import os
import re
import types
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import click

from ampcompare.api.arguments import parameter_docs_of
from ampcompare.base.option_rules import OptionRule, refuse_broken_rules
from ampcompare.cli.forms import CommandForm, resolve_form
from ampcompare.cli.values import WordChoice

GROUPS = (
    *("Arms", "Seeds and verdicts", "Your own script"),
    *("Data and model", "Optimizer", "Schedule", "Several processes"),
    *("Divergence and misuse", "Checkpoints", "Machine and timing", "Settings", "Options", "Output"),
)
ARMS, COMPARISON, SCRIPT, DATA, OPTIMIZER, SCHEDULE, PROCESSES, *_, OUTPUT = GROUPS
DIVERGENCE, CHECKPOINTS, MACHINE, SETTINGS, OTHER = GROUPS[7:12]
MAX_WIDTH = 100
BY_DEFAULT = re.compile(r"[;,.] by default (?=[^.]*$)", flags=re.IGNORECASE)

Function = TypeVar("Function", bound=Callable[..., Any])
OptionOf = Callable[..., Callable[[Any], Any]]  # of a parameter: what `make_option_from_signature` returns
# The old names of options keep working: the group reads them as the new ones.
OLD_NAMES = {
    "--convert-on-resume": "--resume-into-other-arm",
    "--no-convert-on-resume": "--no-resume-into-other-arm",
    "--fail-below-loss-scale": "--stop-loss-scale",
    "--layerwise-lr": "--layer-lr",
    "--log-interval": "--drain-every",
    "--max-consecutive-skips": "--max-skipped",
    "--objective": "--prefer",
    "--progress-interval": "--notify-every",
    "--save-apex-format": "--apex-layout",
    "--no-save-apex-format": "--no-apex-layout",
    "--size": "--scale",
    "--sweep": "--vary",
    "--target": "--target-top1",
}


def environment_variable_of_option(command: str, flag: str) -> str:
    """Return the environment variable that sets an option of a command."""
    return f"AMPCOMPARE_{command}_{flag.lstrip('-')}".replace("-", "_").upper()


class Option(click.Option):
    """An option in a group of the help, one of `GROUPS`, which also reads the old name of its variable."""

    def __init__(self, *names: Any, group: str = OTHER, **settings: Any) -> None:
        super().__init__(*names, **settings)
        self.group = group

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        """Return the value of the variable, or else of the old one."""
        old = OLD_NAMES.get(max(self.opts, key=len))
        value = super().resolve_envvar_value(ctx)
        return (
            value
            or (os.environ.get(environment_variable_of_option(ctx.info_name or "", old)) if old else None)
            or None
        )


def option(*names: str, group: str = OTHER, **settings: Any) -> Callable[[Function], Function]:
    """Return the decorator of an option in a group."""
    return click.option(*names, cls=Option, group=group, **settings)


def default_of_parameter(function: Callable[..., Any], parameter: str) -> Any:
    """Return the default of a parameter."""
    return inspect.signature(function).parameters[parameter].default


def make_option_from_signature(source: Callable[..., Any]) -> OptionOf:
    """Return `option` for the parameters of a function or class: each brings its name, type, default and help.

    The help is the line of the docstring; "; by default X" at its end becomes "[default: X]". What is passed to the
    option wins, such as a help about how the value is written in a shell.
    """
    parameters, texts = inspect.signature(source).parameters, parameter_docs_of(source)
    names_of_types = inspect.unwrap(source.__init__ if inspect.isclass(source) else source).__globals__

    def option_of(*names: str, **settings: Any) -> Callable[[Function], Function]:
        flag, _, off = names[0].partition("/")
        name = next((each for each in names if each[0] != "-"), flag.lstrip("-").replace("-", "_"))
        default = parameters[name].default
        # One at a time: other parameters may have types that are imported for type checkers alone.
        alone = type("", (), {"__annotations__": {name: parameters[name].annotation}})
        kind = type_inside_annotation(get_type_hints(alone, names_of_types)[name])
        found: dict[str, Any] = {"help": BY_DEFAULT.sub("  [default: ", texts[name])}
        if "[default: " in found["help"]:
            found["help"] += "]"
        if kind is bool:
            found |= {"default": default} if off else {"is_flag": True}
            found["help"] += "  [default: on]" if default else ""
        elif isinstance(default, int | float | str):
            found |= {"default": default, "show_default": default != ""}
        if get_origin(kind) is Literal:
            found["type"] = WordChoice(get_args(kind))
        elif kind in (int, float):
            found["type"] = kind
        return option(*names, **{**found, **settings})

    return option_of


def type_inside_annotation(annotation: Any) -> Any:
    """Return what is held where something is given: the type inside of `Annotated` and of `... | None`.

    None stands for several types.
    """
    if get_origin(annotation) in (Union, types.UnionType):
        held = [part for part in get_args(annotation) if part is not type(None)]
        annotation = held[0] if len(held) == 1 else None
    return annotation if get_origin(annotation) in (Literal, None) else get_args(annotation)[0]


def add_options(options: Sequence[Callable[[Function], Function]], function: Function) -> Function:
    """Add options to a command in the order in which they are given."""
    for add in reversed(options):
        function = add(function)
    return function


def help_group_of(parameter: click.Parameter) -> str:
    """Return the group of an option; those of plain click stand under `OTHER`."""
    return OUTPUT if "--help" in parameter.opts else getattr(parameter, "group", OTHER)


class Command(click.Command):
    """A command with its options in groups, and a short help.

    Args:
        common: flags that the short help shows, in order; without any it shows all.
        examples: lines of what is asked, each with the command that answers.
        forms: what the command does by which options, the first one that is asked for, which its function gets as
            `asked`; without any, one thing by all.
        rules: what its options need or exclude, whatever it does.
    """

    def __init__(
        self,
        *arguments: Any,
        common: Sequence[str] = (),
        examples: Sequence[tuple[str, str]] = (),
        forms: Sequence[CommandForm] = (),
        rules: Sequence[OptionRule] = (),
        **settings: Any,
    ) -> None:
        settings["context_settings"] = {
            "max_content_width": MAX_WIDTH,
            **settings.get("context_settings", {}),
        }
        super().__init__(*arguments, **settings)
        self.common = tuple(common)
        self.examples = tuple(examples)
        self.forms = tuple(forms)
        self.rules = tuple(rules)

    def invoke(self, ctx: click.Context) -> Any:
        asked = self.resolve_options(ctx)
        if asked is not None:
            ctx.params["asked"] = asked
        return super().invoke(ctx)

    def resolve_options(self, ctx: click.Context) -> CommandForm | None:
        """Return the form that a call asks for, None for a command with one; refuse options that cannot act in it.

        Raises:
            ConfigError: an option does not act in the form, or breaks a rule.
        """
        asked = resolve_form(ctx, self.forms) if self.forms else None
        refuse_broken_rules(self.rules, ctx.params)
        return asked

    def get_help_option_names(self, ctx: click.Context) -> list[str]:
        return ["--help"] if self.common else ["-h", "--help"]

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        def show(context: click.Context, parameter: click.Parameter, value: bool) -> None:
            if value and not context.resilient_parsing:
                click.echo(self._short_help_text(context), color=context.color)
                context.exit()

        short = Option(
            ["-h"], is_flag=True, is_eager=True, expose_value=False, group=OUTPUT, callback=show,
            help="show the common options",
        )  # fmt: skip
        return [*super().get_params(ctx), *([short] if self.common else [])]

    def _short_help_text(self, ctx: click.Context) -> str:
        """Return usage, summary, common options and examples."""
        formatter = ctx.make_formatter()
        self.format_usage(ctx, formatter)
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text((self.help or "").partition("\n\n")[0])
        flags = {
            flag: param for param in self.params if isinstance(param, click.Option) for flag in param.opts
        }
        _write_option_group(formatter, "Common options", [flags[flag] for flag in self.common], ctx)
        self._format_examples(formatter)
        formatter.write("\n--help lists all options.\n")
        return formatter.getvalue().rstrip("\n")

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_help_text(ctx, formatter)
        self._format_examples(formatter)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options group by group."""
        flags = [each for each in self.get_params(ctx) if isinstance(each, click.Option)]
        for name in GROUPS:
            _write_option_group(formatter, name, [each for each in flags if help_group_of(each) == name], ctx)

    def _format_examples(self, formatter: click.HelpFormatter) -> None:
        if self.examples:
            formatter.write("\nExamples:\n")
        for question, command in self.examples:
            formatter.write(f"  {question}\n    {command}\n")


def _write_option_group(
    formatter: click.HelpFormatter, title: str, options: Sequence[click.Option], ctx: click.Context
) -> None:
    if rows := [record for each in options if (record := each.get_help_record(ctx)) is not None]:
        with formatter.section(title):
            formatter.write_dl(rows, col_max=26)
