"""Trainings with a planted cause of lost time or memory, and healthy ones, for `profile_causes.py`.

A training is a loop, as a function of a precision, or settings of a recipe, whose switches `profile` trains too.
"""

import contextlib
import io
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Training:
    """A training with what `profile` should say first.

    Attributes:
        expected: kinds of reasons of which one must come first; none for a healthy training.
        settings: of a recipe, where there is no loop.
    """

    name: str
    arm: str
    expected: tuple[str, ...] = ()
    loop: Callable[[Any], None] | None = None
    settings: dict[str, Any] = field(default_factory=dict)


def images(size: int = 64, side: int = 16, channels: int = 8) -> Callable[[], Iterator[Batch]]:
    """Return a source of the same batch of noise, again and again."""

    def batches() -> Iterator[Batch]:
        batch = torch.randn(size, channels, side, side), torch.randint(8, (size,))
        while True:
            yield batch

    return batches


def vectors(size: int = 256, width: int = 256) -> Callable[[], Iterator[Batch]]:
    """Return a source of the same batch of vectors, again and again."""

    def batches() -> Iterator[Batch]:
        batch = torch.randn(size, width), torch.randint(8, (size,))
        while True:
            yield batch

    return batches


def fused_sgd(params: Any) -> torch.optim.Optimizer:
    """Return SGD in one operation."""
    return torch.optim.SGD(params, lr=0.01, momentum=0.9, fused=True)


def training(
    model: Callable[[], nn.Module],
    batches: Callable[[], Iterable[Batch]] | None = None,
    *,
    optimizer: Callable[[Any], torch.optim.Optimizer] = fused_sgd,
    loss_of: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    after_backward: Callable[[nn.Module, Tensor, Tensor], Any] = lambda model, loss, logits: None,
) -> Callable[[Any], None]:
    """Return a loop that trains a model."""

    source = batches or vectors()

    def train(precision: Any) -> None:
        made = model()
        (net,), (stepped,) = precision.prepare([made], [optimizer(made.parameters())])
        while True:
            for x, y in source():
                with precision.autocast():
                    logits = net(x)
                    loss = loss_of(logits.float(), y)
                precision.backward(loss, [stepped])
                after_backward(net, loss, logits)
                precision.step(stepped)
                stepped.zero_grad()

    return train


def mlp(width: int = 256, inner: int = 512, depth: int = 3) -> Callable[[], nn.Module]:
    """Return a maker of fully connected layers."""

    def make() -> nn.Module:
        sizes = [width, *[inner] * depth]
        layers = [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
        return nn.Sequential(*layers, nn.Linear(inner, 8))

    return make


def convnet(channels: int = 8) -> nn.Module:
    """Return convolutions with batch norm."""
    layers: list[nn.Module] = []
    for width in (32, 64, 64):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 8))


class Around(nn.Module):
    """Two layers with a function between them."""

    def __init__(self, function: Callable[[Tensor], Tensor], width: int = 256, inner: int = 512) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, inner), nn.Linear(inner, 8)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


def around(function: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    """Return a maker of two layers with a function between them."""
    return lambda: Around(function)


def fp32_chain(x: Tensor) -> Tensor:
    """Compute elementary functions in fp32."""
    wide = x.float()
    for _ in range(12):
        wide = torch.log1p(torch.exp(torch.tanh(wide)))
    return wide


class WideBlock(nn.Module):
    """Layers that run without autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(256, 256), nn.Linear(512, 8)
        self.wide = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with torch.autocast("cpu", enabled=False):
            x = self.wide(x.float())
        return self.last(x)


def casts_in_a_loop(x: Tensor) -> Tensor:
    """Cast one tensor to fp32 for each of many sums."""
    total = x[:1].float()
    for row in range(24):
        total = total + x.float()[row : row + 1]
    return F.relu(x) + total.to(x.dtype)


def back_and_forth(x: Tensor) -> Tensor:
    """Cast between two types before and behind each cheap operation."""
    for _ in range(12):
        x = F.relu(x.float()).to(torch.bfloat16)
    return x


class KeptTwice(nn.Module):
    """Keeps each of its activations in fp32 for one operation and in bf16 for another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(256, 512), nn.Linear(512, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).float()
        for _ in range(4):
            x = x.sigmoid()
            x = x * x.to(torch.bfloat16).square().float()
        return self.last(x)


class RowByRow(nn.Module):
    """Computes in Python what one operation would."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(256, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        weights = [1 / (1 + sum(index * step % 7 for step in range(4000))) for index in range(16)]
        return self.last(x * sum(weights))


class Samples(Dataset[Batch]):
    """Samples that take a while to load."""

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> Batch:
        time.sleep(0.0005)
        return torch.full((256,), float(index % 3)), torch.tensor(index % 8)


def slow_loader() -> Iterator[Batch]:
    """Return batches of a loader without workers."""
    return iter(DataLoader(Samples(), batch_size=64))


def sleepy_source() -> Iterator[Batch]:
    """Return batches of a loader whose collation is slow."""

    def collate(samples: list[Batch]) -> Batch:
        time.sleep(0.03)
        return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])

    class Fast(Samples):
        def __getitem__(self, index: int) -> Batch:
            return torch.full((256,), float(index % 3)), torch.tensor(index % 8)

    return iter(DataLoader(Fast(), batch_size=64, collate_fn=collate))


def reads_samples(_: nn.Module, loss: Tensor, logits: Tensor) -> None:
    """Read the logits one by one."""
    sum(value.item() for row in logits for value in row)


def prints(_: nn.Module, loss: Tensor, logits: Tensor) -> None:
    """Print the loss."""
    with contextlib.redirect_stdout(io.StringIO()):
        print(loss)


def checks_norm(model: nn.Module, loss: Tensor, logits: Tensor) -> None:
    """Clip with a check that reads the norm."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


def many_adam(params: Any) -> torch.optim.Optimizer:
    """Return Adam that steps one parameter after the other."""
    return torch.optim.Adam(params, foreach=False, fused=False)


def deep_and_thin() -> nn.Module:
    """Return many small layers."""
    return nn.Sequential(nn.Linear(256, 128), *[nn.Linear(128, 128) for _ in range(40)], nn.Linear(128, 8))


class Broken(nn.Module):
    """Breaks the graph of torch.compile."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(192, 512), nn.Linear(512, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x.flatten(1)))
        if float(x.detach().sum()) > 1e30:  # the graph ends where Python reads a value
            x = x * 2
        return self.last(x)


def make_broken(num_classes: int) -> nn.Module:
    """Build it for a recipe."""
    return Broken(num_classes)


class Block(nn.Module):
    """A block of a transformer, with sizes that are multiples of 64."""

    def __init__(self, width: int = 256, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        size, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(size, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(size, length, width)
        x = x + self.out(mixed)
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Two blocks over sequences of 32."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(Block(), Block()), nn.Linear(256, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x.view(-1, 32, 256)).mean(1))


def sequences(size: int = 16, length: int = 32) -> Iterator[Batch]:
    """Return the same batch of sequences, again and again."""
    batch = torch.randn(size, length, 256), torch.randint(8, (size,))
    while True:
        yield batch


class Recurrent(nn.Module):
    """An LSTM over sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(256, 256, batch_first=True), nn.Linear(256, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0][:, -1])


class OddHeads(nn.Module):
    """Attention whose heads are 20 wide."""

    def __init__(self, width: int = 240, heads: int = 12) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out, self.head = nn.Linear(256, 3 * width), nn.Linear(width, 256), nn.Linear(256, 8)

    def forward(self, x: Tensor) -> Tensor:
        size, length, _ = x.shape
        q, k, v = self.qkv(x).view(size, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2)).softmax(-1).to(v.dtype)
        return self.head(self.out((weights @ v).transpose(1, 2).reshape(size, length, -1)).mean(1))


class TiedLayers(nn.Module):
    """Applies one layer again and again, whose weight it casts by hand each time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(256, 512), nn.Linear(512, 512), nn.Linear(512, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(6):
            x = F.relu(F.linear(x, self.inner.weight.to(torch.bfloat16)))
        return self.last(x)


def checks_for_nan(_: nn.Module, loss: Tensor, logits: Tensor) -> None:
    """End where the loss or a logit is not a number."""
    if torch.isnan(loss) or not torch.isfinite(logits).all():
        raise ValueError


def parsed_lines() -> Iterator[Batch]:
    """Return batches of a loader that reads its samples from text, number by number."""

    class Lines(Samples):
        def __getitem__(self, index: int) -> Batch:
            line = ",".join(str((index * place) % 97) for place in range(256))
            return torch.tensor([float(word) for word in line.split(",")]), torch.tensor(index % 8)

    return iter(DataLoader(Lines(), batch_size=64))


class Residual(nn.Module):
    """Residual layers with layer norm."""

    def __init__(self, width: int = 256, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def groups_net() -> nn.Module:
    """Return convolutions with group norm."""
    layers: list[nn.Module] = []
    channels = 8
    for width in (32, 64):
        layers += [nn.Conv2d(channels, width, 3, stride=2, padding=1), nn.GroupNorm(8, width), nn.ReLU()]
        channels = width
    return nn.Sequential(
        *layers, nn.Conv2d(64, 64, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 8)
    )


def autoencoder() -> nn.Module:
    """Return convolutions down and transposed ones up, with a head."""
    return nn.Sequential(
        nn.Conv2d(8, 32, 4, stride=2, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 4, stride=2, padding=1), nn.ReLU(),
        nn.ConvTranspose2d(64, 32, 4, stride=2, padding=1), nn.ReLU(), nn.Conv2d(32, 8, 3, padding=1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip


class Words(nn.Module):
    """An embedding and a GRU over sequences of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.cell = nn.Embedding(1000, 128), nn.GRU(128, 256, batch_first=True)
        self.head = nn.Linear(256, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(self.table(x))[0][:, -1])


def tokens() -> Iterator[Batch]:
    """Return the same batch of tokens, again and again."""
    batch = torch.randint(1000, (32, 32)), torch.randint(8, (32,))
    while True:
        yield batch


def fused_adamw(params: Any) -> torch.optim.Optimizer:
    """Return AdamW in one operation."""
    return torch.optim.AdamW(params, fused=True)


class Encoder(nn.Module):
    """A layer of torch's own transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(256, 8, 512, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(256, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).mean(1))


TINY = {
    "recipe.data.name": "synthetic",
    "recipe.model.arch": "mlp",
    "recipe.data.train_size": 512,
    "recipe.data.val_size": 64,
    "recipe.data.image_size": 8,
    "recipe.epochs": 1,
}
PLANTED = (
    Training("sizes that are no multiples of 8", "native:bf16", ("dimensions",), training(mlp(256, 507))),
    Training("channels that are no multiples of 8", "apex:O2", ("dimensions",), training(
        lambda: nn.Sequential(nn.Conv2d(8, 30, 3), nn.ReLU(), nn.Conv2d(30, 50, 3), nn.Flatten(), nn.Linear(7200, 8)),
        images())),
    Training("the loss is read in each step", "fp32", ("synchronization",), training(
        mlp(), after_backward=lambda model, loss, logits: loss.item())),
    Training("each logit is read", "fp32", ("synchronization",), training(mlp(), after_backward=reads_samples)),
    Training("the loss is printed in each step", "fp32", ("synchronization",), training(mlp(), after_backward=prints)),
    Training("clipping checks the norm", "fp32", ("synchronization",), training(mlp(), after_backward=checks_norm)),
    Training("a slow data set", "fp32", ("data",), training(mlp(), slow_loader)),
    Training("a slow collation", "native:bf16", ("data",), training(mlp(), sleepy_source)),
    Training("a tiny batch", "fp32", ("small batch", "optimizer", "host"), settings={**TINY, "recipe.batch_size": 2}),
    Training("elementary functions in fp32", "native:bf16", ("fp32 operations",), training(around(fp32_chain))),
    Training("a block without autocast", "native:bf16", ("fp32 operations",), training(WideBlock)),
    Training("Adam, one parameter after the other", "fp32", ("optimizer",), training(
        deep_and_thin, optimizer=many_adam)),
    Training("a tensor is cast in a loop", "native:bf16", ("casts",), training(around(casts_in_a_loop))),
    Training("casts back and forth", "native:bf16", ("casts",), training(around(back_and_forth))),
    Training("activations kept twice", "native:bf16", ("kept twice",), training(KeptTwice)),
    Training("Python between operations", "fp32", ("host",), training(RowByRow)),
    Training("a break in the graph", "fp32", ("graph breaks",), settings={
        **TINY, "recipe.batch_size": 64, "recipe.model.arch": "planted_causes:make_broken", "recipe.compile": "eager"}),
)  # fmt: skip
HEALTHY = (
    Training("layers, fp32", "fp32", loop=training(mlp())),
    Training("layers, bf16", "native:bf16", loop=training(mlp())),
    Training("layers, fp16", "native:fp16", loop=training(mlp())),
    Training("layers, O2", "apex:O2", loop=training(mlp())),
    Training("wide layers, O1", "apex:O1", loop=training(mlp(256, 1024))),
    Training("convolutions, fp32", "fp32", loop=training(convnet, images())),
    Training("convolutions, bf16", "native:bf16", loop=training(convnet, images())),
    Training("convolutions, O2", "apex:O2", loop=training(convnet, images())),
    Training("a transformer, fp32", "fp32", loop=training(Transformer, sequences)),
    Training("a transformer, bf16", "native:bf16", loop=training(Transformer, sequences)),
    Training("an LSTM, fp32", "fp32", loop=training(Recurrent, sequences)),
    Training("layers, Adam in one operation", "half:masters=fp32", loop=training(
        mlp(), optimizer=lambda params: torch.optim.AdamW(params, fused=True))),
)  # fmt: skip
# Written after the thresholds of `profile` were set, and not used to set them.
HELD_OUT_PLANTED = (
    Training("heads that are 20 wide", "native:bf16", ("dimensions",), training(
        OddHeads, lambda: sequences(4, 128))),
    Training("a check for NaN in each step", "fp32", ("synchronization",), training(
        Residual, after_backward=checks_for_nan)),
    Training("samples are parsed from text", "fp32", ("data",), training(Residual, parsed_lines)),
    Training("a weight is cast for each of its uses", "native:bf16", ("casts",), training(TiedLayers)),
)  # fmt: skip
HELD_OUT_HEALTHY = (
    Training("residual layers, fp32", "fp32", loop=training(Residual, optimizer=fused_adamw)),
    Training("residual layers, O1", "apex:O1", loop=training(Residual)),
    Training("convolutions with group norm, bf16", "native:bf16", loop=training(groups_net, images())),
    Training("convolutions up and down, fp32", "fp32", loop=training(autoencoder, images())),
    Training("an embedding and a GRU, fp32", "fp32", loop=training(Words, tokens, optimizer=fused_adamw)),
    Training(
        "torch's transformer, bf16", "native:bf16", loop=training(Encoder, sequences, optimizer=fused_adamw)
    ),
)
