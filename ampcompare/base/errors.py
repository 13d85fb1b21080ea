"""Every error that a user can meet, its exit code, and what a misspelled name in a message was probably meant to be."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

MAX_LENGTH = 80  # matching takes time with the square of the length, and a name can come from anywhere
MAX_LISTED = 12


@dataclass(frozen=True)
class ArmAdvice:
    """What to do where an arm cannot train.

    Attributes:
        arms: texts of others that may, the most useful first.
        remedy: what else helps, in words.
    """

    arms: tuple[str, ...] = ()
    remedy: str = ""

    def __str__(self) -> str:
        """Return it in words; "" for none."""
        *most, last = self.arms or ("",)
        arms = f"compare {', '.join(most)}{' or ' * bool(most)}{last}" if last else ""
        return ", or ".join(filter(None, [arms, self.remedy]))

    def with_arms(self, arms: Sequence[str]) -> "ArmAdvice":
        """Return it with these arms in the place of its own."""
        return replace(self, arms=tuple(arms))


class AmpCompareError(Exception):
    """Base of all errors meant for users: the message says what was seen and what to do.

    Attributes:
        advice: what to do, where other arms may be a part of it.
        seen: the message without that advice.
    """

    exit_code: ClassVar[int] = 3
    advice: ArmAdvice = ArmAdvice()
    seen: str = ""

    @classmethod
    def with_advice(cls, seen: str, *arms: str, remedy: str = "") -> Self:
        """Return an error that ends with advice.

        Args:
            seen: what happened.
            arms: texts of other arms that may train what this one cannot, the most useful first.
            remedy: what else helps, in words.
        """
        advice = ArmAdvice(arms, remedy)
        error = cls(message_with_advice(seen, advice))
        error.advice, error.seen = advice, seen
        return error


def message_with_advice(seen: str, advice: ArmAdvice) -> str:
    """Return an error in words.

    Args:
        seen: what happened.
        advice: what to do; that may be nothing.
    """
    return "; ".join(filter(None, [seen, str(advice)]))


class GateFailed(AmpCompareError):
    """An arm exceeds a limit that was set.

    Args:
        message: names the arm and the limit, in one sentence.

    Attributes:
        comparison: the results, an `ampcompare.results.records.comparison.Comparison`.
    """

    exit_code = 1

    def __init__(self, message: str, comparison: object) -> None:
        super().__init__(message)
        self.comparison = comparison


class ConfigError(AmpCompareError):
    """An option, arm, recipe or user's factory cannot be used."""

    exit_code = 2


class UnusableInput(AmpCompareError):
    """What `judge --against` was asked to compare cannot be used; its exit codes 1 and 2 are answers, hence another."""

    exit_code = 64


class UnsupportedCombination(ConfigError):
    """Each part is legal; together they are not."""


class EnvironmentUnfit(AmpCompareError):
    """This machine lacks something that was asked for."""

    exit_code = 4


class BackendUnavailable(EnvironmentUnfit):
    """A backend, engine or package is not installed, or cannot work here."""


class ExtraMissing(BackendUnavailable, ImportError):
    """Packages of an extra such as `ampcompare[torch]` are not installed, or too old; an ImportError too."""


class PreparationError(AmpCompareError):
    """Models or optimizers cannot be prepared as they are."""


class ScalingError(AmpCompareError):
    """Loss-scaling calls came in an order that has no meaning."""


class GuardError(AmpCompareError):
    """A guard has found a mistake in the use of mixed precision, and guards are strict."""


class LaunchError(AmpCompareError):
    """A worker process died or could not be started."""


class RanksDiffer(AmpCompareError):
    """Processes that train together do not hold the same weights, model, settings or packages."""


class CheckpointError(AmpCompareError):
    """A checkpoint cannot be read, or does not fit the model."""

    exit_code = 2


class ConversionError(CheckpointError):
    """A checkpoint cannot be carried to another layout."""


class RecordError(AmpCompareError):
    """A record or report file cannot be read."""

    exit_code = 2


class Ended(AmpCompareError):
    """Asked to end by SIGTERM or SIGHUP."""

    exit_code = 143


def close_matches(name: str, known: Iterable[str], *, count: int = 1) -> list[str]:
    """Return the names most similar to one that is unknown, best first.

    Args:
        name: what was written; only its first characters are compared.
        known: what could have been written.
        count: at most so many are returned; none if nothing is similar.
    """
    from difflib import get_close_matches  # here, since every command line imports this file and few need it

    return get_close_matches(name[:MAX_LENGTH], list(known), n=count)


def require_one_of(choices: Collection[str | None], name: str, value: str | None) -> None:
    """Refuse a value that is none of some choices.

    Args:
        choices: the values that there are; `None` among them allows that none was given.
        name: of the setting, for the error.
        value: what was given.

    Raises:
        ConfigError: it is another one; the error names the choices.
    """
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}; choose one of {', '.join(filter(None, choices))}")


def suggestion_text(name: str, known: Iterable[str], *, count: int = 1) -> str:
    """Return the end of an error sentence: what a name was probably meant to be, or else which names are known.

    Args:
        name: what was written.
        known: what could have been written, in the order in which it is listed.
        count: so many guesses are named at most.
    """
    names = list(known)
    matches = close_matches(name, names, count=count)
    if matches:
        return f"did you mean {' or '.join(map(repr, matches))}?"
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return f"known are {', '.join(names[:MAX_LISTED]) or 'none'}{more}"
