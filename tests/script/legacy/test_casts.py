"""Casts of autocast for CUDA, on the CPU."""

import re
from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional

from ampcompare.script.legacy.cpu_device import cast_as_for_cuda


@pytest.fixture
def casts() -> Iterator[None]:
    """The casts, and autocast for CUDA that acts on the CPU, for one test."""
    library = cast_as_for_cuda()
    torch.set_autocast_enabled("cuda", True)
    with torch.autocast("cpu", dtype=torch.float16):
        yield
    torch.set_autocast_enabled("cuda", False)
    library._destroy()


def test_functions_run_in_the_type_that_they_have_on_a_gpu(casts: None) -> None:
    """Sums, softmax, norms, exponentials and powers in fp32, products in fp16; the rest as its inputs."""
    half = torch.ones(4, 8, dtype=torch.float16)
    for full in (half.sum(), half.softmax(-1), half.exp(), half.pow(2), half.norm(), functional.layer_norm(half, (8,))):
        assert full.dtype is torch.float32
    assert torch.mv(torch.ones(2, 3), torch.ones(3)).dtype is torch.float16
    assert functional.gelu(half).dtype is half.mean().dtype is torch.float16
    assert torch.logsumexp(half.double(), -1).dtype is torch.float64


def test_tensors_of_both_types_become_fp32(casts: None) -> None:
    """Where autocast for CUDA widens them: torch's spectral norm, and messages that a graph gathers."""
    half, full, index = torch.ones(4, dtype=torch.float16), torch.ones(4), torch.arange(4)
    assert torch.vdot(half, full).dtype is torch.dot(full, half).dtype is torch.float32
    assert full.scatter_add(0, index, half).dtype is full.index_put((index,), half).dtype is torch.float32
    assert torch.dot(half, half).dtype is torch.float16


def test_a_type_that_is_asked_for_is_kept(casts: None) -> None:
    """As torch does: no cast where `dtype` is given."""
    assert torch.ones(4, dtype=torch.float16).sum(dtype=torch.float16).dtype is torch.float16


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
        ("native:bf16", "return Overlap.apply(self.one(x), self.two(x))", "takes fp32 alone, and gets 16-bit tensors"),
        ("half:bf16", "return Overlap.apply(self.one(x), self.two(x))", "cast its inputs to fp32 and its result back"),
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
