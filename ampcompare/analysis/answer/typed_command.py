"""Change options of a command line as typed, for commands to paste."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["TypedCommand", "seeds_text"]

PROGRAM = ["ampcompare", "compare"]


@dataclass(frozen=True)
class TypedCommand:
    """The words of `ampcompare compare ...`, and those of a script behind `--`."""

    words: tuple[str, ...]
    script: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> TypedCommand | None:
        """Read a command line; None if it is not a single `ampcompare compare`, such as another command."""
        try:
            words = shlex.split(text)
        except ValueError:
            return None
        if words[:2] != PROGRAM or any(word.endswith(";") for word in words):
            return None
        end = words.index("--") if "--" in words else len(words)
        return cls(tuple(words[:end]), tuple(words[end:]))

    def __str__(self) -> str:
        return shlex.join([*self.words, *self.script])

    def value(self, *names: str) -> str | None:
        """Return what an option was given last, under any of its names; None if it was not."""
        found = None
        for index, word in enumerate(self.words):
            if word in names and index + 1 < len(self.words):
                found = self.words[index + 1]
            elif attached := _attached(word, names):
                found = word[len(attached) :]
        return found

    def without(self, *names: str) -> TypedCommand:
        """Return the command without an option that takes a value."""
        return TypedCommand(tuple(word for word in self._blanked(names) if word is not None), self.script)

    def with_option(self, name: str, value: str, *other_names: str) -> TypedCommand:
        """Return the command with an option at another value, in its place, or at the end."""
        words = self._blanked((name, *other_names))
        index = words.index(None) if None in words else len(words)
        rest = [word for word in words[index:] if word is not None]
        return TypedCommand((*(word for word in words[:index] if word is not None), name, value, *rest), self.script)

    def _blanked(self, names: Sequence[str]) -> list[str | None]:
        """Return the words with None instead of an option and of its value."""
        words: list[str | None] = []
        is_value = False
        for word in self.words:
            is_option = not is_value and (word in names or bool(_attached(word, names)))
            words.append(None if is_option or is_value else word)
            is_value = is_option and word in names
        return words

    def elsewhere(self, suffix: str, *, same_recipe: bool = False) -> TypedCommand:
        """Return the command with its own run directory.

        Args:
            suffix: behind the name of the folder, or the tag of the default one.
            same_recipe: the default folder, which is named by the recipe, would be the same.
        """
        folder = self.value("-o", "--output-dir")
        if folder is not None:
            return self.with_option("-o", f"{folder.rstrip('/')}-{suffix}", "--output-dir")
        return self.with_option("--tag", suffix) if same_recipe else self


def _attached(word: str, names: Sequence[str]) -> str:
    """Return how far a word is the name of an option with its value behind it, as in `--seeds=0-2`; "" if it is not."""
    for name in names:
        start = f"{name}=" if name.startswith("--") else name
        if word.startswith(start) and word not in names and (name.startswith("--") or not word.startswith("--")):
            return start
    return ""


def seeds_text(seeds: Sequence[int]) -> str:
    """Return seeds as `--seeds` takes them, such as `0-4,7`."""
    ranges: list[list[int]] = []
    for seed in sorted(seeds):
        if ranges and seed == ranges[-1][1] + 1:
            ranges[-1][1] = seed
        else:
            ranges.append([seed, seed])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ranges)
