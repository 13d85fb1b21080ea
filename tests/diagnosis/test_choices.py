"""Masks and indices that are others than in fp32, since the whole numbers that are compared for them were rounded."""

import pytest
import torch
from torch import Tensor, nn

import ampcompare
from ampcompare.diagnosis.operation_watch import share_of_wrong_choices
from tests.diagnosis.loops import loop_of

LENGTH, WIDTH = 400, 8
ARM = "half:bf16,masters=fp32"


class Positions(nn.Module):
    """Compares positions, lengths or counts in the type of what its first layer returns."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.inner, self.out, self.table = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 4),
            nn.Embedding(40, WIDTH),
        )
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        dtype = torch.float32 if self.way.endswith("in fp32") else h.dtype
        places = torch.arange(LENGTH, dtype=dtype)
        if self.way.startswith("causal"):
            mask = places[:, None] >= places
            h = (h @ h.transpose(1, 2)).masked_fill(~mask, -torch.inf).softmax(-1) @ h
        elif self.way.startswith("lengths"):
            h = torch.where((places < places[[301, 333]][:, None])[..., None], h, torch.zeros_like(h))
        elif self.way.startswith("buckets"):
            h = h * self.table(torch.bucketize(places, places[1:40] * 9 + 1))
        elif self.way.startswith("last"):
            last = (places * (torch.arange(LENGTH) < 377)).expand(len(h), LENGTH).argmax(-1)
            h = h[torch.arange(len(h)), last][:, None]
        elif self.way.startswith("segments"):
            same = (places[:, None] == places).to(h.dtype)
            h = same / same.sum(-1, keepdim=True) @ h
        elif self.way == "largest number":  # an order of noise
            h = h[torch.arange(len(h)), h.norm(dim=-1).argmax(-1)][:, None]
        elif self.way == "sign":
            h = h * (h > 0)
        elif self.way == "only printed":
            self.seen = (places == places.round()).float().mean() + (places[:, None] == places).sum()
        return self.out(h.mean(1))


WRONG = ("causal", "lengths", "buckets", "last", "segments")


@pytest.mark.parametrize(
    "way", [*WRONG, *(f"{one} in fp32" for one in WRONG), "largest number", "sign", "only printed"]
)
def test_what_is_decided_by_rounded_whole_numbers_is_a_fault(way: str) -> None:
    """The line that rounds them is named, and cures it; in fp32, or where nothing comes of it, there is none."""
    loop = loop_of(
        lambda: Positions(way), lambda model, step: model(torch.randn(2, LENGTH, WIDTH)).square().mean()
    )
    found = ampcompare.diagnose(loop, arm=ARM, steps=1, device="cpu")
    texts = [fault.text for fault in found.faults if fault.kind == "rounding"]
    assert bool(texts) == (way in WRONG), texts
    if way in WRONG:
        assert "rounds what" in texts[0]
        assert "others than in fp32" in texts[0]
        assert found.cure is not None, found.verdict


def test_equal_numbers_may_be_exchanged() -> None:
    """An order has no place for each of them."""
    numbers = torch.tensor([[3.0, 3.0, 1.0], [2.0, 5.0, 5.0]])
    first, second = torch.tensor([0, 1]), torch.tensor([1, 2])
    assert share_of_wrong_choices(first, second, numbers, 1) == 0
    assert share_of_wrong_choices(first, torch.tensor([2, 1]), numbers, 1) == 0.5
    assert share_of_wrong_choices(torch.tensor(4), torch.tensor(5), numbers, None) == 0
    orders = torch.tensor([[0, 1, 2], [1, 2, 0]]), torch.tensor([[1, 0, 2], [2, 1, 0]])
    assert share_of_wrong_choices(*orders, numbers, 1) == 0


def test_a_row_counts_that_has_one_wrong_truth_value() -> None:
    mask = torch.ones(4, 100, dtype=torch.bool)
    other = mask.clone()
    other[2, 7] = False
    assert share_of_wrong_choices(mask, other) == 0.25
    assert share_of_wrong_choices(mask[0], other[2]) == 0.01
