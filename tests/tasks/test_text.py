"""Text as samples: windows, lines with masks, files, and what cannot be read."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ampcompare.base.errors import ConfigError
from ampcompare.tasks.lm import sentences, text_data


def test_windows_predict_each_byte_once(tmp_path: Path) -> None:
    """Windows overlap by the byte that is only read; the last tenth of the file is for validation."""
    text = bytes(range(200))
    path = tmp_path / "all.bin"
    path.write_bytes(text)
    data = text_data(f"text:{path}", seed=0, sequence_length=6)
    train, val = data.train["tokens"], data.val["tokens"]
    assert train.dtype is torch.uint8
    assert (train.shape, val.shape) == ((29, 7), (3, 7))
    assert train[:, 1:].flatten().tolist() == list(range(1, 29 * 6 + 1))
    assert train[1:, 0].tolist() == train[:-1, -1].tolist()
    assert val[:, 1:].flatten().tolist() == list(range(181, 199))


def test_lines_are_filled_up_and_masked(tmp_path: Path) -> None:
    """A line lies between two newlines, longer ones are cut, blank ones left out; the mask has what is predicted."""
    path = tmp_path / "lines.txt"
    path.write_text("ab\n\nabcdefgh\nc\n" + "xy\n")
    data = text_data(f"lines:{path}", seed=0, sequence_length=5)
    rows = [bytes(row.tolist()) for row in data.train["tokens"]]
    assert rows == [b"\nab\n\0\0", b"\nabcde", b"\nc\n\0\0\0"]
    assert data.train["mask"].tolist() == [[True] * 3 + [False] * 2, [True] * 5, [True] * 2 + [False] * 3]
    assert [bytes(row.tolist()) for row in data.val["tokens"]] == [b"\nxy\n"]


def test_a_users_texts(user_module: Callable[[str, str], None]) -> None:
    """A factory gives both texts, as bytes or str; other values are refused."""
    user_module("mytext", "def good():\n    return 'abcdefgh' * 4, b'abcdefgh'\n\n\ndef bad():\n    return 'x'\n")
    data = text_data("mytext:good", seed=0, sequence_length=7)
    assert (data.num_train, data.num_val) == (4, 1)
    with pytest.raises(ConfigError, match="must return two texts"):
        text_data("mytext:bad", seed=0, sequence_length=7)


@pytest.mark.parametrize(
    ("name", "length", "message"),
    [
        ("grammer", 8, "did you mean 'grammar'"),
        ("text:none.txt", 8, r"text:none.txt cannot be read \(FileNotFoundError: .*No such file"),
        ("grammar", 20_000, "the validation part of grammar has 16078 bytes, too few"),
    ],
)
def test_texts_that_cannot_be(name: str, length: int, message: str) -> None:
    """A wrong name, a missing file and too little text each have their message."""
    with pytest.raises(ConfigError, match=message):
        text_data(name, seed=0, sequence_length=length)


def test_the_text_never_changes() -> None:
    """Records of different machines and versions of Python are about one text; a change of it breaks comparisons."""
    text = "\n".join(sentences(200))
    digest = "f37f1414ae42aeba905b3bcd8464914f53f47c360854b29c3d51da745f81b4cc"
    assert hashlib.sha256(text.encode()).hexdigest() == digest
    assert sentences(10) == text.splitlines()[:10]
