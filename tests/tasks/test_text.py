"""Text as samples, and the causal transformer: no look ahead, positions, sizes, and casts."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ampcompare.base.errors import ConfigError
from ampcompare.tasks.lm import Gpt, load_text_data, sentences


def test_windows_predict_each_byte_once(tmp_path: Path) -> None:
    """Windows overlap by the byte that is only read; the last tenth of the file is for validation."""
    text = bytes(range(200))
    path = tmp_path / "all.bin"
    path.write_bytes(text)
    data = load_text_data(f"text:{path}", seed=0, sequence_length=6)
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
    data = load_text_data(f"lines:{path}", seed=0, sequence_length=5)
    rows = [bytes(row.tolist()) for row in data.train["tokens"]]
    assert rows == [b"\nab\n\0\0", b"\nabcde", b"\nc\n\0\0\0"]
    assert data.train["mask"].tolist() == [[True] * 3 + [False] * 2, [True] * 5, [True] * 2 + [False] * 3]
    assert [bytes(row.tolist()) for row in data.val["tokens"]] == [b"\nxy\n"]


def test_a_users_texts(user_module: Callable[[str, str], None]) -> None:
    """A factory gives both texts, as bytes or str; other values are refused."""
    user_module(
        "mytext", "def good():\n    return 'abcdefgh' * 4, b'abcdefgh'\n\n\ndef bad():\n    return 'x'\n"
    )
    data = load_text_data("mytext:good", seed=0, sequence_length=7)
    assert (data.num_train, data.num_val) == (4, 1)
    with pytest.raises(ConfigError, match="must return two texts"):
        load_text_data("mytext:bad", seed=0, sequence_length=7)


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
        load_text_data(name, seed=0, sequence_length=length)


def test_the_text_never_changes() -> None:
    """Records of different machines and versions of Python are about one text; a change of it breaks comparisons."""
    text = "\n".join(sentences(200))
    digest = "f37f1414ae42aeba905b3bcd8464914f53f47c360854b29c3d51da745f81b4cc"
    assert hashlib.sha256(text.encode()).hexdigest() == digest
    assert sentences(10) == text.splitlines()[:10]


def make(**options: object) -> Gpt:
    """A model of eight features."""
    torch.manual_seed(0)
    return Gpt(32, width=8, heads=2, **options)  # type: ignore[arg-type]


def tokens(count: int = 3) -> Tensor:
    return torch.randint(32, (count, 12), generator=torch.Generator().manual_seed(0))


def test_later_tokens_change_nothing() -> None:
    """Logits depend on the token itself and those before it, to the last bit."""
    model, first = make(), tokens()
    other = first.clone()
    other[:, 7:] = 5
    before, after = model(first), model(other)
    assert before.shape == (3, 12, 32)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7:], after[:, 7:])


def test_rotary_scores_depend_on_the_distance() -> None:
    """The product of a rotated query and key is a function of how far apart they are."""
    from ampcompare.tasks.lm import _rotate_query_and_key

    query, key = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(1)).double()
    rotated = _rotate_query_and_key(query.expand(1, 1, 9, 8), key.expand(1, 1, 9, 8))
    scores = rotated[0][0, 0] @ rotated[1][0, 0].T
    for distance in (1, 4):
        values = scores.diagonal(-distance)
        torch.testing.assert_close(values, values[:1].expand_as(values), rtol=1e-5, atol=1e-6)
    assert abs(float(scores[4, 0] - scores[1, 0])) > 1e-2


def test_an_arm_reaches_the_attention() -> None:
    """Under autocast the products of attention are in bf16, which a fused kernel would decide by itself."""
    seen = []
    model = make(depth=1)
    matmul = torch.matmul

    def watched(*arguments: Tensor) -> Tensor:
        result = matmul(*arguments)
        seen.append(result.dtype)
        return result

    torch.matmul = watched
    try:
        with torch.autocast("cpu", torch.bfloat16):
            model(tokens())
    finally:
        torch.matmul = matmul
    assert seen == [torch.bfloat16, torch.bfloat16]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 6}, "must be a multiple of 4"),
        ({"depth": 0}, "depth is 0"),
    ],
)
def test_sizes_that_do_not_fit(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Gpt(32, **{"width": 8, "heads": 2, **options})  # type: ignore[arg-type]
