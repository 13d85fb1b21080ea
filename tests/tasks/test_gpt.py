"""The causal transformer: no look ahead, positions, sizes, and casts that reach its attention."""

import pytest
import torch
from torch import Tensor

from ampcompare.base.errors import ConfigError
from ampcompare.tasks.lm import Gpt


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
    from ampcompare.tasks.lm import _rotate

    query, key = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(1)).double()
    rotated = _rotate(query.expand(1, 1, 9, 8), key.expand(1, 1, 9, 8))
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
