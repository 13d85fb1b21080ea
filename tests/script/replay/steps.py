"""Scripts of a transformer and a convolutional network, mistakes in them, and changes that change nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ampcompare.results.analysis.replay import ReplayJudgment, judge_replay
from ampcompare.script.replay.one_step import StepFollower, StepJudged, StepKeeper, StepReplay, read_capsule

TRANSFORMER = """
import torch
from torch import nn
import torch.nn.functional as F

torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)
        self.up, self.act, self.down = nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        self.heads = heads

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).reshape(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5
        scores = scores + torch.full((length, length), float("-inf")).triu(1)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.drop(self.out(mixed))
        return x + self.down(self.act(self.up(self.norm2(x))))


class Net(nn.Module):
    def __init__(self, width=16, heads=2, depth=2, words=32):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
tokens = torch.utils.data.DataLoader(torch.randint(0, 32, (32, 9)), batch_size=4, shuffle=True)
for batch in tokens:
    logits = net(batch)
    loss = F.cross_entropy(logits[:, :-1].reshape(-1, 32), batch[:, 1:].reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    optimizer.step()
    schedule.step()
"""
CONVOLUTIONS = """
import torch
from torch import nn

torch.manual_seed(0)


class First(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)[0]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.relu, self.pool = nn.ReLU(inplace=True), nn.AvgPool2d(2, padding=1)
        self.conv2, self.norm2, self.act = nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.GroupNorm(2, 8), nn.SiLU()
        self.lstm, self.head = First(nn.LSTM(40, 16, batch_first=True)), nn.Linear(16, 10)

    def forward(self, x):
        x = self.pool(self.relu(self.norm1(self.conv1(x))))
        x = x + self.act(self.norm2(self.conv2(x)))
        return self.head(self.lstm(x.permute(0, 2, 1, 3).flatten(2)).mean(1))


net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
criterion = nn.CrossEntropyLoss()
images, labels = torch.randn(32, 3, 8, 8), torch.randint(0, 10, (32,))
for begin in range(0, 32, 8):
    optimizer.zero_grad()
    loss = criterion(net(images[begin : begin + 8]), labels[begin : begin + 8])
    loss.backward()
    optimizer.step()
"""


class Mistake(NamedTuple):
    """A mistake in a script: what stands for what, and the module, answer and parts that a replay has to name."""

    what: str
    script: str
    old: str
    new: str
    module: str
    answer: str
    parts: str


T, C = TRANSFORMER, CONVOLUTIONS
OTHER, LESS = "another function", "less exact"
OF_NET, START = "net = Net()\n", "optimizer.zero_grad()\n"
IN_BF16 = (
    "net = Net()\nlinear = net.blocks[1].up\n"
    "linear.forward = lambda x: (x.bfloat16() @ linear.weight.bfloat16().t()).to(x.dtype) + linear.bias\n"
)
IN_FP16 = (
    "net = Net()\ndef gather(x, head=net.head):\n"
    "    total = torch.zeros(*x.shape[:-1], 32).half()\n"
    "    for i in range(0, 16, 4):\n"
    "        total = total + (x[..., i:i + 4] @ head.weight[:, i:i + 4].t()).half()\n"
    "    return total.to(x.dtype) + head.bias\n"
    "net.head.forward = gather\n"
)
IN_TF32 = (
    "net = Net()\ncut = lambda t: t if t.dtype == torch.float64 else "
    "t + ((t.detach().view(torch.int32) & -8192).view(torch.float32) - t.detach())\n"
    "conv = net.conv2\n"
    "conv.forward = lambda x: nn.functional.conv2d(cut(x), cut(conv.weight), conv.bias, 1, 1, 1, 2)\n"
)
EPSILON_OUTSIDE = (
    "net = Net()\nnorm = net.norm2\n"
    "def normalize(x):\n"
    "    parts = x.unflatten(1, (2, -1)).flatten(2)\n"
    "    parts = parts - parts.mean(-1, keepdim=True)\n"
    "    parts = parts / (parts.square().mean(-1, keepdim=True).sqrt() + norm.eps)\n"
    "    return parts.view_as(x) * norm.weight[:, None, None] + norm.bias[:, None, None]\n"
    "norm.forward = normalize\n"
)
UNCORRECTED = """class Uncorrected(torch.optim.AdamW):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
                state["step"] += 1
                state["exp_avg"].lerp_(param.grad, 0.1)
                state["exp_avg_sq"].mul_(0.999).addcmul_(param.grad, param.grad, value=0.001)
                param.mul_(1 - group["lr"] * 0.01)
                param.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt() + 1e-8, value=-group["lr"])


optimizer = Uncorrected("""
GRADIENT_IN_BF16 = """net = Net()
class Narrow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        narrow = rows.t().bfloat16() @ x.flatten(0, -2).bfloat16()
        return gradient @ weight, narrow.to(weight.dtype), rows.sum(0)


out = net.blocks[1].out
out.forward = lambda x: Narrow.apply(x, out.weight, out.bias)
"""
UPDATE_IN_FP16 = """class Narrow(torch.optim.SGD):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                moment = self.state[param].setdefault("momentum_buffer", torch.zeros_like(param))
                moment.mul_(group["momentum"]).add_(param.grad)
                param.sub_((group["lr"] * moment).half().to(param.dtype))


optimizer = Narrow("""
MISTAKES = [
    Mistake("a gradient of weights in bf16", T, OF_NET, GRADIENT_IN_BF16, "blocks.1.out", LESS, "wgrad"),
    Mistake("an update in fp16", C, "optimizer = torch.optim.SGD(", UPDATE_IN_FP16, "(Narrow)", LESS, "update"),
    Mistake("words that are off by one", T, "net(batch)", "net(batch.roll(1, 1))", "(batch)", OTHER, "fwd"),
    Mistake("images in another order", C, "net(images[begin : begin + 8])", "net(images[begin : begin + 8].flip(0))",
            "(batch)", OTHER, "fwd"),
    Mistake("eps of a norm", T, OF_NET, "net = Net()\nnet.blocks[0].norm2.eps = 1e-6\n",
            "blocks.0.norm2", OTHER, "fwd"),
    Mistake("a transposed weight", T, OF_NET,
            "net = Net()\nout = net.blocks[1].out\nout.forward = lambda x: x @ out.weight + out.bias\n",
            "blocks.1.out", OTHER, "fwd"),
    Mistake("no scale in attention", T, " / (width // self.heads) ** 0.5", "", "blocks.0", OTHER, "fwd"),
    Mistake("a mask that is off by one", T, "triu(1)", "triu(2)", "blocks.0", OTHER, "fwd"),
    Mistake("dropout left off", T, OF_NET, "net = Net()\nnet.blocks[1].drop.eval()\n", "blocks.1.drop", OTHER, "fwd"),
    Mistake("another dropout", T, "nn.Dropout(0.1)", "nn.Dropout(0.2)", "blocks.0.drop", OTHER, "fwd"),
    Mistake("GELU by tanh", T, "nn.GELU()", "nn.GELU('tanh')", "blocks.0.act", OTHER, "fwd"),
    Mistake("a sum for a mean", T, "batch[:, 1:].reshape(-1))", "batch[:, 1:].reshape(-1), reduction='sum')",
            "(loss)", OTHER, "fwd"),
    Mistake("a detached branch", T, "self.drop(self.out(mixed))", "self.drop(self.out(mixed.detach()))",
            "blocks.0", OTHER, "dgrad"),
    Mistake("no clipping", T, "torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)", "pass",
            "(gradients)", OTHER, "wgrad"),
    Mistake("a weight decay", T, "lr=1e-3)", "lr=1e-3, weight_decay=0.1)", "(AdamW)", OTHER, "update"),
    Mistake("beta2", T, "lr=1e-3)", "lr=1e-3, betas=(0.9, 0.99))", "(AdamW)", OTHER, "update"),
    Mistake("eps of Adam", T, "lr=1e-3)", "lr=1e-3, eps=1e-6)", "(AdamW)", OTHER, "update"),
    Mistake("Adam for AdamW", T, "AdamW(net.parameters(), ", "Adam(net.parameters(), weight_decay=0.01, ",
            "(Adam)", OTHER, "update"),
    Mistake("a layer in bf16", T, OF_NET, IN_BF16, "blocks.1.up", LESS, "fwd"),
    Mistake("a sum in fp16", T, OF_NET, IN_FP16, "head", LESS, "fwd"),
    Mistake("a layer in TF32", C, OF_NET, IN_TF32, "conv2", LESS, "fwd"),
    Mistake("momentum of batch norm", C, "nn.BatchNorm2d(8)", "nn.BatchNorm2d(8, momentum=0.01)",
            "norm1", OTHER, "state"),
    Mistake("batch norm in evaluation", C, OF_NET, "net = Net()\nnet.norm1.eval()\n", "norm1", OTHER, "fwd"),
    Mistake("padding that counts", C, "nn.AvgPool2d(2, padding=1)",
            "nn.AvgPool2d(2, padding=1, count_include_pad=False)", "pool", OTHER, "fwd"),
    Mistake("label smoothing", C, "nn.CrossEntropyLoss()", "nn.CrossEntropyLoss(label_smoothing=0.1)",
            "CrossEntropyLoss", OTHER, "fwd"),
    Mistake("dampening", C, "momentum=0.9)", "momentum=0.9, dampening=0.1)", "(SGD)", OTHER, "update"),
    Mistake("a residual of double weight", C, "x = x + self.act", "x = 2 * x + self.act", "Net", OTHER, "fwd"),
    Mistake("a loss that counts twice", T, "loss.backward()", "(loss + loss).backward()", "(loss)", OTHER, "fwd"),
    Mistake("no bias correction", T, "optimizer = torch.optim.AdamW(", UNCORRECTED, "(Uncorrected)", OTHER, "update"),
    Mistake("epsilon outside of the root", C, OF_NET, EPSILON_OUTSIDE, "norm2", OTHER, "fwd"),
    Mistake("a cast too much", T, OF_NET, "net = Net()\nnorm = net.blocks[0].norm1\nnorm.forward = lambda x: "
            "F.layer_norm(x.bfloat16().to(x.dtype), norm.normalized_shape, norm.weight, norm.bias, norm.eps)\n",
            "blocks.0.norm1", LESS, "fwd"),
    Mistake("a gate in other words", C, "nn.SiLU()", "nn.Hardswish()", "act", OTHER, "fwd"),
    Mistake("gradients that are never zeroed", T, "optimizer.zero_grad()", "pass", "(gradients)", OTHER, "wgrad"),
    Mistake("positions that are off by one", T, "torch.full((length, length), float(\"-inf\")).triu(1)",
            "torch.full((length, length), float(\"-inf\")).triu(1).roll(1, 0)", "blocks.0", OTHER, "fwd"),
    Mistake("a bias that is left out", T, OF_NET, "net = Net()\nup = net.blocks[0].up\n"
            "up.forward = lambda x: F.linear(x, up.weight)\n", "blocks.0.up", OTHER, "fwd"),
]  # fmt: skip
# What a script says in another way, by the script.
REWRITES = {
    "the order of a sum": (T, "return x + self.down(self.act(self.up(self.norm2(x))))",
                           "return self.down(self.act(self.up(self.norm2(x)))) + x"),
    "a scale before the product": (T, "q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5",
                                   "(q * (width // self.heads) ** -0.5) @ k.transpose(-1, -2)"),
    "images that are off by a rounding": (C, "net(images[begin : begin + 8])",
                                          "net((images[begin : begin + 8] * 3 + 1 - 1) / 3)"),
    "torch's own attention": (T, "(scores.softmax(-1) @ v)", "F.scaled_dot_product_attention(q, k, v, is_causal=True)"),
    "a product by einsum": (T, "q @ k.transpose(-1, -2) /", "torch.einsum('bhid,bhjd->bhij', q, k) /"),
    "gradients that are set to zero": (T, "optimizer.zero_grad()", "optimizer.zero_grad(set_to_none=False)"),
    "a cross entropy in two steps": (T, "F.cross_entropy(logits[:, :-1].reshape(-1, 32), ",
                                     "F.nll_loss(F.log_softmax(logits[:, :-1].reshape(-1, 32), -1), "),
    "a mean by hand": (C, ".flatten(2)).mean(1))", ".flatten(2)).sum(1) / x.shape[2])"),
    "a step without foreach": (T, "lr=1e-3)", "lr=1e-3, foreach=False)"),
    "channels last": (C, OF_NET, "net = Net().to(memory_format=torch.channels_last)\n"),
    "a fused optimizer": (C, "momentum=0.9)", "momentum=0.9, fused=True)"),
    "a linear layer by hand": (C, OF_NET, "net = Net()\nhead = net.head\n"
                               "head.forward = lambda x: torch.addmm(head.bias, x, head.weight.t())\n"),
    "a convolution of other kernels": (C, OF_NET, "net = Net()\nconv = net.conv1\nconv.forward = lambda x: "
                                       "(nn.functional.unfold(x, 3, padding=1).transpose(1, 2) @ conv.weight.flatten(1)"
                                       ".t()).transpose(1, 2).reshape(len(x), 8, 8, 8) + conv.bias[:, None, None]\n"),
}  # fmt: skip
SETTINGS: dict[str, Callable[[], Any]] = {
    "two threads": lambda: torch.set_num_threads(2),
    "oneDNN off": lambda: torch._C._set_mkldnn_enabled(False),
    "deterministic kernels": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "denormals flushed": lambda: torch.set_flush_denormal(True),
}


def watched(script: str, watch: Any) -> Any:
    """Run a script under a watch, and return that."""
    watch.install()
    try:
        exec(compile(script, "train.py", "exec"), {"__name__": "__main__"})
    except StepJudged:
        pass
    finally:
        StepFollower.stop_following(watch)
    return watch


class Sides:
    """The capsule of a script and its base, with which changed scripts are judged."""

    def __init__(self, script: str, path: Path, step: int) -> None:
        self.script = script
        self.keeper = watched(script, StepKeeper(str(path), step))
        assert not self.keeper.fault
        self.capsule = read_capsule(str(path))
        self.base = watched(script, StepReplay(self.capsule, None, goes_on=True))

    def judge(self, script: str) -> ReplayJudgment:
        """Judge another script, or the same one under other settings."""
        change = watched(script, StepReplay(self.capsule, self.base.answers, goes_on=True))
        return judge_replay("change", vars(self.base), vars(change))
