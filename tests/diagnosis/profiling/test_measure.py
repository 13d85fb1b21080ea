"""A loop is profiled: parts add up, memory adds up to the peak, and counts are those of torch."""

import functools
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.flop_counter import FlopCounterMode

import ampcompare
from ampcompare.base.errors import ConfigError
from ampcompare.diagnosis.profiling.measure import (
    find_peak_rates_in_table,
    measure_peak_rates_of_device,
    profile_from_measured,
    train_loop_under_step_profiler,
)
from ampcompare.diagnosis.profiling.step_profiler import StepCounts
from ampcompare.results.records.profile import ArmProfile
from tests.diagnosis.loops import loop_of, sgd

CPU = torch.device("cpu")
FEW = StepCounts(warmup=1, timed=2, profiled=1)
Loop = Callable[[Any], None]


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))


def loop(precision: Any, *, model: Callable[[], nn.Module] = _net, **options: Any) -> None:
    """Train a small network on noise."""

    def loss_of(net: Any, step: int) -> torch.Tensor:
        return F.cross_entropy(net(torch.randn(256, 64)), torch.randint(10, (256,)))

    loop_of(model, loss_of, optimizer=torch.optim.Adam, **options)(precision)


def _profile(arm: str, train: Loop = loop, steps: StepCounts = FEW) -> ArmProfile:
    profiler, *_ = train_loop_under_step_profiler(train, ampcompare.Arm.parse(arm), steps, CPU)
    return profile_from_measured(arm, profiler.measured, half_dtype="bf16" if "bf16" in arm else "")


@pytest.fixture(scope="module")
def profile_of() -> Callable[[str], ArmProfile]:
    """What returns the profile of the loop under an arm, made once for each."""
    return functools.cache(_profile)


def _bytes_within_products(dtype: torch.dtype) -> int:
    """Return how much a product of the network holds for itself at most, which no tensor of a loop shows.

    None on most processors. Where they have bf16 instructions, oneDNN copies both sides into the layout of those.
    """
    sides = [torch.randn(256, 256, dtype=dtype) for _ in range(2)]
    most = 0
    for product in (F.linear, torch.mm, lambda a, b: a.t() @ b):
        with torch.profiler.profile(profile_memory=True, acc_events=True) as profiler:
            result = product(*sides)
        sizes = [
            event.nbytes()
            for event in profiler.profiler.kineto_results.events()
            if event.name() == "[memory]"
        ]
        most = max(most, max(itertools.accumulate(sizes), default=0) - result.untyped_storage().nbytes())
    return most


@pytest.mark.integration
@pytest.mark.parametrize("arm", ["fp32", "native:bf16", "apex:O2"])
def test_the_parts_add_up(arm: str, profile_of: Callable[[str], ArmProfile]) -> None:
    """The parts of a step are its time within 3 %, and those of memory its peak within 5 %."""
    found = profile_of(arm)
    assert found.accounted_seconds == pytest.approx(found.seconds, rel=0.03)
    phases = {part.phase for part in found.parts}
    assert {"forward", "backward", "optimizer"} <= phases
    memory = found.memory
    within = _bytes_within_products(torch.bfloat16 if "bf16" in arm else torch.float32)
    assert -0.05 * memory.measured_bytes <= memory.rest_bytes <= 0.05 * memory.measured_bytes + within
    kinds = {held.kind for held in memory.held}
    assert {"weights", "optimizer state", "activations"} <= kinds
    assert ("master weights" in kinds) == (arm == "apex:O2")


@pytest.mark.integration
def test_what_is_held_has_its_size(profile_of: Callable[[str], ArmProfile]) -> None:
    """Weights and the state of Adam have the bytes of the parameters, and the widest layer keeps most."""
    memory = profile_of("fp32").memory
    sizes: Counter[str] = Counter()
    for held in memory.held:
        sizes[held.kind] += held.bytes
    weights = 4 * sum(param.numel() for param in _net().parameters())
    assert sizes["weights"] == weights
    assert 2 * weights <= sizes["optimizer state"] <= 2 * weights + 64
    assert memory.layers[0].bytes >= 4 * 256 * 256


@pytest.mark.integration
def test_flops_are_those_of_torch(profile_of: Callable[[str], ArmProfile]) -> None:
    """A step has the FLOPs that torch's own counter gives, though autocast and hooks are around it."""
    found = profile_of("native:bf16")
    net = _net()
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(net(torch.randn(256, 64)), torch.randint(10, (256,))).backward()
    assert found.limits.flops == counter.get_total_flops()


@pytest.mark.integration
def test_a_read_of_the_loss_has_its_line(profile_of: Callable[[str], ArmProfile]) -> None:
    """One value is read in each step, on the line of `item`; the step counters of Adam are not on the device."""
    (sync,) = _profile(
        "fp32", lambda precision: loop(precision, after_backward=lambda loss, _: loss.item())
    ).syncs
    assert (sync.calls, sync.steps, sync.watched) == (1, 5, 5)
    assert "test_measure.py:" in sync.where
    assert profile_of("fp32").syncs == []


@pytest.mark.integration
def test_a_read_in_some_steps_is_counted_by_step() -> None:
    """Lines that read a loss twice, in every second, third and fourth step: the steps 6 to 10 are watched for it."""

    def read(loss: torch.Tensor, step: int) -> None:
        if step % 2 == 0:
            loss.item(), loss.item()
        if step % 3 == 0:
            loss.item(), loss.item()
        if step % 4 == 0:
            loss.item(), loss.item()

    syncs = sorted(
        _profile("fp32", lambda precision: loop(precision, after_backward=read)).syncs,
        key=lambda sync: sync.where,
    )
    assert [(sync.calls, sync.steps, sync.watched) for sync in syncs] == [(2, 3, 5), (2, 2, 5), (2, 1, 5)]


@pytest.mark.integration
def test_what_is_brought_to_the_host_has_its_line() -> None:
    """`cpu`, `numpy` and `tolist` of a result are reads, once for each result; those of a batch are not."""

    def train(precision: Any) -> None:
        net = _net()
        (net,), (optimizer,) = precision.prepare([net], [sgd(net.parameters())])
        while True:
            x, y = torch.randn(16, 64), torch.randint(10, (16,))
            y.tolist(), x.cpu().numpy()
            logits = net(x)
            loss = F.cross_entropy(logits, y)
            precision.backward(loss, [optimizer])
            loss.detach().cpu().numpy(), logits.argmax(1).tolist()
            precision.step(optimizer)
            optimizer.zero_grad()

    (sync,) = _profile("fp32", train).syncs
    assert (sync.calls, sync.what) == (2, "copy to the host")
    assert "test_measure.py:" in sync.where


@pytest.mark.integration
def test_the_overflow_check_of_an_arm_is_no_read_of_the_script(
    profile_of: Callable[[str], ArmProfile],
) -> None:
    """What the precision of an arm reads to know of an overflow is named as that, at no line."""
    for arm in ("half:masters=fp32,dynamic", "apex:O2", "native:fp16"):
        assert {(sync.where, sync.what) for sync in profile_of(arm).syncs} == {("", "overflow check")}, arm


class Twice(nn.Module):
    """Keeps its input in fp32 and in bf16, and casts one tensor again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 10)
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        y = x.sin()
        narrow = [x.bfloat16() for _ in range(3)]
        z = sum((one * one for one in narrow), torch.zeros(()))
        return self.inner(y + z.float())


@pytest.mark.integration
def test_repeated_casts_and_copies_are_counted() -> None:
    """A tensor cast three times to one type is named with its line, and so is what is kept in two types."""
    found = _profile("fp32", lambda precision: loop(precision, model=Twice))
    (repeated,) = [one for one in found.repeated if "test_measure" in one.where]
    assert repeated.casts == 3
    assert found.memory.kept_twice_bytes >= 256 * 64 * 2


@pytest.mark.integration
def test_torch_is_left_as_it_was() -> None:
    """After a profile no hook, patch or mode is left, also where the loop has raised."""
    backward = torch.autograd.backward

    def fails(precision: Any) -> None:
        loop(precision, steps=1)
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        train_loop_under_step_profiler(fails, ampcompare.Arm.parse("fp32"), FEW, CPU)
    assert torch.autograd.backward is backward
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert not _global_optimizer_pre_hooks


@pytest.mark.integration
def test_a_loop_that_ends_early_is_refused() -> None:
    """The error says how many steps were made, and how many a profile needs."""
    with pytest.raises(
        ConfigError, match=r"made 2 steps, but a profile needs 12: 5 to warm up, 3 timed, 1 under"
    ):
        ampcompare.profile(
            lambda precision: loop(precision, steps=2), arms=["fp32"], steps=3, profiled_steps=1, device="cpu"
        )


@pytest.mark.parametrize(
    ("device", "dtype", "tflops", "gigabytes"),
    [
        ("NVIDIA H100 PCIe", "bf16", 756.5, 2000),
        ("NVIDIA A100-SXM4-40GB", "tf32", 156, 1555),
        ("NVIDIA L40S", "fp16", 362.05, 864),
        ("NVIDIA L4", "fp16", 121, 300),
        ("AMD Instinct MI250X", "bf16", 191.5, 1638),  # one die of two
    ],
)
def test_a_device_has_the_peak_of_its_data_sheet(
    device: str, dtype: str, tflops: float, gigabytes: float
) -> None:
    """The most exact name counts, and "L4" is not found in "L40S"."""
    peak = find_peak_rates_in_table(device, dtype)
    assert (peak.flops, peak.bytes) == pytest.approx((1e12 * tflops, 1e9 * gigabytes))
    assert "datasheet" in peak.source


def test_what_is_not_in_the_table_is_unknown() -> None:
    """Neither a type that a device lacks nor a device of another name, nor a part of one, has a peak."""
    assert find_peak_rates_in_table("Tesla T4", "bf16") is None
    assert find_peak_rates_in_table("NVIDIA A10G", "bf16") is None
    for name in ("H100 NVL", "H200 NVL", "A100-SXM4-80GB MIG 1g.10gb", "GeForce RTX 4090 Laptop GPU"):
        assert find_peak_rates_in_table(f"NVIDIA {name}", "fp16") is None
    assert find_peak_rates_in_table("NVIDIA GeForce GTX 1080", "fp32") is None


def test_a_peak_is_measured() -> None:
    """A CPU without an entry has the speed of a product, and says so."""
    peak = measure_peak_rates_of_device(CPU, "fp32")
    assert peak.flops is not None
    assert peak.flops > 1e8
    assert peak.source.startswith("measured here: fp32 products")
