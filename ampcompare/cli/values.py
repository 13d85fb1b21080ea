"""Values of options: words that are checked at once, and names that the shell can complete."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from ampcompare.backends.apex_levels import LEVELS
from ampcompare.base.errors import close_matches

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    StringChoice = click.Choice[str]
    StringType = click.ParamType[str]
else:  # older versions of click, whose types are not generic
    StringChoice = click.Choice
    StringType = click.ParamType

__all__ = [
    "ARCH",
    "ARM",
    "ARM_LIST",
    "BACKEND",
    "CHECKPOINT",
    "DATA_SET",
    "DEVICE",
    "FILE",
    "FLAG",
    "FOLDER",
    "HALF",
    "JOBS",
    "LEVEL",
    "OPTIMIZER_NAME",
    "RECIPE",
    "TASK",
    "Choice",
    "Name",
    "Place",
]


class Choice(StringChoice):
    """One of some words, in any case and with `_` for `-`; a mistyped one is met by the nearest.

    Args:
        others: further words that are accepted, with the word that each stands for.
        mistakes: words that are refused, with the word that each was meant to be.
    """

    def __init__(
        self,
        choices: Iterable[str],
        others: Mapping[str, str] | None = None,
        *,
        mistakes: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(tuple(choices), case_sensitive=False)
        self.others = dict(others or {})
        self.mistakes = dict(mistakes or {})

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        words = "|".join(self.choices)
        return words if param.required or isinstance(param, click.Option) else f"[{words}]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        known = {_plain(word): word for word in self.choices} | {_plain(key): to for key, to in self.others.items()}
        if (word := known.get(_plain(str(value)))) is not None:
            return word
        close = [known[word] for word in close_matches(_plain(str(value)), known)]
        meant = self.mistakes.get(str(value)) or (close[0] if close else None)
        hint = f" Did you mean {meant!r}?" if meant else ""
        text = f"{value!r} is not one of {', '.join(map(repr, self.choices))}.{hint}"
        raise click.BadParameter(text, ctx, param)


class Name(StringType):
    """A text for which the shell offers names; whether there is such a thing is checked where it is used.

    Args:
        metavar: what the help calls it.
        names: called when the shell asks.
        several: whether names may be joined by commas.
    """

    name = "text"

    def __init__(self, metavar: str, names: Callable[[], Iterable[str]], *, several: bool = False) -> None:
        self.metavar = metavar
        self.names = names
        self.several = several

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return self.metavar

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the names that begin so, after what is already typed of a list."""
        from click.shell_completion import CompletionItem

        before, comma, begun = incomplete.rpartition(",") if self.several else ("", "", incomplete)
        names = [name for name in self.names() if name.lower().startswith(begun.lower())]
        return [CompletionItem(f"{before}{comma}{name}") for name in names]


class Jobs(StringType):
    """A number of cells from 1, or the word auto."""

    name = "jobs"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        text = str(value).strip().lower()
        if text == "auto":
            return text
        if not text.isdecimal() or int(text) < 1:
            self.fail(f"{value!r} is not a number of cells from 1, nor auto", param, ctx)
        return int(text)


class Place(StringType):
    """The path of a file or a folder, which the shell completes; whether it is there is checked where it is used.

    Args:
        metavar: what the help calls it.
        is_folder: whether only folders fit.
    """

    name = "path"

    def __init__(self, metavar: str, *, is_folder: bool = False) -> None:
        self.metavar = metavar
        self.kind = "dir" if is_folder else "file"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return self.metavar

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Leave it to the shell, which knows its folders."""
        from click.shell_completion import CompletionItem

        return [CompletionItem(incomplete, type=self.kind)]


def _plain(word: str) -> str:
    return word.lower().replace("_", "-")


def _arms() -> Sequence[str]:
    from ampcompare.backends.arm import SHORTHANDS
    from ampcompare.backends.catalog import described_backends
    from ampcompare.experiment.matrix import DEFAULT_ARMS

    return list(dict.fromkeys([*DEFAULT_ARMS, *map(_spell, SHORTHANDS), *described_backends()]))


def _spell(shorthand: str) -> str:
    return shorthand.upper() if shorthand[0] == "o" else shorthand


def _backends() -> Iterable[str]:
    from ampcompare.backends.catalog import described_backends

    return described_backends()


def _models() -> Iterable[str]:
    from ampcompare.experiment.choices import model_names

    return model_names()


def _tasks() -> Iterable[str]:
    from ampcompare.experiment.choices import task_names

    return task_names()


def _data_sets() -> Iterable[str]:
    from ampcompare.experiment.choices import data_names

    return data_names()


def _optimizers() -> Iterable[str]:
    from ampcompare.settings.optimizers import optimizer_names

    return optimizer_names()


def _recipes() -> Iterable[str]:
    from ampcompare.settings.file import recipe_names

    return recipe_names()


ARM = Name("ARM", _arms)
ARM_LIST = Name("ARM[,ARM...]", _arms, several=True)
BACKEND = Name("NAME", _backends)
ARCH = Name("NAME", _models)
TASK = Name("NAME", _tasks)
DATA_SET = Name("NAME", _data_sets)
OPTIMIZER_NAME = Name("NAME", _optimizers)
RECIPE = Name("NAME|FILE", _recipes)
FILE = Place("FILE")
JOBS = Jobs()
FOLDER = Place("DIR", is_folder=True)
CHECKPOINT = Place("auto|PATH")
DEVICE = Name("DEVICE", lambda: ("auto", "cpu", "cuda", "mps", "xpu"))
FLAG = Choice(
    ("true", "false"), {"yes": "true", "on": "true", "1": "true", "no": "false", "off": "false", "0": "false"}
)
LEVEL = Choice(LEVELS, mistakes={level.replace("O", "0"): level for level in LEVELS})
HALF = Choice(("fp16", "bf16"), {"float16": "fp16", "half": "fp16", "bfloat16": "bf16"})
