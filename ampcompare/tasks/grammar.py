"""Generated text: sentences of a small made-up language with grammar, the same ones on every machine and Python."""

from __future__ import annotations

import random
from collections.abc import Sequence

from ampcompare.tasks.randomness import derive

__all__ = ["sentences"]

CONSONANTS = "bdfgklmnprstvz"
VOWELS = "aeiou"
NOUNS, VERBS, ADJECTIVES = 120, 60, 40
DETERMINERS = (("ta", "una", "so"), ("tai", "unai", "soi"))  # singular, plural
NOUN_ENDINGS = ("", "x")
VERB_ENDINGS = ("h", "w")
SINGULAR, PLURAL = 0, 1


def sentences(count: int) -> list[str]:
    """Return `count` sentences of 20 to 90 letters, in ASCII.

    Words follow Zipf's law. Determiner, noun and verb agree in number, also over a relative clause that stands
    between them, so that a model of more context predicts better.
    """
    language = _Language()
    return [language.sentence() for _ in range(count)]


class _Language:
    """Draws from its own generator by `random.random`, whose numbers Python promises not to change."""

    def __init__(self) -> None:
        self._random = random.Random(derive("grammar")).random
        self._nouns, self._verbs, self._adjectives = map(self._words, (NOUNS, VERBS, ADJECTIVES))

    def sentence(self) -> str:
        number = self._number()
        words = [*self._noun_phrase(number)]
        if self._random() < 0.25:
            words += ["ke", self._verb(number), *self._noun_phrase(self._number())]
        words += [self._verb(number), *self._noun_phrase(self._number())]
        if self._random() < 0.3:
            words += ["po", *self._noun_phrase(self._number())]
        return " ".join(words).capitalize() + ("?" if self._random() < 0.15 else ".")

    def _noun_phrase(self, number: int) -> Sequence[str]:
        adjectives = [self._pick(self._adjectives)] if self._random() < 0.3 else []
        return self._pick(DETERMINERS[number]), *adjectives, self._pick(self._nouns) + NOUN_ENDINGS[number]

    def _verb(self, number: int) -> str:
        return self._pick(self._verbs) + VERB_ENDINGS[number]

    def _number(self) -> int:
        return PLURAL if self._random() < 0.4 else SINGULAR

    def _words(self, count: int) -> Sequence[str]:
        words: dict[str, None] = {}
        while len(words) < count:
            syllables = 2 + (self._random() < 0.5)
            words["".join(self._letter(CONSONANTS) + self._letter(VOWELS) for _ in range(syllables))] = None
        return list(words)

    def _letter(self, letters: str) -> str:
        return letters[int(self._random() * len(letters))]

    def _pick(self, words: Sequence[str]) -> str:
        # The whole part of a power of uniform exponent is k with probability log((k + 1) / k) / log(n + 1): Zipf's law.
        return words[int((len(words) + 1) ** self._random()) - 1]
