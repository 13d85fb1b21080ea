"""Fifteen networks with a fault as users write it, and ten healthy ones, written before the diagnosis ran on them.

Each computes its loss itself, as models of a library do, so that nothing between the model and the loss is cast.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from planted_faults import STEPS, Network
from torch import Tensor, nn
from torch.nn import functional as F

from ampcompare import Precision

__all__ = ["WRITTEN_HEALTHY", "WRITTEN_PLANTED"]

SIXTEEN = "half:master_weights,dynamic"
BF16 = "half:bf16,master_weights"
FILE = Path(__file__)


def images(count: int) -> Tensor:
    """Return random inputs, (count, 16)."""
    return torch.randn(count, 16)


def loop_of(
    make: Callable[[], nn.Module],
    *,
    inputs: Callable[[int], Tensor] = images,
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda params: torch.optim.SGD(params, lr=0.05),
) -> Callable[[Precision], Any]:
    """Return a loop over random batches of 8 rows for a model that is called with labels and returns the loss."""

    def loop(precision: Precision) -> None:
        torch.manual_seed(0)
        model = make()
        (model,), (stepper,) = precision.prepare([model], [optimizer(model.parameters())])
        for _ in range(STEPS):
            x, y = inputs(8), torch.arange(8) % 4
            with precision.autocast():
                value = model(x, y)
            precision.backward(value, [stepper])
            precision.step(stepper)
            stepper.zero_grad()

    return loop


class Attention(nn.Module):
    """One head; sentences are padded, and one of them is empty."""

    def __init__(self, away: float) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)
        self.away = away

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        scores = query @ key.transpose(-2, -1) / 8**0.5
        scores = scores + (1.0 - keep[:, None, :].to(scores.dtype)) * self.away  # plant: padding
        out: Tensor = self.out(torch.softmax(scores, -1) @ value)
        return out


class Encoder(nn.Module):
    """A transformer block on eight tokens of eight numbers, and a classifier."""

    def __init__(self, away: float) -> None:
        super().__init__()
        self.embed = nn.Linear(1, 8)
        self.attention = Attention(away)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        keep = torch.arange(16) < torch.tensor([16, 9, 4, 0, 12, 3, 16, 7])[:, None]
        tokens = self.embed(x[..., None])
        tokens = self.norm(tokens + self.attention(tokens, keep))
        return F.cross_entropy(self.head(tokens.mean(1)).float(), y)


class Contrastive(nn.Module):
    """Two views of each row, drawn together."""

    def __init__(self, temperature: float, by_hand: bool = True) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        self.temperature = temperature
        self.by_hand = by_hand

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        one, two = (F.normalize(self.encoder(x + 0.1 * torch.randn_like(x)), dim=-1) for _ in range(2))
        similar = one @ two.T / self.temperature
        if not self.by_hand:
            return F.cross_entropy(similar.float(), torch.arange(8))
        weights = torch.exp(similar)  # plant: contrastive
        return -torch.log(weights.diagonal() / weights.sum(-1)).mean()


class Classifier(nn.Module):
    """Two layers whose logits are far apart, and a loss of one's own."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], sharpness: float = 1.0) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
        self.loss = loss
        self.sharpness = sharpness

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.body(x) * self.sharpness, y)


def focal(logits: Tensor, y: Tensor) -> Tensor:
    p = torch.softmax(logits, -1).gather(1, y[:, None])[:, 0]
    return (-((1 - p) ** 2) * torch.log(p + 1e-8)).mean()  # plant: focal


def focal_of_logarithms(logits: Tensor, y: Tensor) -> Tensor:
    log_p = F.log_softmax(logits.float(), -1).gather(1, y[:, None])[:, 0]
    return (-((1 - log_p.exp()) ** 2) * log_p).mean()


def policy_gradient(logits: Tensor, y: Tensor) -> Tensor:
    probabilities = torch.softmax(logits, -1)
    log_probabilities = torch.log(probabilities)  # plant: policy
    advantage = (y - 1.5).to(logits.dtype)
    return -(log_probabilities.gather(1, y[:, None])[:, 0] * advantage).mean()


def distillation(logits: Tensor, y: Tensor) -> Tensor:
    teacher = torch.softmax(F.one_hot(y, 4).to(logits.dtype) * 6.0, -1)
    student = torch.softmax(logits, -1)
    return (teacher * torch.log(teacher / student)).sum(-1).mean()  # plant: distillation


def distillation_of_logarithms(logits: Tensor, y: Tensor) -> Tensor:
    teacher = torch.softmax(F.one_hot(y, 4).float() * 6.0, -1)
    return F.kl_div(F.log_softmax(logits.float(), -1), teacher, reduction="batchmean")


def smoothed(logits: Tensor, y: Tensor) -> Tensor:
    wanted = F.one_hot(y, 4).to(logits.dtype) * 0.9 + 0.025
    p = torch.softmax(logits, -1)
    return -(wanted * (p + 1e-9).log()).sum(-1).mean()  # plant: smoothing


def smoothed_by_torch(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, label_smoothing=0.1)


class Gan(nn.Module):
    """A discriminator that is sure of itself, and the losses of the first paper."""

    def __init__(self, sure: float, by_hand: bool = True) -> None:
        super().__init__()
        self.generator = nn.Linear(16, 16)
        self.discriminator = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
        self.sure = sure
        self.by_hand = by_hand

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        real = self.discriminator(x) * self.sure
        fake = self.discriminator(self.generator(torch.randn_like(x))) * self.sure
        if not self.by_hand:
            return F.binary_cross_entropy_with_logits(real, torch.ones_like(real)) + F.binary_cross_entropy_with_logits(
                fake, torch.zeros_like(fake)
            )
        d_real, d_fake = torch.sigmoid(real), torch.sigmoid(fake)  # plant: judged
        return -(torch.log(d_real) + torch.log(1.0 - d_fake)).mean()  # plant: adversarial


class Penalized(nn.Module):
    """A critic with a penalty on the norm of its gradient."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
        self.size = size

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.to(self.critic[0].weight.dtype).requires_grad_()
        judged = self.critic(x) * self.size
        (slope,) = torch.autograd.grad(judged.sum(), x, create_graph=True)
        norm = torch.sqrt(torch.sum(slope**2, dim=1) + 1e-12)  # plant: penalty
        return judged.mean() + 10.0 * ((norm - 1.0) ** 2).mean()


class Pooled(nn.Module):
    """Features of a convolution, pooled by a part of one's own."""

    def __init__(self, pool: nn.Module, length: int = 16) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv1d(1, 8, 3, padding=1), nn.ReLU())
        self.pool = pool
        self.head = nn.Linear(8, 4)
        self.length = length

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.repeat(1, self.length // 16)
        return F.cross_entropy(self.head(self.pool(self.features(x[:, None]))), y)


class GeM(nn.Module):
    """The generalized mean of each channel, of features of a certain size."""

    def __init__(self, size: float, least: float = 1e-6) -> None:
        super().__init__()
        self.size, self.least = size, least

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.size
        return x.clamp(min=self.least).pow(3.0).mean(-1).pow(1.0 / 3.0) / self.size


class RunningMean(nn.Module):
    """The last of the means of all beginnings of a signal."""

    def __init__(self, offset: float) -> None:
        super().__init__()
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        total = torch.cumsum(x + self.offset, -1)
        return total[..., -1] / x.shape[-1] - self.offset


class Standardized(nn.Module):
    """Statistics over the batch and the signal, by the difference of two means."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.size
        mean = x.mean((0, 2), keepdim=True)
        variance = (x**2).mean((0, 2), keepdim=True) - mean**2
        return ((x - mean) / torch.sqrt(variance + 1e-5)).amax(-1)


class Directions(nn.Module):
    """Word vectors of length one; the padding word is zero."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.words = nn.Embedding(32, 8, padding_idx=0)
        self.eps = eps
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        tokens = (x.float().abs() * 4).long() % 32
        vectors = F.normalize(self.words(tokens), dim=-1, eps=self.eps)  # plant: directions
        return F.cross_entropy(self.head(vectors.mean(1)).float(), y)


class Gumbel(nn.Module):
    """A choice among 512 codes with noise."""

    def __init__(self, in_fp32: bool = False) -> None:
        super().__init__()
        self.logits = nn.Linear(16, 512)
        self.codes = nn.Linear(512, 4)
        self.in_fp32 = in_fp32

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.logits(x)
        uniform = torch.rand(logits.shape).clamp(1e-4, 1 - 1e-6)
        if not self.in_fp32:
            uniform = uniform.to(logits.dtype)  # plant: uniform
        noise = -torch.log(-torch.log(uniform))  # plant: gumbel
        chosen = torch.softmax(logits + noise.to(logits.dtype), -1)
        return F.cross_entropy(self.codes(chosen).float(), y)


class Prototypes(nn.Module):
    """Distances to four prototypes, by the square of a difference written out."""

    def __init__(self, offset: float) -> None:
        super().__init__()
        self.body = nn.Linear(16, 16)
        self.points = nn.Parameter(torch.randn(4, 16))
        self.offset = offset

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a, b = self.body(x) + self.offset, self.points + self.offset
        squares = a.pow(2).sum(-1)[:, None] + b.pow(2).sum(-1) - 2 * a @ b.T  # plant: squares
        distances = squares.clamp(min=1e-8).sqrt()  # plant: root
        return F.cross_entropy(-distances.float(), y)


class Rotary(nn.Module):
    """Turns pairs of features by an angle that grows with the position."""

    def __init__(self, first: int, in_fp32: bool = False) -> None:
        super().__init__()
        self.first = first
        self.in_fp32 = in_fp32

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.float32 if self.in_fp32 else x.dtype
        positions = torch.arange(self.first, self.first + x.shape[1]).to(dtype)
        angles = positions[:, None] * torch.tensor([1.0, 0.7, 0.5, 0.3]).to(dtype)
        sine, cosine = angles.sin().to(x.dtype), angles.cos().to(x.dtype)
        left, right = x.chunk(2, -1)
        return torch.cat([left * cosine - right * sine, right * cosine + left * sine], -1)


class Sequence(nn.Module):
    """Sixteen tokens, their positions, and one layer that reads them in order."""

    def __init__(self, positions: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Linear(1, 8)
        self.positions = positions
        self.norm = nn.LayerNorm(128)
        self.head = nn.Linear(128, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        tokens = self.positions(self.embed(x[..., None]))
        return F.cross_entropy(self.head(self.norm(tokens.flatten(1))).float(), y)


class Cells(nn.Module):
    """An LSTM written as a loop over cells."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(1, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        state = None
        for at in range(x.shape[1]):
            state = self.cell(x[:, at : at + 1], state)
        assert state is not None
        return F.cross_entropy(self.head(state[0]), y)


def slow(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-5)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)


WRITTEN_PLANTED = [
    Network("padding of -1e9, half", SIXTEEN, loop_of(lambda: Encoder(-1e9)), "#padding", ("attention",), FILE),
    Network(
        "contrastive loss by hand, native", "native:fp16", loop_of(lambda: Contrastive(0.07)), "#contrastive", (), FILE
    ),
    Network("focal loss by hand, half", SIXTEEN, loop_of(lambda: Classifier(focal, 60.0)), "#focal", (), FILE),
    Network(
        "loss of a GAN by hand, O1",
        "apex:O1",
        loop_of(lambda: Gan(50.0), optimizer=slow),
        "#judged",
        ("#adversarial",),
        FILE,
    ),
    Network("penalty on a gradient, half", SIXTEEN, loop_of(lambda: Penalized(1e-3)), "#penalty", (), FILE),
    Network(
        "logarithm of a softmax, O2",
        "apex:O2",
        loop_of(lambda: Classifier(policy_gradient, 50.0), optimizer=slow),
        "#policy",
        (),
        FILE,
    ),
    Network("generalized mean, O2", "apex:O2", loop_of(lambda: Pooled(GeM(2e-3))), "pool"),
    Network("mean of beginnings, native", "native:fp16", loop_of(lambda: Pooled(RunningMean(40.0), 2048)), "pool"),
    Network("batch statistics by two means, half", SIXTEEN, loop_of(lambda: Pooled(Standardized(600.0))), "pool"),
    Network("directions of zero vectors, half", SIXTEEN, loop_of(lambda: Directions(1e-12)), "#directions", (), FILE),
    Network("Gumbel noise, O2", "apex:O2", loop_of(Gumbel), "#uniform", ("#gumbel",), FILE),
    Network(
        "divergence of a student, half",
        SIXTEEN,
        loop_of(lambda: Classifier(distillation, 25.0), optimizer=slow),
        "#distillation",
        (),
        FILE,
    ),
    Network(
        "label smoothing by hand, O2", "apex:O2", loop_of(lambda: Classifier(smoothed, 60.0)), "#smoothing", (), FILE
    ),
    Network("distances to prototypes, O2", "apex:O2", loop_of(lambda: Prototypes(20.0)), "#squares", ("#root",), FILE),
    Network("rotary positions, bf16", BF16, loop_of(lambda: Sequence(Rotary(4000))), "positions"),
]
WRITTEN_HEALTHY = [
    Network("padding of -1e4, half", SIXTEEN, loop_of(lambda: Encoder(-1e4))),
    Network("contrastive loss of torch, native", "native:fp16", loop_of(lambda: Contrastive(0.07, by_hand=False))),
    Network("focal loss of logarithms, O2", "apex:O2", loop_of(lambda: Classifier(focal_of_logarithms, 8.0))),
    Network("loss of a GAN by torch, O1", "apex:O1", loop_of(lambda: Gan(1.0, by_hand=False))),
    Network("generalized mean of ordinary features, O2", "apex:O2", loop_of(lambda: Pooled(GeM(1.0, least=0.1)))),
    Network("directions with an ordinary eps, half", SIXTEEN, loop_of(lambda: Directions(1e-3))),
    Network("Gumbel noise in fp32, O2", "apex:O2", loop_of(lambda: Gumbel(in_fp32=True))),
    Network("divergence by torch, half", SIXTEEN, loop_of(lambda: Classifier(distillation_of_logarithms))),
    Network(
        "rotary positions in fp32, bf16", BF16, loop_of(lambda: Sequence(Rotary(4000, in_fp32=True)), optimizer=adam)
    ),
    Network("cells of an LSTM, native", "native:bf16", loop_of(Cells, optimizer=adam)),
]
