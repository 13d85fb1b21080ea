"""Casts of autocast for CUDA, on the CPU."""

import re

import pytest

ON_CUDA = """
import torch
from torch import nn
from torch.nn import functional as F

half, full = torch.rand(4, 8).half().cuda(), torch.rand(4, 8).cuda()
with torch.autocast("cuda"):
    for wide in (half.sum(), half.softmax(-1), half.exp(), half.pow(2), half.norm(), F.layer_norm(half, (8,)),
                 F.interpolate(half[None, None], scale_factor=2), torch.dot(half[0], full[0])):
        assert wide.dtype is torch.float32, wide.dtype
    for narrow in (torch.mv(full, full[0]), F.gelu(half), half.mean(), F.pad(half[None], (1, 1), mode="reflect"),
                   F.avg_pool3d(half.reshape(1, 2, 2, 4, 2), 2), nn.GRU(8, 2).cuda()(full)[0]):
        assert narrow.dtype is torch.float16, narrow.dtype
    assert half.sum(dtype=torch.float16).dtype is torch.float16
    assert half.double().logsumexp(-1).dtype is torch.float64
with torch.autocast("cpu", dtype=torch.float16):  # the script means the CPU
    assert half.exp().dtype is torch.float16
    assert F.binary_cross_entropy(full, full).isfinite()
assert half.exp().dtype is torch.float16
print("as on a GPU")
with torch.autocast("cuda"):
    nn.BCELoss()(full, full)
"""


def test_functions_run_in_the_type_that_they_have_on_a_gpu(write, legacy) -> None:
    """What CUDA refuses is refused, in its words; blocks for the CPU are those of torch."""
    write("train.py", ON_CUDA)
    done = legacy("--device", "cpu", "train.py")
    assert "as on a GPU" in done.stdout, done.stderr
    assert "unsafe to autocast" in done.stderr
    last = len(ON_CUDA.splitlines())
    assert f"ampcompare: train.py:{last}: AMP230: torch.nn.functional.binary_cross_entropy and" in done.stderr
    assert done.returncode == 1


FP32_ALONE = """
    import torch
    from torch import nn

    class Overlap(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            if a.dtype != torch.float32:
                raise RuntimeError(f"expected scalar type Float but found {a.dtype}")
            return a * b

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 2), nn.Linear(4, 2)
            self.table = nn.Parameter(torch.ones(2, 2))
        def forward(self, x):
            LINE

    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loss = net(torch.ones(3, 4)).float().sum()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("arm", "line", "said"),
    [
        (
            "native:bf16",
            "return Overlap.apply(self.one(x), self.two(x))",
            "takes fp32 alone, and gets 16-bit tensors",
        ),
        (
            "half:bf16",
            "return Overlap.apply(self.one(x), self.two(x))",
            "cast its inputs to fp32 and its result back",
        ),
        # next to an fp32 input that the call does not get
        (
            "apex:O1",
            "return torch.quantile(self.one(x).abs(), 0.5, dim=-1)",
            "takes fp32 alone, and gets 16-bit tensors",
        ),
        (
            "native:bf16",
            "return torch.scatter(self.table, 0, torch.zeros(2, 2).long(), self.one(x)[:2])",
            "tensors of both types",
        ),
        (
            "native:bf16",
            "return self.one(x) + float(self.two(x).detach().numpy()[0, 0])",
            r"\.float\(\) before \.numpy\(\)",
        ),
    ],
)
def test_a_reason_is_that_of_the_operation(write, legacy, arm: str, line: str, said: str) -> None:
    """A kernel of fp32, operands of two types, and NumPy, which lacks bfloat16, are told apart."""
    write("train.py", FP32_ALONE.replace("LINE", line))
    done = legacy("--device", "cpu", "--arm", arm, "train.py")
    assert done.returncode != 0
    assert re.search(said, done.stderr), done.stderr
