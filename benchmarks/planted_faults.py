"""Small networks with one planted fault of precision each, and healthy ones: what `diagnose` is measured on.

A loop gets a precision and trains; the place of a planted fault is the name of a module, a mark in a line of this file,
or an option of the arm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampcompare import Precision
from ampcompare.runs.records.diagnosis import Diagnosis

__all__ = ["HEALTHY", "HELD_OUT", "PLANTED", "Network", "is_found", "is_named", "proposed"]

STEPS = 40
Loss = Callable[[Tensor, Tensor], Tensor]


def place_of_mark(mark: str, file: Path) -> str:
    """Return file:line of the line that ends with a mark, with the file's name alone."""
    lines = file.read_text(encoding="utf-8").splitlines()
    (number,) = [at for at, line in enumerate(lines, 1) if line.endswith(f"# plant: {mark}")]
    return f"{file.name}:{number}"


@dataclass(frozen=True)
class Network:
    """One network.

    Attributes:
        place: module, `#mark` of a line, or option of the arm; "" for a healthy network.
        also: other places of which each removes the same cause.
        file: that has the mark.
    """

    name: str
    arm: str
    loop: Callable[[Precision], Any]
    place: str = ""
    also: tuple[str, ...] = ()
    file: Path = Path(__file__)


def proposed(found: Diagnosis) -> list[str]:
    """Return what a diagnosis proposes: modules, file:line with the file's name alone, names of options."""
    if found.cure is None:
        return []
    names = [option.partition("=")[0] for option in found.cure.option.split(", ") if option]
    return [*(place.rpartition("/")[2] for place in found.cure.keeps), *names]


def is_found(network: Network, found: Diagnosis) -> bool:
    """Return whether the planted place, and nothing else, is proposed."""
    names = proposed(found)
    return len(names) == 1 and names[0] in _places(network)


def is_named(network: Network, found: Diagnosis) -> bool:
    """Return whether the first line has the planted place, as the place of the fault, its reason or its cure."""
    if not found.faults:
        return False
    first = found.faults[0]
    known = {first.place.module, first.place.where.rpartition("/")[2], *proposed(found)}
    return any(place in known or place in first.reason for place in _places(network))


def _places(network: Network) -> list[str]:
    return [
        place_of_mark(place[1:], network.file) if place.startswith("#") else place
        for place in (network.place, *network.also)
    ]


def loop_of(
    make: Callable[[], nn.Module],
    *,
    loss: Loss = F.cross_entropy,
    width: int = 16,
    targets: Callable[[int], Tensor] = lambda count: torch.arange(count) % 4,
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda params: torch.optim.SGD(params, lr=0.05),
    inputs: Callable[[int, int], Tensor] = torch.randn,
) -> Callable[[Precision], Any]:
    """Return a loop over random batches of 8 rows."""

    def loop(precision: Precision) -> None:
        torch.manual_seed(0)
        model = make()
        (model,), (stepper,) = precision.prepare([model], [optimizer(model.parameters())])
        for _ in range(STEPS):
            x, y = inputs(8, width), targets(8)
            with precision.autocast():
                value = loss(model(x), y)
            precision.backward(value, [stepper])
            precision.step(stepper)
            stepper.zero_grad()

    return loop


class Body(nn.Module):
    """Two layers around a part in the middle, which holds the fault or nothing."""

    def __init__(self, middle: nn.Module, *, last: nn.Module | None = None, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(16, width)
        self.middle = middle
        self.head = last or nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.middle(torch.relu(self.first(x))))
        return out


class Apply(nn.Module):
    """A function as a module of its own."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Scaled(nn.Module):
    """A linear layer whose weights are multiplied once, at the start."""

    def __init__(self, inputs: int, outputs: int, factor: float) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, outputs)
        with torch.no_grad():
            self.layer.weight.mul_(factor)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


class RunningMean(nn.Module):
    """Subtracts a mean that it keeps in a buffer."""

    mean: Tensor

    def __init__(self, width: int, start: float, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.register_buffer("mean", torch.full((width,), start))

    def forward(self, x: Tensor) -> Tensor:
        x = x + 300.0
        with torch.no_grad():
            self.mean.add_(self.rate * (x.mean(0).to(self.mean.dtype) - self.mean))
        return x - self.mean


class Attention(nn.Module):
    """One head, written with functions."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x * self.scale) @ self.key(x * self.scale).T  # plant: scores
        return torch.softmax(scores / (16.0 * self.scale**2), -1) @ self.value(x)


def norm_of(x: Tensor) -> Tensor:
    return x / (x * x).sum(-1, keepdim=True).sqrt()


def big_norm(x: Tensor) -> Tensor:
    return norm_of(x * 500.0)


def softmax_by_hand(x: Tensor) -> Tensor:
    powers = torch.exp(x * 30.0)
    return powers / powers.sum(-1, keepdim=True)


def sum_of_many(x: Tensor) -> Tensor:
    return x + x.repeat_interleave(4096, 0).reshape(8, -1).mul(20.0).abs().sum(-1, keepdim=True) * 1e-6


def small_division(x: Tensor) -> Tensor:
    tiny = x.detach().abs().mean() * 1e-5 * 1e-4
    return x * 1e-5 / tiny * 1e-4


def variance_by_hand(x: Tensor) -> Tensor:
    y = x + 200.0
    variance = (y * y).mean(-1, keepdim=True) - y.mean(-1, keepdim=True) ** 2
    return x * (variance + 1.0).rsqrt()


def cube(x: Tensor) -> Tensor:
    return ((x * 60.0) ** 3) * 1e-5


def mask_value(x: Tensor) -> Tensor:
    mask = torch.zeros(8, 16)
    mask[:, ::2] = -1e9
    mask[3] = -1e9  # a row without any element: the mean over all in fp32, NaN where -1e9 is -inf
    return torch.softmax(x + mask.to(x.dtype), -1)


def log_of_small(x: Tensor) -> Tensor:
    return torch.log(torch.sigmoid(-x * 25.0 - 5.0) + 1e-12) * 0.01


def cosh_loss(logits: Tensor, y: Tensor) -> Tensor:
    return torch.log(torch.cosh(logits.half() * 60.0)).mean()  # plant: cosh


def exp_loss(logits: Tensor, y: Tensor) -> Tensor:
    return torch.exp(logits.half() * 20.0 + 8.0).mean().log()  # plant: exp


def half_sum_loss(logits: Tensor, y: Tensor) -> Tensor:
    return (logits.half() * 300.0).square().sum() / 1e6  # plant: half sum


def plain_squares(logits: Tensor, y: Tensor) -> Tensor:
    return logits.square().mean()


def tiny_loss(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y) * 1e-7


def slow(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-4)


def tiny_adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-5, eps=1e-4)


def middle(function: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: Body(Apply(function))


def plain() -> nn.Module:
    return Body(nn.Identity())


def _planted() -> list[Network]:
    sixteen = "half:master_weights,dynamic"
    found = []
    for arm in ("apex:O2", sixteen):
        tag = "O2" if arm == "apex:O2" else "half"
        found += [
            Network(f"norm of a long vector, {tag}", arm, loop_of(middle(big_norm)), "middle"),
            Network(f"softmax by hand, {tag}", arm, loop_of(middle(softmax_by_hand)), "middle"),
            Network(f"sum over many elements, {tag}", arm, loop_of(middle(sum_of_many)), "middle"),
            Network(f"division by a small number, {tag}", arm, loop_of(middle(small_division)), "middle"),
            Network(f"variance by hand, {tag}", arm, loop_of(middle(variance_by_hand)), "middle"),
            Network(f"cube, {tag}", arm, loop_of(middle(cube)), "middle"),
            Network(f"mask value -1e9, {tag}", arm, loop_of(middle(mask_value)), "middle"),
            Network(f"log of a small number, {tag}", arm, loop_of(middle(log_of_small)), "middle"),
            Network(
                f"large logits, {tag}",
                arm,
                loop_of(lambda: Body(nn.Identity(), last=Scaled(16, 4, 2e5))),
                "head.layer",
                ("head",),
            ),
            Network(f"attention scores, {tag}", arm, loop_of(lambda: Body(Attention(700.0))), "#scores", ("middle",)),
        ]
    found += [
        Network(
            "exp in a loss of fp16",
            "apex:O2",
            loop_of(plain, loss=exp_loss, optimizer=slow),
            "#exp",
        ),
        Network(
            "sum in a loss of fp16",
            "apex:O2",
            loop_of(plain, loss=half_sum_loss, optimizer=slow),
            "#half sum",
        ),
        Network(
            "cosh in a loss of fp16",
            "apex:O2",
            loop_of(plain, loss=cosh_loss, optimizer=slow),
            "#cosh",
        ),
        Network("cube, native", "native:fp16", loop_of(middle(cube)), "middle"),
        Network("norm of a long vector, native", "native:fp16", loop_of(middle(big_norm)), "middle"),
        Network("division by a small number, native", "native:fp16", loop_of(middle(small_division)), "middle"),
        Network(
            "small eps in Adam",
            "half",
            loop_of(plain, optimizer=lambda params: torch.optim.Adam(params, lr=1e-3, eps=1e-8)),
            "master_weights",
        ),
        Network(
            "lost updates",
            "half",
            loop_of(plain, optimizer=slow),
            "master_weights",
        ),
        Network("tiny gradients without a scale", "half", loop_of(plain, loss=tiny_loss), "loss_scale"),
        Network(
            "tiny gradients at a fixed scale",
            "apex:O2,loss_scale=2",
            loop_of(plain, loss=tiny_loss),
            "loss_scale",
        ),
        Network(
            "a fixed scale that is too large",
            "apex:O2,loss_scale=16777216",
            loop_of(plain),
            "loss_scale",
        ),
        Network(
            "running mean in bf16",
            "half:bf16,master_weights",
            loop_of(lambda: Body(RunningMean(16, 300.0, 0.01))),
            "middle",
        ),
    ]
    return found


def _healthy() -> list[Network]:
    models: dict[str, Callable[[], nn.Module]] = {
        "two layers": plain,
        "layer norm": lambda: Body(nn.LayerNorm(16)),
        "batch norm": lambda: Body(nn.BatchNorm1d(16)),
        "gelu and dropout": lambda: Body(nn.Sequential(nn.GELU(), nn.Dropout(0.1))),
        "attention": lambda: Body(Attention(1.0)),
        "deep": lambda: Body(nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(4)))),
    }
    arms = ("apex:O1", "apex:O2", "native:fp16", "native:bf16", "half:master_weights,dynamic")
    return [Network(f"{name}, {arm}", arm, loop_of(make)) for name, make in models.items() for arm in arms]


class Convolutions(nn.Module):
    """Two convolutions around a normalization by hand."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.normalize = Apply(lambda x: x * factor / ((x * factor).square().mean((2, 3), keepdim=True) + 1.0).sqrt())
        self.tail = nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(-1, 1, 4, 4)
        out: Tensor = self.tail(self.normalize(torch.relu(self.stem(x)))).mean((2, 3))
        return out


class Recurrent(nn.Module):
    """A GRU over four parts of the input, whose last state is raised to a power."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.cell = nn.GRU(4, 16, batch_first=True)
        self.power = Apply(lambda x: (x * factor).pow(4) / factor**4)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.cell(x.reshape(-1, 4, 4))
        out: Tensor = self.head(self.power(states[:, -1]))
        return out


class Shared(nn.Module):
    """A layer that is used twice, with a product of its results."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.square = Apply(lambda x: (x * factor) * (x * factor) / factor**2)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.square(self.layer(self.layer(x))))
        return out


def log_odds(x: Tensor) -> Tensor:
    return torch.log1p(x / (1.0 - x + 1e-9))


class Blocks(nn.Module):
    """A stack whose third block has an odds ratio instead of an activation."""

    def __init__(self, slope: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))
        self.blocks[2][1] = Apply(
            lambda x: torch.log1p(torch.sigmoid(x * slope) / (1.0 - torch.sigmoid(x * slope) + 1e-9))
        )
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def distances(x: Tensor) -> Tensor:
    far = x + 150.0
    return ((far[:, None] - far[None] * -1.0).square().sum(-1) / 1e5).repeat(1, 2)


def logsumexp_by_hand(x: Tensor) -> Tensor:
    return x + torch.log(torch.exp(x * 12.0).sum(-1, keepdim=True)) / 12.0


def divergence_by_hand(logits: Tensor, y: Tensor) -> Tensor:
    p = torch.softmax(logits.half() * 30.0, -1).half()
    return (p * torch.log(p / 1e-9)).sum(-1).mean()  # plant: divergence


def _held_out() -> list[Network]:
    sixteen = "half:master_weights,dynamic"
    return [
        Network("instance norm by hand, convolutions", sixteen, loop_of(lambda: Convolutions(800.0)), "normalize"),
        Network(
            "instance norm by hand, convolutions, O2", "apex:O2", loop_of(lambda: Convolutions(800.0)), "normalize"
        ),
        Network("fourth power after a GRU, O2", "apex:O2", loop_of(lambda: Recurrent(60.0)), "power"),
        Network("product of a shared layer, O2", "apex:O2", loop_of(lambda: Shared(2000.0)), "square"),
        Network("product of a shared layer, native", "native:fp16", loop_of(lambda: Shared(2000.0)), "square"),
        Network("odds in the third block, O2", "apex:O2", loop_of(lambda: Blocks(60.0)), "blocks.2.1", ("blocks.2",)),
        Network("distances of far points, O2", "apex:O2", loop_of(middle(distances)), "middle"),
        Network("logsumexp by hand, half", sixteen, loop_of(middle(logsumexp_by_hand)), "middle"),
        Network("divergence in a loss of fp16", "apex:O2", loop_of(plain, loss=divergence_by_hand), "#divergence"),
        Network("Adam with a large eps lost in fp16", "half", loop_of(plain, optimizer=tiny_adam), "master_weights"),
    ]


PLANTED = _planted()
HELD_OUT = _held_out()
HEALTHY = _healthy()
