"""A stack: another environment of Python and torch, named, with the words that start its Python."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path, PurePath

from pydantic import Field

from ampcompare.backends.arm import parse_arms
from ampcompare.base.errors import ConfigError, suggestion_text
from ampcompare.base.option_rules import refusal_sentence
from ampcompare.settings.recipe import FrozenSettings

NAME = re.compile(r"[A-Za-z][\w.-]{0,39}")
AT = re.compile(r"@([^@,:=\s]*)\s*(?=,|$)")
PYTHON = re.compile(r"(python|pypy)[\d.]*(\.exe)?")


class StackConfig(FrozenSettings):
    """Another environment of Python and torch, in which a cell trains."""

    name: str
    command: tuple[str, ...] = Field(
        description="words that start its Python, as in /envs/old/bin/python; {cell} and {cwd} are filled in"
    )

    def text(self) -> str:
        """Return it as --stack has it."""
        return f"{self.name}={shlex.join(self.command)}"

    def python_command_for_cell(self, cell: Path) -> list[str]:
        """Return the words that start its Python for a cell of this folder."""
        values = {"{cell}": str(cell.resolve()), "{cwd}": str(Path.cwd())}
        filled = list(self.command)
        for name, value in values.items():
            filled = [word.replace(name, value) for word in filled]
        return filled


def arm_text_with_stack(arm: str, stack: str | None) -> str:
    """Return an arm as a command and a file name it with its stack, such as `script@old`.

    Args:
        arm: its text.
        stack: the name of the environment in which it trains; None for this one.
    """
    return arm if stack is None else f"{arm}@{stack}"


def parse_stacks(texts: Iterable[str] | Mapping[str, str]) -> dict[str, StackConfig]:
    """Read stacks such as `old=/envs/old/bin/python`, or NAME and COMMAND as a mapping has them.

    A command line of several words that does not end with a Python, or its options, gets `python` as its last word.

    Raises:
        ConfigError: a name is no word or given twice, or a command is missing or cannot be read.
    """
    pairs = (
        texts.items()
        if isinstance(texts, Mapping)
        else [_parse_stack_name_and_command(text) for text in texts]
    )
    stacks: dict[str, StackConfig] = {}
    for name, command in pairs:
        if not NAME.fullmatch(name):
            raise ConfigError(
                f"--stack {name}={command}: the name is a word that begins with a letter, as in old"
            )
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise ConfigError(f"--stack {name}={command}: the command cannot be read: {error}") from None
        if not words:
            raise ConfigError(
                f"--stack {name}= has no command; give what starts its Python, as in /envs/old/bin/python"
            )
        if name in stacks:
            raise ConfigError(f"--stack {name} is given twice; each stack needs a name of its own")
        programs = [word for word in words if not word.startswith("-")]
        if len(words) > 1 and not PYTHON.fullmatch(PurePath(programs[-1] if programs else "").name):
            words.append("python")
        stacks[name] = StackConfig(name=name, command=tuple(words))
    return stacks


def _parse_stack_name_and_command(text: str) -> tuple[str, str]:
    name, equals, command = text.partition("=")
    if not equals:
        raise ConfigError(f"--stack {text!r} is not NAME=COMMAND, as in old=/envs/old/bin/python")
    return name.strip(), command


def stack_names_in(texts: Sequence[str]) -> set[str]:
    """Return the names behind `@` in texts of arms, whether such stacks are known or not."""
    return {at[1] for text in texts for at in AT.finditer(text)}


def arms_with_stacks(
    texts: Sequence[str], stacks: Mapping[str, StackConfig]
) -> list[tuple[str, StackConfig | None]]:
    """Read arms of which some are ARM@STACK.

    Args:
        texts: each one arm or a list, such as `fp32,O2@old`.
        stacks: the environments that are known, by name.

    Returns:
        The text of each arm in its one spelling, with its stack; None for the environment of this process.

    Raises:
        ConfigError: an arm cannot be read, or a stack is not known.
    """
    found: list[tuple[str, StackConfig | None]] = []
    for text in texts:
        begin = 0
        for at in AT.finditer(text):
            arms = [str(arm) for arm in parse_arms([text[begin : at.start()].lstrip(",")])]
            found += [*((arm, None) for arm in arms[:-1]), (arms[-1], _find_stack(at[1], stacks))]
            begin = at.end()
        if begin == 0 or text[begin:].strip(" ,"):
            found += [(str(arm), None) for arm in parse_arms([text[begin:].lstrip(" ,") if begin else text])]
    return found


def first_weights_stack(name: str, stacks: Mapping[str, StackConfig], *, has_script: bool) -> StackConfig:
    """Return the stack whose first weights all cells begin with.

    Args:
        name: what `--first-weights` has.
        stacks: the environments that are known, by name.
        has_script: whether a script trains.

    Raises:
        ConfigError: the stack is not known, or a recipe trains, whose weights follow from its seed.
    """
    if not has_script:
        why = "is for a script after --: the weights of a recipe are those of its seed"
        raise ConfigError(refusal_sentence(f"--first-weights {name}", why, "leave it out"))
    if name not in stacks:
        hint = f" {suggestion_text(name, stacks)}" if stacks else ""
        raise ConfigError(
            f"--first-weights {name} names a stack that is not given: add --stack {name}=COMMAND.{hint}".rstrip(
                "."
            )
        )
    return stacks[name]


def require_used_stacks(stacks: Mapping[str, StackConfig], used_names: Collection[str | None]) -> None:
    """Check that each stack is one of an arm, or one whose first weights are used.

    Args:
        stacks: the environments that are known, by name.
        used_names: the names of those that arms and first weights name.

    Raises:
        ConfigError: nothing trains in one of them.
    """
    if unused := sorted(stacks.keys() - used_names):
        advice = f"name one, as in --arm script@{unused[0]}"
        raise ConfigError(refusal_sentence(f"--stack {unused[0]}", "needs an arm that trains there", advice))


def _find_stack(name: str, stacks: Mapping[str, StackConfig]) -> StackConfig:
    if name not in stacks:
        hint = f" {suggestion_text(name, stacks)}" if stacks else ""
        raise ConfigError(
            f"@{name} names a stack that is not given: add --stack {name}=COMMAND.{hint}".rstrip(".")
        )
    return stacks[name]
