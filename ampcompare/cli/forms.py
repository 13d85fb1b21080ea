"""The forms of a command: what asks for each, and which of the command's options act in it.

A command such as `judge` does several things: verdicts on a table, `--against`, `--logprobs`. An option that is given
where the call asks for a form that does not read it is refused; none is without effect in silence. Which form that is
is decided here, once: the function of a command gets it as `asked`. What an option needs or excludes in every form is a
rule of the command (`base/option_rules.py`). Which *settings* a command reads stands in `settings/reads.py`.
"""

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from ampcompare.base.errors import ConfigError
from ampcompare.base.option_rules import is_option_given, refusal_sentence


@dataclass(frozen=True)
class CommandForm:
    """One of the things that a command does.

    Attributes:
        asked_by: how a message names what asks for the form, such as "--against"; "" where nothing does: the last form.
        reads: holds the names of the parameters that act in it.
        is_asked: answers from the values of all parameters, by their names, whether the form is asked for.
        because: follows "is not for --against" in a message, such as ", which reads no table".
        advice: follows "is for --against" in a message.
    """

    asked_by: str
    reads: Container[str]
    is_asked: Callable[[Mapping[str, Any]], bool] = lambda values: True
    because: str = ""
    advice: str = "give both"


@dataclass(frozen=True)
class AllNamesBut:
    """Holds every name but some: what acts in a form with many options."""

    names: tuple[str, ...]

    def __contains__(self, name: object) -> bool:
        return name not in self.names


def form_asked_by_parameter(
    asked_by: str, parameter: str, reads: Iterable[str] | AllNamesBut, because: str = "", advice: str = ""
) -> CommandForm:
    """Return the form that a parameter asks for when it has a value; it is one of those that act."""

    def has_value(values: Mapping[str, Any]) -> bool:
        return is_option_given(values[parameter])

    acting = reads if isinstance(reads, AllNamesBut) else frozenset({parameter, *reads})
    return CommandForm(asked_by, acting, has_value, because, advice or CommandForm.advice)


def default_form(reads: Iterable[str] | AllNamesBut) -> CommandForm:
    """Return what a command does where no other form is asked for."""
    return CommandForm("", reads if isinstance(reads, AllNamesBut) else frozenset(reads))


def form_asked_for(forms: Sequence[CommandForm], values: Mapping[str, Any]) -> CommandForm:
    """Return what a command does: the first of its forms that is asked for; the last one always is.

    Args:
        forms: of the command.
        values: of all parameters, by their names.
    """
    return next(each for each in forms if each.is_asked(values))


def resolve_form(context: click.Context, forms: Sequence[CommandForm]) -> CommandForm:
    """Return the form that a call asks for; refuse an option that does not act in it.

    Args:
        context: of a parsed call.
        forms: of its command.

    Raises:
        ConfigError: names the option, and the form that it is for or that it is not for.
    """
    asked = form_asked_for(forms, context.params)
    for parameter in given_parameters(context):
        if parameter.name in asked.reads:
            continue
        name = parameter_name_in_messages(parameter, context.params.get(parameter.name or ""))
        if asked.asked_by:
            raise ConfigError(
                refusal_sentence(name, f"is not for {asked.asked_by}{asked.because}", "leave it out")
            )
        others = [each for each in forms if parameter.name in each.reads and each.asked_by]
        names = " or ".join(each.asked_by for each in others)
        raise ConfigError(refusal_sentence(name, f"is for {names}", others[-1].advice))
    return asked


def given_parameters(context: click.Context) -> list[click.Parameter]:
    """Return the parameters of a call that were given, by the command line or a variable."""
    given = []
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        # Several flags may set one parameter, each to a value of its own.
        flag_value = getattr(parameter, "flag_value", None)
        is_other_flag = isinstance(flag_value, str) and flag_value != context.params.get(parameter.name or "")
        if source not in (None, click.core.ParameterSource.DEFAULT) and not is_other_flag:
            given.append(parameter)
    return given


def refuse_given_parameters(names: Collection[str], why: str, advice: str) -> None:
    """Refuse the first of some parameters of the present command that was given.

    It is for what only a file tells that another parameter names; a `CommandForm` or an `OptionRule` is for all else.

    Args:
        names: of the parameters.
        why: follows the flag, such as "is for a script".
        advice: what to do.

    Raises:
        ConfigError: one of them was given.
    """
    context = click.get_current_context()
    for parameter in given_parameters(context):
        if parameter.name in names:
            name = parameter_name_in_messages(parameter, context.params.get(parameter.name or ""))
            raise ConfigError(refusal_sentence(name, why, advice))


def parameter_name_in_messages(parameter: click.Parameter, value: Any) -> str:
    """Return the longest spelling of an option that has a value, or what the usage calls an argument.

    Of words that are handed on, such as the options behind `config show`, it is the words themselves.
    """
    if isinstance(parameter, click.Argument):
        if parameter.type is click.UNPROCESSED:
            return " ".join(value)
        return parameter.human_readable_name.strip("[]")
    spellings = parameter.secondary_opts if value is False and parameter.secondary_opts else parameter.opts
    return max(spellings, key=len)
