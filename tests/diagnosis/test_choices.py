"""Masks and indices that are others than in fp32, since the whole numbers that are compared for them were rounded."""

from typing import Any

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


class Router(nn.Module):
    """Chooses two of sixteen experts for each token, or looks the largest probability up, with gates of some size."""

    def __init__(self, size: float, way: str) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(16, 16, bias=False), nn.Linear(16, 64)
        nn.init.normal_(self.gate.weight, std=size)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.float32 if self.way == "in fp32" else x.dtype
        if self.way == "in fp32":
            probs = nn.functional.linear(x.float(), self.gate.weight.float()).softmax(-1)
        else:
            probs = self.gate(x).float().softmax(-1).to(dtype)
        weight, chosen = probs.topk(2, -1)
        if self.way == "value":
            return self.experts(x) * probs.gather(-1, chosen)[:, :1]
        mask = torch.zeros_like(probs).scatter(-1, chosen, weight / weight.sum(-1, keepdim=True))
        return torch.einsum("tef,te->tf", self.experts(x).reshape(-1, 16, 4), mask.to(x.dtype))


def _check_exchange(loop: Any, arm: str, choosing: str, *, is_wrong: bool) -> None:
    """Check that what a function chooses is a fault with a cure, or none."""
    found = ampcompare.diagnose(loop, arm=arm, steps=1, device="cpu", cures=is_wrong)
    texts = [fault.text for fault in found.faults if fault.kind == "rounding"]
    assert bool(texts) == is_wrong, texts
    if is_wrong:
        assert f"rounds what {choosing} compares" in texts[0]
        assert found.cure is not None, found.verdict


@pytest.mark.parametrize(
    ("size", "way", "is_wrong"),
    [(0.002, "experts", True), (0.5, "experts", False), (0.002, "in fp32", False), (0.002, "value", False)],
)
def test_experts_that_rounding_exchanges_are_a_fault(size: float, way: str, is_wrong: bool) -> None:
    """Not where a few tokens lie near the border of two, nor where the largest number itself is all that is taken."""
    loop = loop_of(lambda: Router(size, way), lambda model, step: model(torch.randn(64, 16)).square().mean())
    _check_exchange(loop, ARM, "topk", is_wrong=is_wrong)


class Quantizer(nn.Module):
    """Takes the nearest of 64 codes, which lie around a mean, by distances written out as a sum of squares."""

    def __init__(self, mean: float, spread: float) -> None:
        super().__init__()
        self.inner, self.codes = nn.Linear(16, 8), nn.Embedding(64, 8)
        nn.init.constant_(self.inner.bias, mean)
        nn.init.normal_(self.codes.weight, mean, spread)

    def forward(self, x: Tensor) -> Tensor:
        z, codes = self.inner(x), self.codes.weight
        distances = z.pow(2).sum(1, keepdim=True) - 2 * z @ codes.t() + codes.pow(2).sum(1)
        return self.codes(distances.argmin(1)) - z.detach()


@pytest.mark.parametrize("arm", [ARM, "native:bf16"])
@pytest.mark.parametrize(("mean", "spread", "is_wrong"), [(4.0, 0.02, True), (0.0, 1.0, False)])
def test_nearest_codes_that_rounding_exchanges_are_a_fault(
    arm: str, mean: float, spread: float, is_wrong: bool
) -> None:
    """Codes that lie near each other and far from zero have distances that cancel; others are found in 16 bits."""
    loop = loop_of(
        lambda: Quantizer(mean, spread), lambda model, step: model(0.1 * torch.randn(128, 16)).square().mean()
    )
    _check_exchange(loop, arm, "argmin", is_wrong=is_wrong)


def test_the_order_of_a_set_does_not_count() -> None:
    """As that of the two experts of a token."""
    numbers = torch.tensor([[3.0, 2.0, 1.0]])
    pairs = torch.tensor([[0, 1]]), torch.tensor([[1, 0]])
    assert share_of_wrong_choices(*pairs, numbers, 1, is_set=True) == 0
    assert share_of_wrong_choices(*pairs, numbers, 1) == 1
    assert share_of_wrong_choices(pairs[0], torch.tensor([[1, 2]]), numbers, 1, is_set=True) == 1


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
