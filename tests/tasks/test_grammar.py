"""The generated text: the same everywhere, and with structure to learn."""

from __future__ import annotations

import hashlib
import math
from collections import Counter

from ampcompare.tasks.lm import DETERMINERS, sentences


def test_the_text_never_changes() -> None:
    """Records of different machines and versions of Python are about one text; a change of it breaks comparisons."""
    text = "\n".join(sentences(200))
    assert (
        hashlib.sha256(text.encode()).hexdigest() == "f37f1414ae42aeba905b3bcd8464914f53f47c360854b29c3d51da745f81b4cc"
    )
    assert text.isascii()


def test_a_longer_text_begins_with_the_shorter() -> None:
    """The number of sentences does not change those before."""
    assert sentences(30)[:10] == sentences(10)


def test_words_agree_in_number() -> None:
    """The verb has the ending of the sentence's first determiner, also behind a relative clause."""
    seen = Counter()
    for sentence in sentences(300):
        words = sentence[:-1].lower().split()
        plural = words[0] in DETERMINERS[1]
        verbs = [word for word in words if word.endswith(("h", "w"))]
        assert {verb.endswith("w") for verb in verbs[: 1 + ("ke" in words)]} == {plural}
        seen[plural, "ke" in words] += 1
    assert min(seen[key] for key in ((True, True), (True, False), (False, True), (False, False))) > 10


def test_single_letters_say_little() -> None:
    """Letters alone leave more than four bits to guess, so that a model of context has much to gain."""
    counts = Counter("\n".join(sentences(300)))
    total = sum(counts.values())
    assert -sum(n / total * math.log2(n / total) for n in counts.values()) > 4
