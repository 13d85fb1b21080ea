"""Small networks with one planted fault of precision each, and healthy ones: what `diagnose` is measured on.

`NETWORKS` is the table; its column `corpus` says when a network was written:

    planted     the thresholds of the diagnosis were settled with these
    held out    after that, changing none of them
    new, everyday, written    later still, each before the diagnosis first ran on it

A loop gets a precision and trains; the place of a planted fault is the name of a module, a mark in a line of this file,
or an option of the arm. Networks of `written` compute their loss themselves, as models of a library do.
"""

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ampcompare import Precision
from ampcompare.results.records.diagnosis import Diagnosis
from tests.diagnosis import loops

STEPS = 40
SIXTEEN, BF16 = "half:masters=fp32,dynamic", "half:bf16,masters=fp32"
# one alone leaves gradients of zero: in fp16, unscaled, they are that again
SCALED = "loss_scale, master_weights"
O1, O2, NATIVE = "apex:O1", "apex:O2", "native:fp16"
Loss = Callable[[Tensor, Tensor], Tensor]
SGD = functools.partial(torch.optim.SGD, lr=0.05)


def place_of_mark(mark: str) -> str:
    """Return file:line of the line of this file that ends with a mark, with the file's name alone."""
    file = Path(__file__)
    lines = file.read_text(encoding="utf-8").splitlines()
    (number,) = [at for at, line in enumerate(lines, 1) if line.endswith(f"# plant: {mark}")]
    return f"{file.name}:{number}"


@dataclass(frozen=True)
class Network:
    """One network.

    Attributes:
        place: module, `#mark` of a line, or options of the arm; "" for a healthy network.
        also: other places of which each removes the same cause.
        corpus: that it is one of.
    """

    name: str
    arm: str
    loop: Callable[[Precision], Any]
    place: str = ""
    also: tuple[str, ...] = ()
    corpus: str = ""

    @property
    def kind(self) -> str:
        """The group of the results: corpus, and whether a fault is planted or the network is healthy."""
        if self.corpus == "held out":
            return self.corpus
        word = "planted" if self.place else "healthy"
        return word if self.corpus == "planted" else f"{self.corpus} {word}"


def proposed(found: Diagnosis) -> list[str]:
    """Return what a diagnosis proposes: modules, file:line with the file's name alone, names of options."""
    if found.cure is None:
        return []
    names = [option.partition("=")[0] for option in found.cure.option.split(", ") if option]
    return [*(place.rpartition("/")[2] for place in found.cure.keeps), *names]


def is_found(network: Network, found: Diagnosis) -> bool:
    """Return whether the planted place, and nothing else, is proposed."""
    return ", ".join(proposed(found)) in _places(network)


def is_named(network: Network, found: Diagnosis) -> bool:
    """Return whether the first line has the planted place, as the place of the fault, its reason or its cure."""
    if not found.faults:
        return False
    first = found.faults[0]
    known = {first.place.module, first.place.where.rpartition("/")[2], *proposed(found)}
    return any(known.issuperset(place.split(", ")) or place in first.reason for place in _places(network))


def _places(network: Network) -> list[str]:
    return [
        place_of_mark(place[1:]) if place.startswith("#") else place
        for place in (network.place, *network.also)
    ]


def loop_of(
    make: Callable[[], nn.Module],
    *,
    loss: Loss | None = F.cross_entropy,
    optimizer: Callable[[Any], torch.optim.Optimizer] = SGD,
    inputs: Callable[[int, int], Tensor] = torch.randn,
) -> Callable[[Precision], Any]:
    """Return a loop over random batches of 8 rows of 16 numbers.

    Args:
        loss: None where the model is called with the labels and returns the loss.
    """

    def loss_of(model: Any, _: int) -> Tensor:
        x, y = inputs(8, 16), torch.arange(8) % 4
        return model(x, y) if loss is None else loss(model(x), y)

    return loops.loop_of(make, loss_of, optimizer=optimizer, steps=STEPS)


def own_loss(make: Callable[[], nn.Module], **options: Any) -> Callable[[Precision], Any]:
    """Return a loop for a model that computes its loss."""
    return loop_of(make, loss=None, **options)


class Net(nn.Module):
    """Named parts, and how inputs are led through them."""

    def __init__(self, through: Callable[..., Tensor], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.through = through

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.through(self, *inputs)


def body(middle: nn.Module, *, last: nn.Module | None = None) -> Net:
    """Return two layers around a part in the middle, which holds the fault or nothing."""
    return Net(
        lambda m, x: m.head(m.middle(torch.relu(m.first(x)))),
        first=nn.Linear(16, 16),
        middle=middle,
        head=last or nn.Linear(16, 4),
    )


class Apply(nn.Module):
    """A function as a module of its own."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def scaled(factor: float) -> Net:
    """Return a linear layer whose weights are multiplied once, at the start."""
    layer = nn.Linear(16, 4)
    with torch.no_grad():
        layer.weight.mul_(factor)
    return Net(lambda m, x: m.layer(x), layer=layer)


class RunningMean(nn.Module):
    """Subtracts a mean that it keeps in a buffer."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full((16,), 300.0))

    def forward(self, x: Tensor) -> Tensor:
        x = x + 300.0
        with torch.no_grad():
            self.mean.add_(0.01 * (x.mean(0).to(self.mean.dtype) - self.mean))
        return x - self.mean


def linears(*names: str) -> dict[str, nn.Module]:
    return {name: nn.Linear(16, 16) for name in names}


def attention(scale: float) -> Net:
    def forward(m: Any, x: Tensor) -> Tensor:
        scores = m.query(x * scale) @ m.key(x * scale).T  # plant: scores
        return torch.softmax(scores / (16.0 * scale**2), -1) @ m.value(x)

    return Net(forward, **linears("query", "key", "value"))


def norm_of(x: Tensor) -> Tensor:
    return x / (x * x).sum(-1, keepdim=True).sqrt()


# The losses of one expression.
LOSSES: dict[str, Loss] = {
    "cosh": lambda logits, y: torch.log(torch.cosh(logits.half() * 60.0)).mean(),  # plant: cosh
    "exp": lambda logits, y: torch.exp(logits.half() * 20.0 + 8.0).mean().log(),  # plant: exp
    "half_sum": lambda logits, y: (logits.half() * 300.0).square().sum() / 1e6,  # plant: half sum
    "tiny": lambda logits, y: F.cross_entropy(logits, y) * 1e-7,
    "faint": lambda logits, y: F.cross_entropy(logits.float(), y) * 3e-8,
    "far_targets": lambda logits, y: F.mse_loss(logits.float(), F.one_hot(y, 4).float() * 100.0),
    "triplet": lambda logits, y: F.triplet_margin_loss(
        logits.float(), logits.float().roll(4, 0), logits.float().roll(1, 0)
    ),
    "partly_masked": lambda logits, y: F.cross_entropy(logits.float(), torch.where(y == 0, -100, y)),
}
SLOW = functools.partial(torch.optim.SGD, lr=1e-4)
TINY_ADAM = functools.partial(torch.optim.Adam, lr=1e-5, eps=1e-4)
CRAWLING = functools.partial(torch.optim.AdamW, lr=1e-6, eps=1e-6)
SLOWEST = functools.partial(torch.optim.SGD, lr=1e-5)
ADAM = functools.partial(torch.optim.AdamW, lr=1e-3)


def logsumexp_by_hand(x: Tensor) -> Tensor:
    return x + torch.log(torch.exp(x * 12.0).sum(-1, keepdim=True)) / 12.0


def long_cumsum(x: Tensor) -> Tensor:
    return x + x.abs().repeat(1, 512).mul(40.0).cumsum(-1)[:, -16:] * 1e-6


def softmax_by_hand(x: Tensor) -> Tensor:
    powers = torch.exp(x * 30.0)
    return powers / powers.sum(-1, keepdim=True)


def small_division(x: Tensor) -> Tensor:
    tiny = x.detach().abs().mean() * 1e-5 * 1e-4
    return x * 1e-5 / tiny * 1e-4


def variance_by_hand(x: Tensor) -> Tensor:
    y = x + 200.0
    variance = (y * y).mean(-1, keepdim=True) - y.mean(-1, keepdim=True) ** 2
    return x * (variance + 1.0).rsqrt()


def mask_value(x: Tensor) -> Tensor:
    mask = torch.zeros(8, 16)
    mask[:, ::2] = -1e9
    mask[3] = -1e9  # a row without any element: the mean over all in fp32, NaN where -1e9 is -inf
    return torch.softmax(x + mask.to(x.dtype), -1)


def middle(function: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: body(Apply(function))


def plain() -> nn.Module:
    return body(nn.Identity())


def convolutions(factor: float) -> nn.Module:
    return Net(
        lambda m, x: m.tail(m.normalize(torch.relu(m.stem(x.reshape(-1, 1, 4, 4))))).mean((2, 3)),
        stem=nn.Conv2d(1, 8, 3, padding=1),
        normalize=Apply(
            lambda x: x * factor / ((x * factor).square().mean((2, 3), keepdim=True) + 1.0).sqrt()
        ),
        tail=nn.Conv2d(8, 4, 3, padding=1),
    )


def recurrent(factor: float) -> nn.Module:
    return Net(
        lambda m, x: m.head(m.power(m.cell(x.reshape(-1, 4, 4))[0][:, -1])),
        cell=nn.GRU(4, 16, batch_first=True),
        power=Apply(lambda x: (x * factor).pow(4) / factor**4),
        head=nn.Linear(16, 4),
    )


def shared(factor: float) -> nn.Module:
    return Net(
        lambda m, x: m.head(m.square(m.layer(m.layer(x)))),
        layer=nn.Linear(16, 16),
        square=Apply(lambda x: (x * factor) * (x * factor) / factor**2),
        head=nn.Linear(16, 4),
    )


def in_turn(
    blocks: Iterable[nn.Module], *, call: Callable[..., Any] = lambda block, x: block(x)
) -> nn.Module:
    return Net(
        lambda m, x: m.head(functools.reduce(lambda value, block: call(block, value), m.blocks, x)),
        blocks=nn.ModuleList(blocks),
        head=nn.Linear(16, 4),
    )


def odds_in_third_block(slope: float) -> nn.Module:
    odds = Apply(lambda x: torch.log1p(torch.sigmoid(x * slope) / (1.0 - torch.sigmoid(x * slope) + 1e-9)))
    return in_turn(
        nn.Sequential(nn.Linear(16, 16), odds if number == 2 else nn.Tanh()) for number in range(4)
    )


def distances(x: Tensor) -> Tensor:
    far = x + 150.0
    return ((far[:, None] - far[None] * -1.0).square().sum(-1) / 1e5).repeat(1, 2)


def divergence_by_hand(logits: Tensor, y: Tensor) -> Tensor:
    p = torch.softmax(logits.half() * 30.0, -1).half()
    return (p * torch.log(p / 1e-9)).sum(-1).mean()  # plant: divergence


def rms_without_room(x: Tensor) -> Tensor:
    small = x * 1e-4
    return small * (small.square().mean(-1, keepdim=True) + 1e-8).rsqrt()


def contrastive(logits: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(logits.half(), dim=-1)
    scores = z @ z.T / 1e-5  # plant: contrastive temperature
    return F.cross_entropy(scores.float() * 1e-4, y)


def focal_in_half(logits: Tensor, y: Tensor) -> Tensor:
    scores = logits.half().gather(1, y[:, None]) * 60.0
    return -(torch.log(torch.sigmoid(scores - 25.0)) * 0.01).float().mean()  # plant: focal in half


def feedforward(factor: float) -> Net:
    return Net(
        lambda m, x: x + m.down(m.act(m.up(x))),
        up=nn.Linear(16, 32),
        act=Apply(lambda x: torch.relu(x * factor).square() / factor**2),
        down=nn.Linear(32, 16),
    )


def channel_norm(factor: float) -> nn.Module:
    return Apply(
        lambda x: x * factor / (x * factor * (x * factor)).sum((0, 2, 3), keepdim=True).add(1.0).sqrt() * 10.0
    )


def pictures(norm: nn.Module) -> nn.Module:
    return Net(
        lambda m, x: m.head(torch.relu(m.norm(m.conv(x.reshape(-1, 1, 4, 4)))).mean((2, 3))),
        conv=nn.Conv2d(1, 8, 3, padding=1),
        norm=norm,
        head=nn.Linear(8, 4),
    )


def causal() -> Net:
    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.inner(x.reshape(-1, 4, 4)).chunk(3, -1)
        mask = torch.ones(4, 4, dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(1, 2) / 2).masked_fill(mask, float("-inf"))
        return m.head((torch.softmax(scores, -1) @ v).flatten(1))

    return Net(forward, inner=nn.Linear(4, 12), head=nn.Linear(16, 4))


def torch_encoder() -> nn.Module:
    return Net(
        lambda m, x: m.head(m.layer(x.reshape(-1, 2, 8)).flatten(1)),
        layer=nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True),
        head=nn.Linear(16, 4),
    )


MEAN = functools.partial(torch.mean, dim=1)


def states_of(cell: nn.Module, read: Callable[[Tensor], Tensor]) -> nn.Module:
    return Net(lambda m, x: m.head(read(m.cell(x.reshape(-1, 4, 4))[0])), cell=cell, head=nn.Linear(8, 4))


def recomputed() -> nn.Module:
    blocks = (nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(2))
    return in_turn(blocks, call=functools.partial(checkpoint, use_reentrant=False))


def twins() -> Net:
    def forward(m: Any, x: Tensor) -> Tensor:
        left, right = map(m.tower, x.chunk(2, -1))
        likeness = F.cosine_similarity(left, right)[:, None].to(left.dtype)
        return m.head(torch.cat([left - right, likeness], -1))

    return Net(
        forward, tower=nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)), head=nn.Linear(9, 4)
    )


def blocks(factor: float) -> nn.Module:
    return nn.Sequential(feedforward(1.0), feedforward(factor), feedforward(1.0), nn.Linear(16, 4))


def tempered(temperature: float) -> Net:
    def forward(m: Any, x: Tensor) -> Tensor:
        scores = m.query(x) @ (m.key(x) / temperature).T  # plant: temperature
        return torch.softmax(scores, -1) @ m.value(x)

    return Net(forward, **linears("query", "key", "value"))


def masked(value: float) -> Net:
    """Return attention to which a padding mask and a causal mask are added."""

    def forward(m: Any, x: Tensor) -> Tensor:
        scores = m.query(x) @ m.key(x).T
        causal = torch.ones(8, 8).triu(0).to(scores.dtype) * value
        padding = torch.zeros(8, 8).to(scores.dtype)
        padding[0] = value  # an empty row: uniform in fp32
        scores = scores + causal + padding  # plant: masks
        return x + torch.softmax(scores, -1) @ x

    return Net(forward, **linears("query", "key"))


def words(factor: float) -> Net:
    def forward(m: Any, x: Tensor) -> Tensor:
        words = m.table((x.float().abs() * 10).long() % 32)
        words = words * factor  # plant: embedding
        return words.mean(1) / factor

    embed = Net(forward, table=nn.Embedding(32, 16))
    return Net(lambda m, x: m.head(m.embed(x)), embed=embed, head=nn.Linear(16, 4))


def position(rate: float) -> nn.Module:
    return Apply(lambda x: x + torch.sin(torch.exp(torch.arange(16, dtype=x.dtype, device=x.device) * rate)))


def growing(growth: float, steps: int) -> Net:
    def forward(m: Any, x: Tensor) -> Tensor:
        state = torch.zeros_like(x)
        for _ in range(steps):
            state = state * growth + torch.tanh(m.cell(x))  # plant: growing
        return state / growth**steps  # plant: shrinking

    return Net(forward, **linears("cell"))


def stack(activations: Iterable[nn.Module]) -> nn.Module:
    parts = (OrderedDict(layer=nn.Linear(16, 16), act=activation) for activation in activations)
    return in_turn(nn.Sequential(part) for part in parts)


def layer_norm(x: Tensor, factor: float = 1.0) -> Tensor:
    y = x * factor
    centered = y - y.mean(-1, keepdim=True)
    return centered * (centered.square().mean(-1, keepdim=True) + 1e-3).rsqrt()


def gelu(x: Tensor, factor: float = 1.0) -> Tensor:
    y = x * factor
    return 0.5 * y * (1.0 + torch.tanh(0.79788 * (y + 0.044715 * y.pow(3)))) / factor


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


def separable() -> nn.Module:
    return nn.Sequential(
        Apply(lambda x: x.reshape(-1, 1, 4, 4)),
        nn.Conv2d(1, 8, 1),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.BatchNorm2d(8),
        nn.Hardswish(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 4),
    )


def drawn(encoded: Tensor) -> Tensor:
    mean, log_variance = encoded.chunk(2, -1)
    return mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)


def variational() -> nn.Module:
    return Net(lambda m, x: m.head(drawn(m.encoder(x))), encoder=nn.Linear(16, 16), head=nn.Linear(8, 4))


def experts() -> Net:
    def forward(m: Any, x: Tensor) -> Tensor:
        values, places = m.gate(x).topk(2, -1)
        outputs = torch.stack([expert(x) for expert in m.experts], 1)
        chosen = outputs.gather(1, places[..., None].expand(-1, -1, 4))
        return (torch.softmax(values, -1)[..., None] * chosen).sum(1)

    return Net(forward, gate=nn.Linear(16, 4), experts=nn.ModuleList(nn.Linear(16, 4) for _ in range(4)))


def rare_rows(count: int, width: int) -> Tensor:
    x = torch.randn(count, width)
    x[::2] = 0.0
    return x


def padded_attention(away: float) -> Net:
    """Return one head; sentences are padded, and one of them is empty."""

    def forward(m: Any, x: Tensor, keep: Tensor) -> Tensor:
        query, key, value = m.qkv(x).chunk(3, -1)
        scores = query @ key.transpose(-2, -1) / 8**0.5
        scores = scores + (1.0 - keep[:, None, :].to(scores.dtype)) * away  # plant: padding
        return m.out(torch.softmax(scores, -1) @ value)

    return Net(forward, qkv=nn.Linear(8, 24), out=nn.Linear(8, 8))


def encoder(away: float) -> Net:
    """Return a transformer block on eight tokens of eight numbers, and a classifier."""

    def forward(m: Any, x: Tensor, y: Tensor) -> Tensor:
        keep = torch.arange(16) < torch.tensor([16, 9, 4, 0, 12, 3, 16, 7])[:, None]
        tokens = m.embed(x[..., None])
        tokens = m.norm(tokens + m.attention(tokens, keep))
        return F.cross_entropy(m.head(tokens.mean(1)).float(), y)

    return Net(
        forward,
        embed=nn.Linear(1, 8),
        attention=padded_attention(away),
        norm=nn.LayerNorm(8),
        head=nn.Linear(8, 4),
    )


def views(temperature: float, by_hand: bool = True) -> Net:
    """Return a contrastive loss of two views of each row, drawn together."""

    def forward(m: Any, x: Tensor, y: Tensor) -> Tensor:
        one, two = (F.normalize(m.encoder(x + 0.1 * torch.randn_like(x)), dim=-1) for _ in range(2))
        similar = one @ two.T / temperature
        if not by_hand:
            return F.cross_entropy(similar.float(), torch.arange(8))
        weights = torch.exp(similar)  # plant: contrastive
        return -torch.log(weights.diagonal() / weights.sum(-1)).mean()

    return Net(forward, encoder=nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)))


def classifier(loss: Loss, sharpness: float = 1.0) -> Net:
    layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    return Net(lambda m, x, y: loss(m.body(x) * sharpness, y), body=layers)


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


def gan(sure: float, by_hand: bool = True) -> Net:
    """Return a discriminator that is sure of itself, and the losses of the first paper."""

    def forward(m: Any, x: Tensor, y: Tensor) -> Tensor:
        real = m.discriminator(x) * sure
        fake = m.discriminator(m.generator(torch.randn_like(x))) * sure
        if not by_hand:
            loss = F.binary_cross_entropy_with_logits
            return loss(real, torch.ones_like(real)) + loss(fake, torch.zeros_like(fake))
        d_real, d_fake = torch.sigmoid(real), torch.sigmoid(fake)  # plant: judged
        return -(torch.log(d_real) + torch.log(1.0 - d_fake)).mean()  # plant: adversarial

    discriminator = (nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    return Net(forward, generator=nn.Linear(16, 16), discriminator=nn.Sequential(*discriminator))


def penalized(size: float) -> Net:
    """Return a critic with a penalty on the norm of its gradient."""

    def forward(m: Any, x: Tensor, y: Tensor) -> Tensor:
        x = x.to(m.critic[0].weight.dtype).requires_grad_()
        judged = m.critic(x) * size
        (slope,) = torch.autograd.grad(judged.sum(), x, create_graph=True)
        norm = torch.sqrt(torch.sum(slope**2, dim=1) + 1e-12)  # plant: penalty
        return judged.mean() + 10.0 * ((norm - 1.0) ** 2).mean()

    return Net(forward, critic=nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)))


def pooled(pool: nn.Module, length: int = 16) -> Net:
    def forward(m: Any, x: Tensor, y: Tensor) -> Tensor:
        x = x.repeat(1, length // 16)
        return F.cross_entropy(m.head(m.pool(m.features(x[:, None]))), y)

    features = nn.Sequential(nn.Conv1d(1, 8, 3, padding=1), nn.ReLU())
    return Net(forward, features=features, pool=pool, head=nn.Linear(8, 4))


def gem(size: float, least: float = 1e-6) -> nn.Module:
    return Apply(lambda x: (x * size).clamp(min=least).pow(3.0).mean(-1).pow(1.0 / 3.0) / size)


def mean_of_beginnings(offset: float) -> nn.Module:
    return Apply(lambda x: torch.cumsum(x + offset, -1)[..., -1] / x.shape[-1] - offset)


def standardized(x: Tensor) -> Tensor:
    """Divide by statistics over the batch and the signal, by the difference of two means."""
    x = x * 600.0
    mean = x.mean((0, 2), keepdim=True)
    variance = (x**2).mean((0, 2), keepdim=True) - mean**2
    return ((x - mean) / torch.sqrt(variance + 1e-5)).amax(-1)


def directions(eps: float) -> Net:
    """Return word vectors of length one; the padding word is zero."""

    def forward(m: Any, x: Tensor, y: Tensor) -> Tensor:
        tokens = (x.float().abs() * 4).long() % 32
        vectors = F.normalize(m.words(tokens), dim=-1, eps=eps)  # plant: directions
        return F.cross_entropy(m.head(vectors.mean(1)).float(), y)

    return Net(forward, words=nn.Embedding(32, 8, padding_idx=0), head=nn.Linear(8, 4))


def gumbel(in_fp32: bool = False) -> Net:
    """Return a choice among 512 codes with noise."""

    def forward(m: Any, x: Tensor, y: Tensor) -> Tensor:
        logits = m.logits(x)
        uniform = torch.rand(logits.shape).clamp(1e-4, 1 - 1e-6)
        if not in_fp32:
            uniform = uniform.to(logits.dtype)  # plant: uniform
        noise = -torch.log(-torch.log(uniform))  # plant: gumbel
        chosen = torch.softmax(logits + noise.to(logits.dtype), -1)
        return F.cross_entropy(m.codes(chosen).float(), y)

    return Net(forward, logits=nn.Linear(16, 512), codes=nn.Linear(512, 4))


def prototypes(offset: float) -> Net:
    """Return distances to four prototypes, by the square of a difference written out."""

    def forward(m: Any, x: Tensor, y: Tensor) -> Tensor:
        a, b = m.body(x) + offset, m.points + offset
        squares = a.pow(2).sum(-1)[:, None] + b.pow(2).sum(-1) - 2 * a @ b.T  # plant: squares
        distances = squares.clamp(min=1e-8).sqrt()  # plant: root
        return F.cross_entropy(-distances.float(), y)

    return Net(forward, body=nn.Linear(16, 16), points=nn.Parameter(torch.randn(4, 16)))


def rotary(first: int, in_fp32: bool = False) -> nn.Module:
    """Return what turns pairs of features by an angle that grows with the position."""

    def forward(x: Tensor) -> Tensor:
        dtype = torch.float32 if in_fp32 else x.dtype
        positions = torch.arange(first, first + x.shape[1]).to(dtype)
        angles = positions[:, None] * torch.tensor([1.0, 0.7, 0.5, 0.3]).to(dtype)
        sine, cosine = angles.sin().to(x.dtype), angles.cos().to(x.dtype)
        left, right = x.chunk(2, -1)
        return torch.cat([left * cosine - right * sine, right * cosine + left * sine], -1)

    return Apply(forward)


def sequence(positions: nn.Module) -> Net:
    def forward(m: Any, x: Tensor, y: Tensor) -> Tensor:
        tokens = m.positions(m.embed(x[..., None]))
        return F.cross_entropy(m.head(m.norm(tokens.flatten(1))).float(), y)

    return Net(
        forward, embed=nn.Linear(1, 8), positions=positions, norm=nn.LayerNorm(128), head=nn.Linear(128, 4)
    )


def cells() -> Net:
    def forward(m: Any, x: Tensor, y: Tensor) -> Tensor:
        state = None
        for at in range(x.shape[1]):
            state = m.cell(x[:, at : at + 1], state)
        assert state is not None
        return F.cross_entropy(m.head(state[0]), y)

    return Net(forward, cell=nn.LSTMCell(1, 8), head=nn.Linear(8, 4))


def _of(corpus: str, rows: Iterable[tuple[Any, ...]]) -> list[Network]:
    return [Network(*row, corpus=corpus) for row in rows]


def cube_by_products(x: Tensor) -> Tensor:
    x = x * 60.0
    return x * x * x * 1e-5


MIDDLES: dict[str, Callable[[Tensor], Tensor]] = {
    "norm of a long vector": lambda x: norm_of(x * 500.0),
    "softmax by hand": softmax_by_hand,
    "sum over many elements": lambda x: (
        x + x.repeat_interleave(4096, 0).reshape(8, -1).mul(20.0).abs().sum(-1, keepdim=True) * 1e-6
    ),
    "division by a small number": small_division,
    "variance by hand": variance_by_hand,
    "cube": lambda x: ((x * 60.0) ** 3) * 1e-5,
    "mask value -1e9": mask_value,
    "log of a small number": lambda x: torch.log(torch.sigmoid(-x * 25.0 - 5.0) + 1e-12) * 0.01,
}
PLANTED_TWICE = (
    *((name, loop_of(middle(function)), "middle", ()) for name, function in MIDDLES.items()),
    ("large logits", loop_of(lambda: body(nn.Identity(), last=scaled(2e5))), "head.layer", ("head",)),
    ("attention scores", loop_of(lambda: body(attention(700.0))), "#scores", ("middle",)),
)
HEALTHY_MODELS: dict[str, Callable[[], nn.Module]] = {
    "two layers": plain,
    "layer norm": lambda: body(nn.LayerNorm(16)),
    "batch norm": lambda: body(nn.BatchNorm1d(16)),
    "gelu and dropout": lambda: body(nn.Sequential(nn.GELU(), nn.Dropout(0.1))),
    "attention": lambda: body(attention(1.0)),
    "deep": lambda: body(nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(4)))),
}
PLANTED = [
    *(
        (f"{name}, {tag}", arm, *how)
        for arm, tag in ((O2, "O2"), (SIXTEEN, "half"))
        for name, *how in PLANTED_TWICE
    ),
    ("exp in a loss of fp16", O2, loop_of(plain, loss=LOSSES["exp"], optimizer=SLOW), "#exp"),
    ("sum in a loss of fp16", O2, loop_of(plain, loss=LOSSES["half_sum"], optimizer=SLOW), "#half sum"),
    ("cosh in a loss of fp16", O2, loop_of(plain, loss=LOSSES["cosh"], optimizer=SLOW), "#cosh"),
    *(
        (
            f"{name}, native",
            NATIVE,
            loop_of(middle({**MIDDLES, "cube by products": cube_by_products}[name])),
            "middle",
        )
        # autocast computes powers and norms in fp32
        for name in ("cube by products", "division by a small number")
    ),
    (
        "small eps in Adam",
        "half",
        loop_of(plain, optimizer=lambda params: torch.optim.Adam(params, lr=1e-3, eps=1e-8)),
        "master_weights",
    ),
    ("lost updates", "half", loop_of(plain, optimizer=SLOW), "master_weights"),
    ("tiny gradients without a scale", "half", loop_of(plain, loss=LOSSES["tiny"]), SCALED),
    (
        "tiny gradients at a fixed scale",
        "apex:O2,loss_scale=2",
        loop_of(plain, loss=LOSSES["tiny"]),
        "loss_scale",
    ),
    ("a fixed scale that is too large", "apex:O2,loss_scale=16777216", loop_of(plain), "loss_scale"),
    ("running mean in bf16", BF16, loop_of(lambda: body(RunningMean())), "middle"),
]
HELD_OUT = [
    ("instance norm by hand, convolutions", SIXTEEN, loop_of(lambda: convolutions(800.0)), "normalize"),
    ("instance norm by hand, convolutions, O2", O2, loop_of(lambda: convolutions(800.0)), "normalize"),
    ("fourth power after a GRU, O2", O2, loop_of(lambda: recurrent(60.0)), "power"),
    ("product of a shared layer, O2", O2, loop_of(lambda: shared(2000.0)), "square"),
    ("product of a shared layer, native", NATIVE, loop_of(lambda: shared(2000.0)), "square"),
    (
        "odds in the third block, O2",
        O2,
        loop_of(lambda: odds_in_third_block(60.0)),
        "blocks.2.1",
        ("blocks.2",),
    ),
    ("distances of far points, O2", O2, loop_of(middle(distances)), "middle"),
    ("logsumexp by hand, half", SIXTEEN, loop_of(middle(logsumexp_by_hand)), "middle"),
    ("divergence in a loss of fp16", O2, loop_of(plain, loss=divergence_by_hand), "#divergence"),
    ("Adam with a large eps lost in fp16", "half", loop_of(plain, optimizer=TINY_ADAM), "master_weights"),
]
HEALTHY = [
    (f"{name}, {arm}", arm, loop_of(make))
    for name, make in HEALTHY_MODELS.items()
    for arm in (O1, O2, NATIVE, "native:bf16", SIXTEEN)
]
NEW = [
    ("RMS norm with an eps that fp16 loses, O2", O2, loop_of(middle(rms_without_room)), "middle"),
    ("cumulative sum of a long row, half", SIXTEEN, loop_of(middle(long_cumsum)), "middle"),
    (
        "temperature of a contrastive loss, O2",
        O2,
        loop_of(plain, loss=contrastive),
        "#contrastive temperature",
    ),
    ("focal loss in fp16, half", SIXTEEN, loop_of(plain, loss=focal_in_half), "#focal in half"),
    ("squared ReLU in the second block, native", NATIVE, loop_of(lambda: blocks(500.0)), "1.act"),
    ("channel norm by sums, native", NATIVE, loop_of(lambda: pictures(channel_norm(300.0))), "norm"),
    ("updates below bf16, half", "half:bf16", loop_of(plain, optimizer=CRAWLING), "master_weights"),
    ("faint loss without a scale, O3", "apex:O3", loop_of(plain, loss=LOSSES["faint"]), SCALED),
    ("encoder layer, O2", O2, loop_of(torch_encoder)),
    ("GRU, native", NATIVE, loop_of(lambda: states_of(nn.GRU(4, 8, batch_first=True), lambda x: x[:, -1]))),
    ("group norm of pictures, O1", O1, loop_of(lambda: pictures(nn.GroupNorm(2, 8)))),
    ("checkpointed blocks, half", SIXTEEN, loop_of(recomputed)),
    ("squared ReLU of ordinary size, O2", O2, loop_of(lambda: blocks(1.0))),
    ("causal mask of minus infinity, native", NATIVE, loop_of(causal)),
    ("far targets, O2", O2, loop_of(plain, loss=LOSSES["far_targets"])),
    ("twin towers, bf16", "native:bf16", loop_of(twins)),
]


EVERYDAY = [
    (
        "temperature of attention, native",
        NATIVE,
        loop_of(lambda: body(tempered(1e-6))),
        "#temperature",
        ("middle",),
    ),
    ("layer norm by hand, O2", O2, loop_of(middle(lambda x: layer_norm(x, 3000.0))), "middle"),
    ("GELU by hand, half", SIXTEEN, loop_of(middle(lambda x: gelu(x, 400.0))), "middle"),
    ("scale of an embedding, O2", O2, loop_of(lambda: words(1e5)), "#embedding", ("embed",)),
    ("cosine in a loss of fp16", O2, loop_of(plain, loss=cosine_loss), "#cosine", ("#lengths",)),
    ("cross entropy by hand, half", SIXTEEN, loop_of(plain, loss=entropy_by_hand), "#entropy"),
    ("variance of a batch, bf16", BF16, loop_of(middle(spread)), "middle"),
    ("frequencies of positions, O2", O2, loop_of(lambda: body(position(0.9))), "middle"),
    ("differences of times, half", SIXTEEN, loop_of(middle(time_deltas)), "middle"),
    (
        "softplus by hand in the third block, native",
        NATIVE,
        loop_of(lambda: stack([nn.ReLU(), nn.Tanh(), softplus(60.0)])),
        "blocks.2.act",
    ),
    ("two masks that add up, O2", O2, loop_of(lambda: body(masked(-4e4))), "#masks", ("middle",)),
    (
        "a growing state, half",
        SIXTEEN,
        loop_of(lambda: body(growing(3.0, 12))),
        "#growing",
        ("middle", "#shrinking"),
    ),
    (
        "two layers of LSTM, bf16",
        "native:bf16",
        loop_of(lambda: states_of(nn.LSTM(4, 8, 2, batch_first=True), MEAN)),
    ),
    ("separable convolutions, O2", O2, loop_of(separable)),
    ("layer norm by hand of ordinary size, O2", O2, loop_of(middle(layer_norm))),
    ("GELU by hand of ordinary size, half", SIXTEEN, loop_of(middle(gelu))),
    ("softplus by hand of ordinary size, O1", O1, loop_of(lambda: stack([softplus(1.0)] * 3))),
    ("a sample of a distribution, native", NATIVE, loop_of(variational)),
    ("a gate of experts, bf16", BF16, loop_of(experts)),
    ("triplets, O2", O2, loop_of(plain, loss=LOSSES["triplet"])),
    ("targets that are left out, half", SIXTEEN, loop_of(plain, loss=LOSSES["partly_masked"])),
    ("inputs of zeros, native", NATIVE, loop_of(plain, inputs=rare_rows)),
]


WRITTEN = [
    ("padding of -1e9, half", SIXTEEN, own_loss(lambda: encoder(-1e9)), "#padding", ("attention",)),
    ("contrastive loss by hand, native", NATIVE, own_loss(lambda: views(0.07)), "#contrastive"),
    ("focal loss by hand, half", SIXTEEN, own_loss(lambda: classifier(focal, 60.0)), "#focal"),
    (
        "loss of a GAN by hand, O1",
        O1,
        own_loss(lambda: gan(50.0), optimizer=SLOWEST),
        "#judged",
        ("#adversarial",),
    ),
    ("penalty on a gradient, half", SIXTEEN, own_loss(lambda: penalized(1e-3)), "#penalty"),
    (
        "logarithm of a softmax, O2",
        O2,
        own_loss(lambda: classifier(policy_gradient, 50.0), optimizer=SLOWEST),
        "#policy",
    ),
    ("generalized mean, O2", O2, own_loss(lambda: pooled(gem(2e-3))), "pool"),
    ("mean of beginnings, native", NATIVE, own_loss(lambda: pooled(mean_of_beginnings(40.0), 2048)), "pool"),
    ("batch statistics by two means, half", SIXTEEN, own_loss(lambda: pooled(Apply(standardized))), "pool"),
    ("directions of zero vectors, half", SIXTEEN, own_loss(lambda: directions(1e-12)), "#directions"),
    ("Gumbel noise, O2", O2, own_loss(gumbel), "#uniform", ("#gumbel",)),
    (
        "divergence of a student, half",
        SIXTEEN,
        own_loss(lambda: classifier(distillation, 25.0), optimizer=SLOWEST),
        "#distillation",
    ),
    ("label smoothing by hand, O2", O2, own_loss(lambda: classifier(smoothed, 60.0)), "#smoothing"),
    ("distances to prototypes, O2", O2, own_loss(lambda: prototypes(20.0)), "#squares", ("#root",)),
    ("rotary positions, bf16", BF16, own_loss(lambda: sequence(rotary(4000))), "positions"),
    ("padding of -1e4, half", SIXTEEN, own_loss(lambda: encoder(-1e4))),
    ("contrastive loss of torch, native", NATIVE, own_loss(lambda: views(0.07, by_hand=False))),
    ("focal loss of logarithms, O2", O2, own_loss(lambda: classifier(focal_of_logarithms, 8.0))),
    ("loss of a GAN by torch, O1", O1, own_loss(lambda: gan(1.0, by_hand=False))),
    ("generalized mean of ordinary features, O2", O2, own_loss(lambda: pooled(gem(1.0, least=0.1)))),
    ("directions with an ordinary eps, half", SIXTEEN, own_loss(lambda: directions(1e-3))),
    ("Gumbel noise in fp32, O2", O2, own_loss(lambda: gumbel(in_fp32=True))),
    ("divergence by torch, half", SIXTEEN, own_loss(lambda: classifier(distillation_of_logarithms))),
    (
        "rotary positions in fp32, bf16",
        BF16,
        own_loss(lambda: sequence(rotary(4000, in_fp32=True)), optimizer=ADAM),
    ),
    ("cells of an LSTM, native", "native:bf16", own_loss(cells, optimizer=ADAM)),
]
NETWORKS = [
    *_of("planted", PLANTED),
    *_of("held out", HELD_OUT),
    *_of("planted", HEALTHY),
    *_of("new", NEW),
    *_of("everyday", EVERYDAY),
    *_of("written", WRITTEN),
]
