"""Where arithmetic in place meets a tensor that may be fp32: as it was run, types or last digits differ there."""

import ast

import pytest

from ampcompare.source.migrate.read.networks import network_classes
from ampcompare.source.migrate.read.wide_tensors import Fp32TensorFinder
from ampcompare.source.module import Module
from ampcompare.source.syntax import walk

NETWORK = """\
import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.norm = nn.Linear(8, 16), nn.Linear(16, 16), nn.LayerNorm(16)
        self.places = nn.Parameter(torch.zeros(1, 16))
        self.embedding, self.shortcut = nn.Embedding(16, 16), nn.Sequential()
        self.block = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(True))
        self.register_buffer("mask", torch.ones(16))

    def forward(self, x):
        h = self.one(x)
{lines}
        return self.two(h)
"""
MIXED = {
    "positions": "h += self.places",
    "a part of them": "h += self.places[:, : h.shape[1]]",
    "a scale": "h *= self.places.exp()",
    "a buffer": "h *= self.mask",
    "an embedding": "h += self.embedding(torch.arange(16))",
    "a norm": "h += self.norm(h)",
    "a softmax": "gate = F.softmax(h, 1)\nh *= gate",
    "a new tensor": "noise = torch.randn(16, 16)\nh += 0.1 * noise",
    "a power": "h += h**2",
    "a method in place": "h.add_(self.places)",
    "a product added in place": "h.addcmul_(self.places, self.places, value=0.1)",
    "a quotient added in place": "h.addcdiv_(self.two(h), self.places)",
    "a power in place": "h **= 2",
    "what is made fp32": "h += self.two(h).float()",
    "what a function gets": "h += x",
    "what it is kept as": "residual = x\nx = self.two(h)\nx += residual",
    "what another network returns": "h += self.inner(h)",
    "an entry": "h += self.table['b']",
    "an attribute by its name": "h += getattr(self, 'b')",
    "what nothing binds": "h += self.p0",
    "layers that may be left out": "h += self.shortcut(x)",
}
ALIKE = {
    "a number": "h *= 0.5\nh += len(x)\nh.mul_(2)",
    "an identity": "identity = h\nh = self.two(h)\nh += identity",
    "a shortcut": "y = self.two(h)\ny += self.shortcut(h)\nh = y",
    "layers in a row": "h += self.block(x)",
    "what a layer keeps": "h += F.relu(torch.cat([self.one(x)], 1)).view(-1)",
    "a name that is bound again": "x = self.two(h)\nx += h\nh += x",
    "a layer": "h += self.two(h)",
    "a product": "h += F.linear(self.norm(h), self.two.weight)",
    "out of place": "h = h + self.places",
    "a sum of losses": "loss = F.mse_loss(h, x)\nloss += F.l1_loss(h, x)",
    "a sum from nothing": "total = 0.0\ntotal += F.mse_loss(h, x)",
    "a number of Python": "h += self.places.sum().item()",
}


def _found(lines: str) -> list[str]:
    module = Module(NETWORK.format(lines="".join(f"        {line}\n" for line in lines.splitlines())))
    nodes = [node for network in network_classes(module) for node in walk(network)]
    return [
        ast.unparse(each) for each in Fp32TensorFinder(module).inplace_arithmetic_with_fp32_operand(nodes)
    ]


@pytest.mark.parametrize("lines", MIXED.values(), ids=MIXED)
def test_arithmetic_in_place_with_a_wide_tensor_is_found(lines: str) -> None:
    assert len(_found(lines)) == 1


@pytest.mark.parametrize("lines", ALIKE.values(), ids=ALIKE)
def test_arithmetic_in_place_of_one_type_is_not_found(lines: str) -> None:
    assert _found(lines) == []


@pytest.mark.parametrize(
    "name", ["log2", "acos", "renorm", "std", "logsumexp", "cosine_similarity", "grid_sample"]
)
def test_what_either_computes_in_fp32_may_be_wide(name: str) -> None:
    """One list says what O1 and autocast compute in fp32, for this and for notes."""
    module = Module(f"import torch\ndef f(x, y):\n    x += torch.{name}(y)\n")
    assert Fp32TensorFinder(module).inplace_arithmetic_with_fp32_operand(module.nodes)


def test_products_of_either_are_not_wide() -> None:
    module = Module("import torch\ndef f(x, y):\n    x += torch.addmm(y.float(), y.float(), y.float())\n")
    assert not Fp32TensorFinder(module).inplace_arithmetic_with_fp32_operand(module.nodes)
