"""Where a tensor of one number may be fp32: as it was run, the last digits differ under O1 and autocast in these."""

import ast

import pytest

from ampcompare.source.index import Index
from ampcompare.source.migrate.read.networks import network_classes
from ampcompare.source.migrate.read.wide_numbers import ScalarTensorFinder
from ampcompare.source.module import Module
from ampcompare.source.syntax import walk

NETWORK = """\
import torch
from torch import nn
from torch.nn import functional as F


def sum_of(row):
    return row.sum()


total = sum_of


class Base(nn.Module):
    def total_of(self, h):
        return h.sum()


class Net(Base):
    def __init__(self, eps=1e-3):
        super().__init__()
        self.one, self.two, self.eps = nn.Linear(8, 16), nn.Linear(16, 16), eps
        self.vec, self.scale = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))
        self.crit = nn.MSELoss()
        self.register_buffer("mask", torch.ones(16))

    def forward(self, x):
        h = self.one(x)
{lines}
        return self.two(h)

    def weight_of(self, i):
        return torch.sigmoid(self.vec[i])

    def scale_by(self, h, factor):
        return h * factor
"""
MIXED = {
    "an item of a parameter": "h = self.vec[0] * h",
    "fusion by learned weights": (
        "w = F.relu(self.vec)\nw = w / (torch.sum(w, dim=0) + 1e-4)\nh = w[0] * h + w[1] * self.two(h)"
    ),
    "a loop over a parameter": "for w in self.vec:\n    h = h * w",
    "both items by name": "a, b = self.vec\nh = a * h + b",
    "no dimension": "h = h * self.scale.squeeze()",
    "a reshape": "h = h * self.scale.reshape([])",
    "a mean": "h = h - h.exp().mean()",
    "a mean of a row": "h = h * self.vec.mean(0)",
    "three dimensions": "h = self.one(h).sum((0, 1, 2)) + h",
    "a greatest": "h = h / self.vec.abs().max()",
    "a greatest with its place": "h = h * torch.max(self.vec, 0)[0]",
    "values and places": "v, i = self.vec.max(0)\nh = h * v",
    "an item of a softmax": "h = h + F.softmax(h, 1)[0, 0]",
    "an item of an item": "h = h + torch.exp(h)[0][0]",
    "a buffer": "h = h + self.mask.mean()",
    "a weight of a layer": "h = h * self.two.weight[0, 0]",
    "a loss": "h = h + F.l1_loss(h, torch.zeros_like(h))",
    "a layer of a loss": "h = h * self.crit(h, torch.zeros_like(h))",
    "a sum of Python": "h = sum(self.vec) * h",
    "a method": "h = h.mul(self.vec[0])",
    "a method in place": "h.mul_(self.vec[0])",
    "a method of a base": "h = h * self.total_of(self.vec)",
    "a function under another name": "h = h * total(self.vec.exp())",
    "a lambda": "last = lambda v: v.sum()\nh = h * last(self.vec)",
    "a function of torch": "h = torch.mul(h, self.vec[0])",
    "in place": "h += self.vec[0]",
    "a comparison": "h = h * (h > self.vec[0])",
    "a variable": "s = torch.exp(self.vec[0])\nh = h * s",
    "a method of the class": "h = h * self.weight_of(0)",
    "an argument of a method": "h = self.scale_by(h, self.vec[0])",
    "a new row": "h = h * torch.full((1,), 2.0, device=h.device)[0]",
    "an element by select": "h = h * self.vec.select(0, 0)",
    "an element by unbind": "h = h * self.vec.unbind()[0]",
    "the next element": "h = h * next(iter(self.vec))",
    "a median": "h = h * self.vec.median()",
    "a trace": "h = h * self.two.weight.trace()",
    "a method with underscores": "h = h.__mul__(self.vec[0])",
    "a sum of a list": "h = sum([h, self.vec[0]])",
    "pairs of features and weights": "for f, w in zip([h, self.two(h)], self.vec):\n    h = h + f * w",
    "a mix by weights": "h = sum(w * f for w, f in zip(F.softmax(self.vec, dim=0), [h, self.two(h)]))",
    "numbered weights": "for i, w in enumerate(self.vec):\n    h = h * w",
    "a list of a parameter": "each = list(self.vec)\nh = h * each[0]",
    "parts without their dimension": "for f, w in zip([h, h], torch.split(self.vec, 1)):\n    h = h + w.squeeze() * f",
    "an item of a diagonal": "h = h * self.two.weight.diagonal()[0]",
    "a part without its dimension": "h = h * self.vec.flatten().narrow(0, 1, 1).squeeze()",
    "a list of numbers": "scales = [torch.tensor(0.3), torch.tensor(0.5)]\nh = scales[0].to(h.device) * h",
}
ALIKE = {
    "a parameter": "h = h * self.scale + self.vec.repeat(8)",
    "a slice": "h = h * self.vec[:1] + self.vec[None, :1]",
    "parts": "a, b = self.vec.chunk(2)\nh = a * h + b",
    "a mean with its dimension": "h = h - h.exp().mean(1, keepdim=True)",
    "a mean over two dimensions": "h = h.view(4, 4, 2, 8).mean([2, 3]) + h.view(4, 4, 2, 8).mean((2, 3))",
    "features": "found = [h, self.two(h)]\nh = found[0] + found[-1]",
    "numbers of Python": "h = h * len(self.vec) + self.eps * float(self.scale) + self.scale.item() / h.shape[1]",
    "arithmetic of numbers": "loss = F.l1_loss(h, h) + 0.1 * h.mean() + self.eps * self.crit(h, h)",
    "a loss of each": "h = F.l1_loss(h, h, reduction='none') * h",
    "a power": "h = h ** self.vec[0] + 2.0**h",
    "where": "h = torch.where(h > 0, h, self.vec[0])",
    "an embedding": "h = h + self.two.weight[torch.arange(16)]",
    "a sum of layers": "h = sum([h, self.two(h)])",
    "parts by unbind": "a, b = h.view(2, 8, 16).unbind()\nh = torch.cat([a * b, b])",
    "a variable that changes": "for i in range(2):\n    h = h + self.two(h) / (i + 1)",
}


def _mixed(lines: str) -> list[str]:
    indented = "".join(f"        {line}\n" for line in lines.splitlines())
    module = Module(NETWORK.format(lines=indented))
    nodes = [node for network in network_classes(module) for node in walk(network)]
    return [
        ast.unparse(each)
        for each in ScalarTensorFinder(module, Index(module)).nodes_mixing_scalar_tensors(nodes)
    ]


@pytest.mark.parametrize("lines", MIXED.values(), ids=MIXED)
def test_a_number_that_meets_another_tensor_is_found(lines: str) -> None:
    assert _mixed(lines)


@pytest.mark.parametrize("lines", ALIKE.values(), ids=ALIKE)
def test_arithmetic_of_equal_types_is_not_found(lines: str) -> None:
    assert _mixed(lines) == []
