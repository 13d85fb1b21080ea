"""Values of options that are checked at once."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import click

from ampcompare.backends.apex_levels import LEVELS
from ampcompare.base.environment.variables import FALSE_WORDS, TRUE_WORDS
from ampcompare.base.errors import close_matches
from ampcompare.base.tensors.type_names import HALF_NAMES

if TYPE_CHECKING:
    StringChoice = click.Choice[str]
else:  # older versions of click, whose types are not generic
    StringChoice = click.Choice


class WordChoice(StringChoice):
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
        known = {_normalized_word(word): word for word in self.choices} | {
            _normalized_word(key): to for key, to in self.others.items()
        }
        if (word := known.get(_normalized_word(str(value)))) is not None:
            return word
        close = [known[word] for word in close_matches(_normalized_word(str(value)), known)]
        meant = self.mistakes.get(str(value)) or (close[0] if close else None)
        hint = f" Did you mean {meant!r}?" if meant else ""
        text = f"{value!r} is not one of {', '.join(map(repr, self.choices))}.{hint}"
        raise click.BadParameter(text, ctx, param)


def _normalized_word(word: str) -> str:
    return word.lower().replace("_", "-")


class _ShellCompletedPath(click.Path):
    """A path, which the shell completes; whether it is there is checked where it is used."""

    def __init__(self, name: str) -> None:
        super().__init__(readable=False)
        self.name = name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Refuse an empty path, such as that of a variable that is not set."""
        if not value:
            raise click.BadParameter("the path is empty; leave it out, or name one.", ctx, param)
        return super().convert(value, param, ctx)


FILE, FOLDER, FILE_OR_FOLDER = map(_ShellCompletedPath, ("file", "dir", "file|dir"))
FLAG = WordChoice(
    ("true", "false"), {**dict.fromkeys(TRUE_WORDS, "true"), **dict.fromkeys(FALSE_WORDS, "false")}
)
LEVEL = WordChoice(LEVELS, mistakes={level.replace("O", "0"): level for level in LEVELS})
HALF = WordChoice(HALF_NAMES, {"float16": "fp16", "half": "fp16", "bfloat16": "bf16"})
