"""Kernels of a ResNet-50 step on CUDA, counted without a GPU by `benchmarks/launches.py`."""

from typing import Any

import pytest
import torch

from ampcompare.apex.multi_tensor_apply import arithmetic
from ampcompare.apex.parallel.LARC import LARC
from ampcompare.tasks.torchvision_loader import load_torchvision
from tests.modules import module_at


@pytest.fixture(scope="module")
def launches() -> Any:
    return module_at("benchmarks/launches.py")


@pytest.mark.parametrize(
    ("sizes", "lists", "expected"),
    [
        pytest.param([10] * 110, 1, 1, id="tensors-at-the-limit"),
        pytest.param([10] * 111, 1, 2, id="tensors-beyond"),
        pytest.param([10] * 65, 2, 2, id="fewer-in-two-lists"),
        pytest.param([65536 * 320], 1, 1, id="blocks-at-the-limit"),
        pytest.param([65536 * 320 + 1], 1, 2, id="blocks-beyond"),
        pytest.param([0, 10], 3, 1, id="empty"),
    ],
)
def test_launches_of_lists(launches: Any, sizes: list[int], lists: int, expected: int) -> None:
    """A launch takes a limited number of tensors and blocks, as torch's kernels do with 4 KB of arguments."""
    tensors = [torch.empty(size, device="meta") for size in sizes]
    assert launches.launches_of_lists([tensors] * lists, launches.LIMITS[4096]) == expected


def test_mixed_lists_go_one_by_one(launches: Any) -> None:
    """A list of two dtypes, or two of different sizes, cost a launch for each tensor; two of one dtype each do not."""
    half = [torch.empty(4, dtype=torch.float16, device="meta") for _ in range(5)]
    full = [torch.empty(4, device="meta") for _ in range(5)]
    assert launches.launches_of_lists([half + full], launches.LIMITS[4096]) == 10
    assert launches.launches_of_lists([half, full], launches.LIMITS[4096]) == 1
    assert (
        launches.launches_of_lists([full, [torch.empty((), device="meta")] * 5], launches.LIMITS[4096]) == 5
    )


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_resnet50(launches: Any) -> None:
    """Casts, scaling, checks and the optimizer of O1 and O2 take at most this many kernels, and wait as stated."""
    limits = {
        ("apex:O1", "fused"): 28,
        ("apex:O2", "foreach"): 27,
        ("apex:O2", "foreach, skip on device"): 45,
        ("half:masters=fp32,dynamic", "foreach"): 29,
    }
    model_total = launches.count_step(None).total
    for (arm, implementation), limit in limits.items():
        counts = launches.count_step(arm, implementation)
        assert 0 < counts.total - model_total <= limit, arm
        assert counts.waits == (1 if implementation == "foreach" else 0)
        assert counts.late_reads == 0


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_adam_reads_late_once_a_step(launches: Any) -> None:
    """With a skip on the device the host reads the flag of the step before, and waits for none."""
    counts = launches.count_step("native:fp16", "foreach, skip on device", arch="mlp", optimizer="adamw")
    assert (counts.waits, counts.late_reads) == (0, 1)
    counts = launches.count_step("native:fp16", "foreach", arch="mlp", optimizer="adamw")
    assert (counts.waits, counts.late_reads) == (1, 0)


def test_larc_launches(launches: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """LARC adapts the 161 gradients of ResNet-50 with at most this many kernels besides the norms, and no wait."""
    with torch.device("meta"):
        params = list(load_torchvision().models.resnet50().parameters())
    for devices, limit in ({"meta"}, 80), ((), 350):
        monkeypatch.setattr(arithmetic, "_DEVICE_TYPES", frozenset(devices))
        for param in params:
            param.grad = torch.empty_like(param)
        larc = LARC(torch.optim.SGD(params, lr=0.1))
        with launches._Ledger(launches.LIMITS[4096]) as ledger, torch.no_grad():
            larc.adapt_group_gradients(larc.param_groups[0], 1e-4)
        assert ledger.counts.waits == 0
        # The norms are chunked on a CPU only.
        count = ledger.counts.total - ledger.counts.launches["_foreach_norm"]
        assert 0.9 * limit < count <= limit, ledger.counts.launches
