"""The emulation of 16-bit types on a CPU: sums are rounded once, and what torch notes of tensors stays."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ampcompare.base.tensors.cuda_casts import cuda_casts
from ampcompare.training.precision.cpu_half import EmulatedHalf


def test_writes_into_lists_of_tensors_are_noted() -> None:
    """As without the emulation, so that what an optimizer writes is seen; also where no version is kept."""
    one, two = torch.zeros(3, requires_grad=True), torch.zeros(2, requires_grad=True)
    with EmulatedHalf(), torch.no_grad():
        torch._foreach_add_([one, two], 1.0)
        torch._foreach_lerp_((one,), (torch.zeros(3),), weight=0.5)
        assert (one._version, two._version) == (2, 1)
        torch._foreach_add([one, two], 1.0)
        assert (one._version, two._version) == (2, 1)
        assert one.tolist() == [0.5] * 3
    with EmulatedHalf(), torch.inference_mode():
        kept = torch.zeros(3)
        torch._foreach_add_([kept], 1.0)
        assert kept.tolist() == [1.0] * 3


def test_the_compiler_passes_over_the_emulation() -> None:
    """What a compiled function leaves to Python is computed, and the frames around each operation are not compiled."""

    def call(x: torch.Tensor) -> torch.Tensor:
        y = x @ x
        torch._dynamo.graph_break()
        return (y @ x).half()

    torch._dynamo.utils.counters.clear()
    x = torch.rand(3, 3).half()
    with EmulatedHalf():
        assert torch.equal(torch.compile(call, backend="eager")(x), call(x))
    assert not torch._dynamo.utils.counters["stats"]


SUMS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "reflection": (lambda x: functional.pad(x, (2, 1, 2, 1), mode="reflect"), (2, 3, 7, 9)),
    "replication": (lambda x: functional.pad(x, (3, 3, 3, 3, 2, 2), mode="replicate"), (1, 2, 4, 4, 4)),
    "average pool": (lambda x: functional.avg_pool2d(x, 3, stride=1), (2, 3, 9, 9)),
    "average pool in 3D": (lambda x: functional.avg_pool3d(x, 3, stride=1), (2, 3, 6, 6, 6)),
    "max pool": (lambda x: functional.max_pool2d(x, 5, stride=1), (1, 2, 12, 12)),
    "resizing": (lambda x: functional.interpolate(x, scale_factor=1.7, mode="bicubic"), (1, 2, 8, 8)),
    "resizing, antialiased": (
        lambda x: functional.interpolate(x, size=5, mode="bilinear", antialias=True),
        (1, 2, 9, 9),
    ),
    "sampling": (lambda x: functional.grid_sample(x, GRID.to(x.dtype), align_corners=False), (2, 3, 9, 9)),
    "windows": (lambda x: functional.unfold(x, 3, padding=1), (1, 2, 9, 9)),
    "rows": (lambda x: x[ROWS], (4, 5)),
    "table": (lambda x: functional.embedding(ROWS, x), (4, 5)),
    "bag": (lambda x: functional.embedding_bag(ROWS.reshape(-1, 8), x, mode="sum"), (4, 5)),
}
GRID = (torch.arange(2 * 7 * 7 * 2).reshape(2, 7, 7, 2) % 17 / 8 - 1).half()
ROWS = torch.arange(4000) % 3


@pytest.mark.parametrize("name", SUMS)
def test_sums_of_fp16_are_rounded_once_as_on_cuda(name: str) -> None:
    """With the emulation: forward, and backward, where kernels of a CPU add up in fp16, or do not know it."""
    function, shape = SUMS[name]
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(shape, generator=generator).half()

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone().requires_grad_()
        out = function(x)
        given = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).half()
        (grad,) = torch.autograd.grad(out, x, given.to(x.dtype))
        return out.detach(), grad

    with EmulatedHalf():
        found = run(value)
    for each, exact in zip(found, run(value.float()), strict=True):
        assert each.dtype is torch.float16
        assert torch.equal(each, exact.half())


def test_a_row_that_is_read_often_gets_its_whole_gradient() -> None:
    """Ones add up to 2048 at most in fp16, which is not what a GPU returns."""
    table = torch.zeros(3, 1, dtype=torch.float16, requires_grad=True)
    for read in (
        lambda: functional.embedding(torch.zeros(4000, dtype=torch.long), table),
        lambda: table[[0] * 4000],
    ):
        with EmulatedHalf():
            (grad,) = torch.autograd.grad(read().float().sum(), table)
        assert grad[0] == 4000
    with EmulatedHalf():
        table.detach().index_put_(
            (torch.zeros(4000, dtype=torch.long),), torch.ones(4000, 1).half(), accumulate=True
        )
    assert table[0] == 4000


def test_a_pad_has_the_same_gradient_with_and_without_autocast() -> None:
    """Autocast of a CPU computes it in fp32, and what O1 patches runs in fp16: on a GPU both are alike."""
    value, given = (
        torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(seed)).half() for seed in (0, 1)
    )
    found = []
    with cuda_casts(everywhere=True), EmulatedHalf():
        for enabled in (True, False):
            x = value.clone().requires_grad_()
            with torch.autocast("cpu", dtype=torch.float16, enabled=enabled):
                out = functional.pad(x, (3, 3, 3, 3), mode="reflect")
            found += torch.autograd.grad(out[..., 3:-3, 3:-3] + out[..., :9, :9], x, given)
    assert torch.equal(*found)
