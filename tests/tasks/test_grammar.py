"""The generated text: the same everywhere."""

import hashlib

from ampcompare.tasks.lm import sentences


def test_the_text_never_changes() -> None:
    """Records of different machines and versions of Python are about one text; a change of it breaks comparisons."""
    text = "\n".join(sentences(200))
    digest = "f37f1414ae42aeba905b3bcd8464914f53f47c360854b29c3d51da745f81b4cc"
    assert hashlib.sha256(text.encode()).hexdigest() == digest
    assert sentences(10) == text.splitlines()[:10]
