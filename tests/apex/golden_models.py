"""Models, weights and batches of the golden scenarios: integer formulas, no random numbers."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

P = 10007


class MLP(nn.Module):
    def __init__(self, d_in: int = 16, hidden: int = 32, d_out: int = 10, depth: int = 2) -> None:
        super().__init__()
        dims = [d_in] + [hidden] * depth
        self.hidden = nn.ModuleList(nn.Linear(dims[i], dims[i + 1]) for i in range(depth))
        self.out = nn.Linear(hidden, d_out)

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.hidden):
            x = layer(x)
            x = F.relu(x) if i % 2 == 0 else torch.tanh(x)
        return self.out(x)


class ConvNet(nn.Module):
    def __init__(self, channels: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(2 * channels)
        self.fc = nn.Linear(2 * channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        x = x.mean(dim=(2, 3))
        return self.fc(x)


class Transformer(nn.Module):
    """One pre-norm block with explicit softmax attention."""

    def __init__(self, dim: int = 16, heads: int = 2, classes: int = 6) -> None:
        super().__init__()
        self.heads = heads
        self.ln1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim)
        self.ln2 = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, 2 * dim)
        self.fc2 = nn.Linear(2 * dim, dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        h = self.qkv(self.ln1(x))
        h = h.reshape(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = h[0], h[1], h[2]
        a = torch.matmul(q, k.transpose(-1, -2)) * (1.0 / math.sqrt(d // self.heads))
        a = F.softmax(a, dim=-1)
        h = torch.matmul(a, v).transpose(1, 2).reshape(b, t, d)
        x = x + self.proj(h)
        x = x + self.fc2(F.gelu(self.fc1(self.ln2(x))))
        return self.head(x.mean(dim=1))


class LSTMClassifier(nn.Module):
    def __init__(self, vocab: int = 20, emb: int = 12, hidden: int = 16, classes: int = 5) -> None:
        super().__init__()
        self.emb = nn.Embedding(vocab, emb)
        self.lstm = nn.LSTM(emb, hidden, batch_first=True)
        self.fc = nn.Linear(hidden, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        y, _ = self.lstm(self.emb(tokens))
        return self.fc(y[:, -1])


class TwoHeads(nn.Module):
    """A trunk and two heads; forward returns a tuple (class logits, regression output)."""

    def __init__(self, d_in: int = 16, hidden: int = 24, classes: int = 10, d_reg: int = 4) -> None:
        super().__init__()
        self.trunk = nn.Linear(d_in, hidden)
        self.head0 = nn.Linear(hidden, classes)
        self.head1 = nn.Linear(hidden, d_reg)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.relu(self.trunk(x))
        return self.head0(h), self.head1(h)


class Tied(nn.Module):
    """An autoencoder whose encoder and decoder share one weight (used twice per forward)."""

    def __init__(self, d_in: int = 16, hidden: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden, d_in))
        self.bias = nn.Parameter(torch.zeros(hidden))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(F.linear(x, self.weight, self.bias))
        return torch.matmul(h, self.weight)


MODELS = {cls.__name__: cls for cls in (MLP, ConvNet, Transformer, LSTMClassifier, TwoHeads, Tied)}


def ints(n: int, stream: int) -> Tensor:
    """Return n integers in [0, P): exact in int64 on any machine."""
    i = torch.arange(n, dtype=torch.int64)
    return (271 * i * i + (7919 + 2 * stream) * i + 104729 * stream) % P


def unit(n: int, stream: int) -> Tensor:
    """Return n float64 values in (-1, 1), each from one correctly rounded division."""
    return (2 * ints(n, stream) - P).double() / P


def build(spec: dict[str, Any]) -> nn.Module:
    """Build a scenario's model with its initial weights."""
    model = MODELS[spec["type"]](**spec["args"])
    one_d_weights = {
        name
        for name, p in model.named_parameters()
        if p.dim() == 1 and name.split(".")[-1].startswith("weight")
    }
    with torch.no_grad():
        for k, (name, p) in enumerate(model.named_parameters()):
            value = unit(p.numel(), spec["stream"] * 100 + k)
            if p.dim() >= 2:
                value = value * (1.5 / math.sqrt(p.numel() // p.shape[0]))
            elif name in one_d_weights:
                value = 1.0 + 0.1 * value
            else:
                value = 0.1 * value
            p.copy_(value.to(torch.float32).reshape(p.shape))
    return model


def make_input(spec: dict[str, Any], stream: int) -> Tensor:
    """Return a batch: real values in fp32, or integer tokens or classes."""
    n = math.prod(spec["shape"])
    if spec["kind"] in ("tokens", "class"):
        return (ints(n, stream) % spec["high"]).reshape(spec["shape"])
    return (unit(n, stream) * spec.get("scale", 1.0)).to(torch.float32).reshape(spec["shape"])


def stream_of(scenario: dict[str, Any], step: int, micro: int, model: int, what: int) -> int:
    """Return the stream number of a batch; what: 0 input, 1 target of output 0, 2 target of output 1."""
    return 50000 + scenario["seed"] * 2000 + (step % scenario["batches"]) * 40 + micro * 10 + model * 3 + what
