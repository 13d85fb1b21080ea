"""What a text must have before a rule finds anything in it, so that most files are never parsed."""

import functools
import re

# These count where they stand alone, not as a part of another name; the others count anywhere.
ALONE = frozenset({
    "allow_tf32", "amp", "apex", "autocast", "binary_cross_entropy", "clip_grad_norm", "half", "init", "optim", "step",
})  # fmt: skip
# A word of these stands for a pattern, which is looked for where the text in front of it is.
PATTERNS = {
    "type=bool": ("bool", re.compile(r"type\s*=\s*bool")),
    "dtype='auto'": ("auto", re.compile(r"""dtype\s*=\s*["']auto""")),
    "level 01": ("", re.compile(r"""["'][0o][0-3]["']""")),
    "fill call": ("", re.compile(r"f(?:ill_|(?<=masked_f)ill|ull(?:_like)?)[\s)\\]*\(")),
}


class WordsInText:
    """The words of one text; each is looked for once.

    Args:
        text: of a module.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._known: dict[str, bool] = {}

    def has_all_needed(self, needs: tuple[str, ...]) -> bool:
        """Return whether the text has one word of each group of `needs`, whose words are joined by `|`."""
        return all(self._has_word_of_group(group) for group in needs)

    def _has_word_of_group(self, group: str) -> bool:
        """Return whether the text has one word of a group."""
        known = self._known.get(group)
        if known is None:
            words = _words_of_group(group)
            known = (
                any(map(self._has_word_of_group, words)) if len(words) > 1 else self._has_whole_word(group)
            )
            self._known[group] = known
        return known

    def _has_whole_word(self, word: str) -> bool:
        part, pattern = PATTERNS.get(word) or (word, _pattern_of_whole_word(word) if word in ALONE else None)
        return part in self._text and (pattern is None or pattern.search(self._text) is not None)


@functools.cache
def _words_of_group(group: str) -> list[str]:
    """Return the words of a group, which `|` joins."""
    return group.split("|")


@functools.cache
def _pattern_of_whole_word(word: str) -> re.Pattern[str]:
    """Return the pattern of a word; one that begins with text is faster than one that begins with a border."""
    return re.compile(rf"{word}(?<!\w{word})(?!\w)")
