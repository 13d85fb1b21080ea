"""Twelve networks with a fault of code written by hand, and ten healthy ones, written before the diagnosis ran."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from planted_faults import Apply, Body, Network, loop_of
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["EVERYDAY_HEALTHY", "EVERYDAY_PLANTED"]

SIXTEEN = "half:master_weights,dynamic"
FILE = Path(__file__)


class Tempered(nn.Module):
    """Attention with a temperature."""

    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.temperature = temperature

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ (self.key(x) / self.temperature).T  # plant: temperature
        return torch.softmax(scores, -1) @ self.value(x)


class Masked(nn.Module):
    """Attention to which a padding mask and a causal mask are added."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.query, self.key = (nn.Linear(16, 16) for _ in range(2))
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).T
        causal = torch.ones(8, 8).triu(0).to(scores.dtype) * self.value
        padding = torch.zeros(8, 8).to(scores.dtype)
        padding[0] = self.value  # an empty row: uniform in fp32
        scores = scores + causal + padding  # plant: masks
        return x + torch.softmax(scores, -1) @ x


class Scaled(nn.Module):
    """Word vectors multiplied by a large factor, then brought to length one."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 16)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        words = self.table((x.float().abs() * 10).long() % 32)
        words = words * self.factor  # plant: embedding
        out: Tensor = words.mean(1) / self.factor
        return out


class Words(nn.Module):
    """Embedding and head."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.embed = Scaled(factor)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.embed(x))
        return out


class Position(nn.Module):
    """Adds sines whose frequencies grow by powers."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.arange(16, dtype=x.dtype, device=x.device)
        return x + torch.sin(torch.exp(steps * self.rate))


class Growing(nn.Module):
    """A recurrence by hand whose state grows from step to step."""

    def __init__(self, growth: float, steps: int) -> None:
        super().__init__()
        self.cell = nn.Linear(16, 16)
        self.growth, self.steps = growth, steps

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x)
        for _ in range(self.steps):
            state = state * self.growth + torch.tanh(self.cell(x))  # plant: growing
        return state / self.growth**self.steps  # plant: shrinking


class Stack(nn.Module):
    """Three blocks with an activation each."""

    def __init__(self, activations: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        for activation in activations:
            block = nn.Sequential()
            block.add_module("layer", nn.Linear(16, 16))
            block.add_module("act", activation)
            self.blocks.append(block)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def layer_norm(factor: float) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        y = x * factor
        centered = y - y.mean(-1, keepdim=True)
        return centered * (centered.square().mean(-1, keepdim=True) + 1e-3).rsqrt()

    return function


def gelu(factor: float) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        y = x * factor
        return 0.5 * y * (1.0 + torch.tanh(0.79788 * (y + 0.044715 * y.pow(3)))) / factor

    return function


def time_deltas(x: Tensor) -> Tensor:
    times = 4096.0 + torch.arange(17, dtype=x.dtype, device=x.device)
    return x / (times[1:] - times[:-1])


def spread(x: Tensor) -> Tensor:
    y = x + 100.0
    return x / ((y * y).mean(0) - y.mean(0) ** 2 + 1e-3).sqrt()


def softplus(factor: float) -> nn.Module:
    return Apply(lambda x: torch.log(1.0 + torch.exp(x * factor)) / factor)


def cosine_loss(logits: Tensor, y: Tensor) -> Tensor:
    a, b = logits.half() * 1e-4, F.one_hot(y, 4).half() * 1e-4
    lengths = a.norm(dim=-1) * b.norm(dim=-1)  # plant: lengths
    return (1.0 - (a * b).sum(-1) / (lengths + 1e-12)).mean()  # plant: cosine


def entropy_by_hand(logits: Tensor, y: Tensor) -> Tensor:
    p = torch.sigmoid(torch.tanh(logits.half() * 8.0) * 14.0)
    wanted = F.one_hot(y, 4).half()
    return -(wanted * p.log() + (1 - wanted) * (1 - p).log()).mean()  # plant: entropy


def middle(function: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: Body(Apply(function))


def plain() -> nn.Module:
    return Body(nn.Identity())


class Lstm(nn.Module):
    """Two layers of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(4, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.cell(x.reshape(-1, 4, 4))[0].mean(1))
        return out


class Separable(nn.Module):
    """Convolutions by channel, batch norm, hard swish and max pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 1),
            nn.Conv2d(8, 8, 3, padding=1, groups=8),
            nn.BatchNorm2d(8),
            nn.Hardswish(),
            nn.MaxPool2d(2),
        )
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x.reshape(-1, 1, 4, 4)).flatten(1))
        return out


class Variational(nn.Module):
    """Mean and logarithm of a variance, and a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(16, 16)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        out: Tensor = self.head(mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance))
        return out


class Experts(nn.Module):
    """A gate that chooses two of four layers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Linear(16, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        values, places = self.gate(x).topk(2, -1)
        outputs = torch.stack([expert(x) for expert in self.experts], 1)
        chosen = outputs.gather(1, places[..., None].expand(-1, -1, 4))
        return (torch.softmax(values, -1)[..., None] * chosen).sum(1)


def triplet(logits: Tensor, y: Tensor) -> Tensor:
    return F.triplet_margin_loss(logits.float(), logits.float().roll(4, 0), logits.float().roll(1, 0))


def partly_masked(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), torch.where(y == 0, -100, y))


def rare_rows(count: int, width: int) -> Tensor:
    x = torch.randn(count, width)
    x[::2] = 0.0
    return x


EVERYDAY_PLANTED = [
    Network(
        "temperature of attention, native",
        "native:fp16",
        loop_of(lambda: Body(Tempered(1e-6))),
        "#temperature",
        ("middle",),
        FILE,
    ),
    Network("layer norm by hand, O2", "apex:O2", loop_of(middle(layer_norm(3000.0))), "middle"),
    Network("GELU by hand, half", SIXTEEN, loop_of(middle(gelu(400.0))), "middle"),
    Network("scale of an embedding, O2", "apex:O2", loop_of(lambda: Words(1e5)), "#embedding", ("embed",), FILE),
    Network(
        "cosine in a loss of fp16",
        "apex:O2",
        loop_of(plain, loss=cosine_loss),
        "#cosine",
        ("#lengths",),
        FILE,
    ),
    Network("cross entropy by hand, half", SIXTEEN, loop_of(plain, loss=entropy_by_hand), "#entropy", file=FILE),
    Network("variance of a batch, bf16", "half:bf16,master_weights", loop_of(middle(spread)), "middle"),
    Network("frequencies of positions, O2", "apex:O2", loop_of(lambda: Body(Position(0.9))), "middle"),
    Network("differences of times, half", SIXTEEN, loop_of(middle(time_deltas)), "middle"),
    Network(
        "softplus by hand in the third block, native",
        "native:fp16",
        loop_of(lambda: Stack([nn.ReLU(), nn.Tanh(), softplus(60.0)])),
        "blocks.2.act",
    ),
    Network("two masks that add up, O2", "apex:O2", loop_of(lambda: Body(Masked(-4e4))), "#masks", ("middle",), FILE),
    Network(
        "a growing state, half",
        SIXTEEN,
        loop_of(lambda: Body(Growing(3.0, 12))),
        "#growing",
        ("middle", "#shrinking"),
        FILE,
    ),
]
EVERYDAY_HEALTHY = [
    Network("two layers of LSTM, bf16", "native:bf16", loop_of(Lstm)),
    Network("separable convolutions, O2", "apex:O2", loop_of(Separable)),
    Network("layer norm by hand of ordinary size, O2", "apex:O2", loop_of(middle(layer_norm(1.0)))),
    Network("GELU by hand of ordinary size, half", SIXTEEN, loop_of(middle(gelu(1.0)))),
    Network("softplus by hand of ordinary size, O1", "apex:O1", loop_of(lambda: Stack([softplus(1.0)] * 3))),
    Network("a sample of a distribution, native", "native:fp16", loop_of(Variational)),
    Network("a gate of experts, bf16", "half:bf16,master_weights", loop_of(Experts)),
    Network("triplets, O2", "apex:O2", loop_of(plain, loss=triplet)),
    Network("targets that are left out, half", SIXTEEN, loop_of(plain, loss=partly_masked)),
    Network("inputs of zeros, native", "native:fp16", loop_of(plain, inputs=rare_rows)),
]
