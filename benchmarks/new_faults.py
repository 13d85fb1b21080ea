"""Eight networks with a planted fault and eight healthy ones, written before the diagnosis first ran on any of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from planted_faults import Apply, Body, Network, loop_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

__all__ = ["NEW_HEALTHY", "NEW_PLANTED"]

SIXTEEN = "half:master_weights,dynamic"
FILE = Path(__file__)


def rms_without_room(x: Tensor) -> Tensor:
    small = x * 1e-4
    return small * (small.square().mean(-1, keepdim=True) + 1e-8).rsqrt()


def long_cumsum(x: Tensor) -> Tensor:
    return x + x.abs().repeat(1, 512).mul(40.0).cumsum(-1)[:, -16:] * 1e-6


def contrastive(logits: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(logits.half(), dim=-1)
    scores = z @ z.T / 1e-5  # plant: temperature
    return F.cross_entropy(scores.float() * 1e-4, y)


def focal(logits: Tensor, y: Tensor) -> Tensor:
    scores = logits.half().gather(1, y[:, None]) * 60.0
    return -(torch.log(torch.sigmoid(scores - 25.0)) * 0.01).float().mean()  # plant: focal


def faint(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), y) * 3e-8


def crawling(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-6, eps=1e-6)


class Feedforward(nn.Module):
    """A residual block with a squared ReLU."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.act = Apply(lambda x: torch.relu(x * factor).square() / factor**2)
        self.down = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


class ChannelNorm(nn.Module):
    """Normalizes channels by sums over batch and positions."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.factor
        return y / (y * y).sum((0, 2, 3), keepdim=True).add(1.0).sqrt() * 10.0


class Pictures(nn.Module):
    """A convolution, a normalization and a head."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = norm
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.relu(self.norm(self.conv(x.reshape(-1, 1, 4, 4)))).mean((2, 3)))
        return out


class Causal(nn.Module):
    """Attention whose mask is minus infinity."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 12)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inner(x.reshape(-1, 4, 4)).chunk(3, -1)
        mask = torch.ones(4, 4, dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(1, 2) / 2).masked_fill(mask, float("-inf"))
        out: Tensor = self.head((torch.softmax(scores, -1) @ v).flatten(1))
        return out


class Encoder(nn.Module):
    """One layer of torch's own transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(x.reshape(-1, 2, 8)).flatten(1))
        return out


class Gated(nn.Module):
    """A GRU and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(4, 8, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.cell(x.reshape(-1, 4, 4))[0][:, -1])
        return out


class Recomputed(nn.Module):
    """Two checkpointed blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        out: Tensor = self.head(x)
        return out


class Twins(nn.Module):
    """One tower for both halves of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.head = nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        left, right = map(self.tower, x.chunk(2, -1))
        likeness = F.cosine_similarity(left, right)[:, None].to(left.dtype)
        out: Tensor = self.head(torch.cat([left - right, likeness], -1))
        return out


def far_targets(logits: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(logits.float(), F.one_hot(y, 4).float() * 100.0)


def middle(function: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: Body(Apply(function))


def blocks(factor: float) -> nn.Module:
    return nn.Sequential(Feedforward(1.0), Feedforward(factor), Feedforward(1.0), nn.Linear(16, 4))


NEW_PLANTED = [
    Network("RMS norm with an eps that fp16 loses, O2", "apex:O2", loop_of(middle(rms_without_room)), "middle"),
    Network("cumulative sum of a long row, half", SIXTEEN, loop_of(middle(long_cumsum)), "middle"),
    Network(
        "temperature of a contrastive loss, O2",
        "apex:O2",
        loop_of(lambda: Body(nn.Identity()), loss=contrastive),
        "#temperature",
        file=FILE,
    ),
    Network("focal loss in fp16, half", SIXTEEN, loop_of(lambda: Body(nn.Identity()), loss=focal), "#focal", file=FILE),
    Network("squared ReLU in the second block, native", "native:fp16", loop_of(lambda: blocks(500.0)), "1.act"),
    Network("channel norm by sums, native", "native:fp16", loop_of(lambda: Pictures(ChannelNorm(300.0))), "norm"),
    Network(
        "updates below bf16, half",
        "half:bf16",
        loop_of(lambda: Body(nn.Identity()), optimizer=crawling),
        "master_weights",
    ),
    Network(
        "faint loss without a scale, O3", "apex:O3", loop_of(lambda: Body(nn.Identity()), loss=faint), "loss_scale"
    ),
]
NEW_HEALTHY = [
    Network("encoder layer, O2", "apex:O2", loop_of(Encoder)),
    Network("GRU, native", "native:fp16", loop_of(Gated)),
    Network("group norm of pictures, O1", "apex:O1", loop_of(lambda: Pictures(nn.GroupNorm(2, 8)))),
    Network("checkpointed blocks, half", SIXTEEN, loop_of(Recomputed)),
    Network("squared ReLU of ordinary size, O2", "apex:O2", loop_of(lambda: blocks(1.0))),
    Network("causal mask of minus infinity, native", "native:fp16", loop_of(Causal)),
    Network("far targets, O2", "apex:O2", loop_of(lambda: Body(nn.Identity()), loss=far_targets)),
    Network("twin towers, bf16", "native:bf16", loop_of(Twins)),
]
