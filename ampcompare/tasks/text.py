"""Text as a data set of bytes: windows of equal length, or one line a sample, filled up and with a mask.

Without a file it is generated: sentences of a small made-up language with grammar, the same on every machine.
"""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ampcompare.base.errors import BackendUnavailable, ConfigError, did_you_mean
from ampcompare.tasks.data import spread
from ampcompare.tasks.factory import blamed, named_by, resolve_factory
from ampcompare.tasks.randomness import derive
from ampcompare.tasks.tensor_data import TensorData

__all__ = ["BYTES", "sentences", "text_data"]

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


BYTES = 256
SENTENCES = 4000  # 160 kB
HOLDOUT = 10  # the last tenth is for validation
NEWLINE = 10


def text_data(
    name: str, *, seed: int, sequence_length: int, train_size: int | None = None, val_size: int | None = None
) -> TensorData:
    """Load text by its name. The last tenth is for validation, whatever the seed.

    Args:
        name: `grammar`, `python`, `text:PATH` or `module:factory` are cut into windows that overlap by one byte;
            `sentences` and `lines:PATH` have one line a sample, and longer lines are cut.
        seed: of the order of each epoch.
        sequence_length: bytes of a sample that are predicted, or the most of them.
        train_size: use this many samples, spread evenly over the text; `val_size` likewise.

    Returns:
        Batches of a dict with `tokens`, uint8 (batch, length + 1), whose first byte is only read. For lines there is
        `mask`, bool (batch, length), too: which of the bytes to predict are not padding. A line begins after a newline
        and ends with one.

    Raises:
        ConfigError: unknown name, a file that cannot be read, or too little text for a sample of each part.
        BackendUnavailable: this Python came without its help texts.
    """
    train, val, cut = _read(name)
    parts: list[Any] = []
    for text, size, word in ((train, train_size, "training"), (val, val_size, "validation")):
        samples = cut(text, sequence_length)
        count = len(samples["tokens"])
        if not count:
            raise ConfigError(
                f"the {word} part of {name} has {len(text)} bytes, too few for one sample of {sequence_length}; use a "
                "smaller --sequence-length or more text"
            )
        chosen = spread(count, size, what=f"the {word} part of {name}")
        parts.append({key: tensor[chosen] for key, tensor in samples.items()})
    return TensorData.of(name, *parts, seed=seed)


def _read(name: str) -> tuple[bytes, bytes, Callable[[bytes, int], dict[str, Tensor]]]:
    """Return the text of both parts, and what cuts it into samples."""
    kind, colon, path = name.partition(":")
    if name in _BUNDLED:
        source, cut = _BUNDLED[name]
        return *_parts(source(), cut), cut
    if kind in _FILES and colon:
        cut = _FILES[kind]
        try:
            return *_parts(Path(path).read_bytes(), cut), cut
        except OSError as error:
            raise ConfigError(f"--data {name}: {path!r} cannot be read: {error.strerror or error}") from error
    if colon:
        return *_from_factory(name), _windows
    known = [*_BUNDLED, *(f"{kind}:PATH" for kind in _FILES)]
    raise ConfigError(f"there is no text {name!r}; {did_you_mean(name, known)}")


def _parts(text: bytes, cut: Callable[[bytes, int], Any]) -> tuple[bytes, bytes]:
    """Cut a text in two, between two lines if its samples are lines."""
    at = len(text) - len(text) // HOLDOUT
    if cut is _lines:
        at = text.rfind(b"\n", 0, at) + 1
    return text[:at], text[at:]


def _from_factory(path: str) -> tuple[bytes, bytes]:
    factory = resolve_factory(path)
    with blamed(path, "calling it"):
        texts = factory(**named_by(factory, {}))
    if not isinstance(texts, Sequence) or len(texts) != 2 or not all(isinstance(text, bytes | str) for text in texts):
        raise ConfigError(f"factory {path} must return two texts, for training and validation, as bytes or str")
    train, val = (text.encode() if isinstance(text, str) else text for text in texts)
    return train, val


@functools.cache
def _grammar() -> bytes:
    return "\n".join(sentences(SENTENCES)).encode()


def _python() -> bytes:
    """Return what Python's `help()` knows of its language: half a megabyte, which differs between versions."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise BackendUnavailable(
            f"--data python reads the texts of help(), which this Python came without ({error}); use --data grammar"
        ) from error
    return "\n".join(inspect.cleandoc(topics[name]) for name in sorted(topics)).encode()


def _windows(text: bytes, length: int) -> dict[str, Tensor]:
    """Return windows of `length + 1` bytes, each beginning with the last byte of the one before."""
    if len(text) <= length:
        return {"tokens": torch.empty(0, length + 1, dtype=torch.uint8)}
    # A copy: a tensor of the windows' view would not be the data set's own.
    return {"tokens": torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, length + 1, length).contiguous()}


def _lines(text: bytes, length: int) -> dict[str, Tensor]:
    """Return each line that is not blank between two newlines, cut to `length` bytes to predict, and masks."""
    lines = [(b"\n" + line + b"\n")[: length + 1] for line in text.splitlines() if line.strip()]
    longest = max(map(len, lines), default=1)
    tokens = np.zeros((len(lines), longest), dtype=np.uint8)
    for row, line in zip(tokens, lines, strict=True):
        row[: len(line)] = np.frombuffer(line, dtype=np.uint8)
    lengths = torch.tensor([len(line) for line in lines])
    mask = torch.arange(1, longest) < lengths[:, None]
    return {"tokens": torch.from_numpy(tokens), "mask": mask}


_BUNDLED: dict[str, tuple[Callable[[], bytes], Callable[[bytes, int], dict[str, Tensor]]]] = {
    "grammar": (_grammar, _windows),
    "sentences": (_grammar, _lines),
    "python": (_python, _windows),
}
_FILES = {"text": _windows, "lines": _lines}
