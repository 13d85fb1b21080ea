"""Further mistakes and rewrites, of tied weights, masks that are passed on, micro-batches and two kinds of norms."""

from __future__ import annotations

import pytest

from tests.script.replay.steps import Sides

pytestmark = pytest.mark.slow

SEQUENCES = """
import torch
from torch import nn
import torch.nn.functional as F
torch.manual_seed(0)

class Attend(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(width, width), nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)
    def forward(self, x, mask):
        q, k, v = self.q(x), self.k(x), self.v(x)
        scores = (q @ k.transpose(1, 2)) * x.shape[-1] ** -0.5
        scores = scores.masked_fill(mask, float("-inf"))
        return self.drop(scores.softmax(-1)) @ v

class Net(nn.Module):
    def __init__(self, width=16, words=32):
        super().__init__()
        self.embed = nn.Embedding(words, width, padding_idx=0)
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.attend = Attend(width)
        self.out = nn.Linear(width, words, bias=False)
        self.out.weight = self.embed.weight
    def forward(self, tokens):
        x = self.embed(tokens)
        mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
        x = x + self.attend(self.norm(x), mask)
        return self.out(x)
net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.05)
tokens = torch.randint(0, 32, (32, 9))
tokens[:, 5] = 0
for begin in range(0, 32, 4):
    batch = tokens[begin:begin + 4]
    logits = net(batch)
    logits, targets = logits[:, :-1].reshape(-1, 32), batch[:, 1:].reshape(-1)
    loss = F.cross_entropy(logits, targets, label_smoothing=0.1, ignore_index=0)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    optimizer.step()
"""
IMAGES = """
import torch
from torch import nn
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect")
        self.bn = nn.BatchNorm2d(8, eps=1e-5, momentum=0.1)
        self.down = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.inorm = nn.InstanceNorm2d(8, affine=True)
        self.act = nn.LeakyReLU(0.1)
        self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(8, 4)
    def forward(self, x):
        x = self.act(self.bn(self.stem(x)))
        x = self.up(self.act(self.inorm(self.down(x)))) + x
        return self.head(self.pool(x).flatten(1))
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)
x, y = torch.randn(32, 3, 8, 8), torch.rand(32, 4).round()
for begin in range(0, 32, 8):
    for half in (0, 4):
        now = slice(begin + half, begin + half + 4)
        loss = nn.functional.binary_cross_entropy_with_logits(net(x[now]), y[now]) / 2
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
T, C = SEQUENCES, IMAGES
OF_LOSSES = """    for half in (0, 4):
        now = slice(begin + half, begin + half + 4)
        loss = nn.functional.binary_cross_entropy_with_logits(net(x[now]), y[now]) / 2
        loss.backward()
"""
IN_ONE_PASS = """    loss = 0
    for half in (0, 4):
        now = slice(begin + half, begin + half + 4)
        loss = loss + nn.functional.binary_cross_entropy_with_logits(net(x[now]), y[now]) / 2
    loss.backward()
"""
# What it is, script, what stands for what, and the module and part that a replay has to name.
MISTAKES = [
    (
        "softmax over the wrong dim",
        T,
        "scores.softmax(-1)",
        "scores.softmax(1).nan_to_num()",
        "attend",
        "fwd",
    ),
    ("mask one off", T, "triu(1)", "triu(2)", "Net", "fwd"),
    ("no 1/sqrt(d)", T, " * x.shape[-1] ** -0.5", "", "attend", "fwd"),
    (
        "dropout kept in eval / off",
        T,
        "net = Net()\n",
        "net = Net()\nnet.attend.drop.eval()\n",
        "attend.drop",
        "fwd",
    ),
    ("eps of RMS norm", T, "eps=1e-5", "eps=1e-6", "norm", "fwd"),
    ("weights that are untied", T, "        self.out.weight = self.embed.weight\n", "", "out", "fwd"),
    (
        "untied copy",
        T,
        "        self.out.weight = self.embed.weight\n",
        "        self.out.weight = nn.Parameter(self.embed.weight.detach().clone())\n",
        "out",
        "fwd",
    ),
    (
        "detached tied",
        T,
        "        return self.out(x)",
        "        return F.linear(x, self.out.weight.detach())",
        "Net",
        "wgrad",
    ),
    ("label smoothing lost", T, ", label_smoothing=0.1", "", "(loss)", "fwd"),
    ("ignore_index lost", T, ", ignore_index=0", "", "(loss)", "fwd"),
    ("padding_idx lost", T, ", padding_idx=0", "", "embed", "wgrad"),
    ("coupled decay", T, "torch.optim.AdamW(", "torch.optim.Adam(", "(Adam)", "update"),
    ("betas exchanged", T, "betas=(0.9, 0.95)", "betas=(0.95, 0.9)", "(AdamW)", "update"),
    (
        "clip of another norm",
        T,
        "net.parameters(), 0.5)",
        "net.parameters(), 0.5, norm_type=float('inf'))",
        "(gradients)",
        "wgrad",
    ),
    (
        "clip by value",
        T,
        "nn.utils.clip_grad_norm_(net.parameters(), 0.5)",
        "nn.utils.clip_grad_value_(net.parameters(), 0.01)",
        "(gradients)",
        "wgrad",
    ),
    (
        "half accumulation of scores",
        T,
        "(q @ k.transpose(1, 2))",
        "(q.half() @ k.half().transpose(1, 2)).to(q.dtype)",
        "attend",
        "fwd",
    ),
    ("amsgrad", T, "weight_decay=0.05", "weight_decay=0.05, amsgrad=True", "(AdamW)", "update"),
    ("padding mode", C, ', padding_mode="reflect"', "", "stem", "fwd"),
    ("momentum of bn", C, "momentum=0.1)", "momentum=0.01)", "bn", "state"),
    ("eps of bn", C, "nn.BatchNorm2d(8, eps=1e-5", "nn.BatchNorm2d(8, eps=1e-3", "bn", "fwd"),
    ("align corners", C, "align_corners=False", "align_corners=True", "up", "fwd"),
    ("slope", C, "nn.LeakyReLU(0.1)", "nn.LeakyReLU(0.01)", "act", "fwd"),
    ("nesterov lost", C, ", nesterov=True", "", "(SGD)", "update"),
    ("not divided, in one pass", C, OF_LOSSES, IN_ONE_PASS.replace(" / 2", ""), "(loss)", "fwd"),
    ("accumulation not divided", C, "y[now]) / 2\n", "y[now])\n", "(loss)", "fwd"),
    (
        "zero_grad between micro-batches",
        C,
        "        loss.backward()\n",
        "        optimizer.zero_grad()\n        loss.backward()\n",
        "(gradients)",
        "wgrad",
    ),
    (
        "half accumulation of a sum",
        C,
        "self.pool(x)",
        "(x.half().sum((2, 3), keepdim=True).to(x.dtype) / 64)",
        "Net",
        "fwd",
    ),
    (
        "inorm track",
        C,
        "nn.InstanceNorm2d(8, affine=True)",
        "nn.InstanceNorm2d(8, affine=True, eps=1e-3)",
        "inorm",
        "fwd",
    ),
]
HARMLESS = [
    (
        "mask by where",
        T,
        'scores.masked_fill(mask, float("-inf"))',
        'torch.where(mask, torch.tensor(float("-inf"), dtype=scores.dtype), scores)',
    ),
    ("softmax by exp", T, "scores.softmax(-1)", "scores.log_softmax(-1).exp()"),
    ("matmul by bmm", T, "(q @ k.transpose(1, 2))", "torch.bmm(q, k.transpose(1, 2))"),
    (
        "scale on q",
        T,
        "scores = (q @ k.transpose(1, 2)) * x.shape[-1] ** -0.5",
        "scores = (q * x.shape[-1] ** -0.5) @ k.transpose(1, 2)",
    ),
    ("foreach off", T, "weight_decay=0.05", "weight_decay=0.05, foreach=False"),
    ("fused", T, "weight_decay=0.05", "weight_decay=0.05, fused=True"),
    ("finite mask", T, 'float("-inf")', "-1e9"),
    (
        "embedding by index",
        T,
        "x = self.embed(tokens)",
        "x = F.embedding(tokens, self.embed.weight, padding_idx=0)",
    ),
    ("pool by mean", C, "self.pool(x).flatten(1)", "x.mean((2, 3))"),
    (
        "order of a sum",
        C,
        "self.up(self.act(self.inorm(self.down(x)))) + x",
        "x + self.up(self.act(self.inorm(self.down(x))))",
    ),
    (
        "leaky by where",
        C,
        "self.act = nn.LeakyReLU(0.1)",
        "self.act = nn.LeakyReLU(0.1)\n        self.act.forward = lambda x: torch.where(x > 0, x, 0.1 * x)",
    ),
    ("channels last", C, "net = Net()\n", "net = Net().to(memory_format=torch.channels_last)\n"),
    ("mean by sum", C, "y[now]) / 2\n", "y[now], reduction='sum') / 32\n"),
    ("one pass for two losses", C, OF_LOSSES, IN_ONE_PASS),
    ("zero_grad none", C, "optimizer.zero_grad()", "optimizer.zero_grad(set_to_none=False)"),
]


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Sides]:
    folder = tmp_path_factory.mktemp("steps")
    return {SEQUENCES: Sides(SEQUENCES, folder / "s.pt", 3), IMAGES: Sides(IMAGES, folder / "i.pt", 2)}


@pytest.mark.parametrize(
    ("script", "old", "new", "module", "part"),
    [one[1:] for one in MISTAKES],
    ids=[one[0] for one in MISTAKES],
)
def test_a_mistake_is_named(
    script: str, old: str, new: str, module: str, part: str, sides: dict[str, Sides]
) -> None:
    assert old in script
    found = sides[script].judge(script.replace(old, new))
    assert found.exit_code == 1
    assert (module, part) in [(one.module, one.part) for one in found.findings], found.findings
    assert len({one.module for one in found.findings}) == 1, found.module_names


@pytest.mark.parametrize(
    ("script", "old", "new"), [one[1:] for one in HARMLESS], ids=[one[0] for one in HARMLESS]
)
def test_the_same_in_other_words_is_noise(script: str, old: str, new: str, sides: dict[str, Sides]) -> None:
    assert old in script
    found = sides[script].judge(script.replace(old, new))
    assert found.answer == "noise", found.findings
