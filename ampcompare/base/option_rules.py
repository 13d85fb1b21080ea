"""What an option needs or excludes: declared once, next to the options, and refused by one function.

`FORMS` of a command say which options act in what it does (`cli/forms.py`); a rule holds in all that it does. A rule on
options that Python has too, such as `budget_seconds`, stands with their fields (`experiment/run_options.py`), one on
flags alone with the command. The sentence is the same for all: what was given, what it needs or is not for, what to do.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ampcompare.base.errors import ConfigError

Values = Mapping[str, Any]


@dataclass(frozen=True)
class OptionRule:
    """What holds where an option is given.

    Attributes:
        subject: what a message begins with: the option as users write it, or the command.
        why: follows it, such as "needs --seed N" or "is not for --ahead".
        advice: what to do about it.
        is_broken: answers from the values of all options, by the names of their parameters.
    """

    subject: str
    why: str
    advice: str
    is_broken: Callable[[Values], bool]


def rule_of_need(
    option: str, parameter: str, other: str, *others: str, because: str = "", advice: str = ""
) -> OptionRule:
    """Return the rule that an option acts only with another one.

    Args:
        option: as users write it.
        parameter: the name of its parameter.
        other: what it needs, as users write that.
        others: the parameters of which each would do.
        because: follows what it needs, such as ", whose offset it adds".
        advice: what to do; without it, to give both.
    """
    return OptionRule(
        option,
        f"needs {other}{because}",
        advice or "give both",
        lambda values: (
            is_option_given(values[parameter]) and not any(is_option_given(values[name]) for name in others)
        ),
    )


def rule_of_exclusion(
    option: str, parameter: str, other: str, other_parameter: str, because: str = ""
) -> OptionRule:
    """Return the rule that two options are not given together.

    Args:
        option: of which the refusal speaks, as it is typed.
        parameter: the name under which its value is held.
        other: the option that excludes it, as it is typed.
        other_parameter: the name under which that one's value is held.
        because: follows the refusal, with what joins it; "" for no reason.
    """
    return OptionRule(
        option,
        f"is not for {other}{because}",
        "give only one of them",
        lambda values: is_option_given(values[parameter]) and is_option_given(values[other_parameter]),
    )


def refuse_broken_rules(rules: Iterable[OptionRule], values: Values) -> None:
    """Refuse options that break a rule.

    Args:
        rules: the first that is broken makes the message.
        values: of all options that the rules ask for, by the names of their parameters.

    Raises:
        ConfigError: a rule is broken.
    """
    for rule in rules:
        if rule.is_broken(values):
            raise ConfigError(refusal_sentence(rule.subject, rule.why, rule.advice))


def refusal_sentence(subject: str, why: str, advice: str) -> str:
    """Return what is said of an option that cannot be used.

    Args:
        subject: what was given.
        why: it does not act here; the verb follows the subject.
        advice: what to do.
    """
    return f"{subject} {why}; {advice}"


def is_option_given(value: Any) -> bool:
    """Return whether an option has a value: 0 is one, no file and no repetition are none."""
    return value is not None and value is not False and value != () and value != []
