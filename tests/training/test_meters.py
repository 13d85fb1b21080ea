"""The meters of peak memory, and the clocks that time steps on a host, a GPU or another accelerator."""

from __future__ import annotations

import gc
import sys
from types import SimpleNamespace

import pytest
import torch

from ampcompare.training.meters import make_clock, make_memory_meter


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak can be reset on Linux only")
@pytest.mark.slow
def test_resident_meter_sees_a_passing_allocation() -> None:
    """Memory that was taken and given back again counts in the peak, and memory from before does not."""
    gc.collect()  # what other tests have left would be freed meanwhile
    before = torch.ones(16 * 2**20)
    peaks = []
    for _ in range(3):  # the kernel may take other pages of this process back at the same time
        meter = make_memory_meter(torch.device("cpu"))
        block = torch.ones(64 * 2**20)
        del block
        peaks.append(meter.peak_memory().used)
    assert 250 * 2**20 < max(peaks) < 400 * 2**20
    assert before[0] == 1


def test_the_memory_of_an_accelerator_is_what_torch_counts_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """XPU has peaks, from the creation of the meter; of Metal's memory torch knows what it holds now."""
    reset: list[torch.device] = []
    xpu = SimpleNamespace(
        reset_peak_memory_stats=reset.append,
        max_memory_allocated=lambda _: 3,
        max_memory_reserved=lambda _: 4,
    )
    monkeypatch.setattr(torch, "xpu", xpu)
    monkeypatch.setattr(torch, "mps", SimpleNamespace(driver_allocated_memory=lambda: 5))
    peak = make_memory_meter(torch.device("xpu", 0)).peak_memory()
    assert (peak.used, peak.reserved, reset) == (3, 4, [torch.device("xpu", 0)])
    peak = make_memory_meter(torch.device("mps", 0)).peak_memory()
    assert (peak.used, peak.reserved) == (5, None)


class Event:
    """A CUDA event at a time that the test says."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def synchronize(self) -> None:
        """Wait for nothing."""

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.seconds - self.seconds)


@pytest.mark.requires(cuda=1)
def test_cuda_clock_measures_the_device() -> None:
    """Events see the time of kernels that the host did not wait for."""
    clock = make_clock(torch.device("cuda"))
    x = torch.randn(2048, 2048, device="cuda")
    start = clock.mark()
    for _ in range(50):
        x = x @ x / 2048
    assert clock.seconds_between(start, clock.mark()) > 0


def test_a_wait_behind_which_the_gpu_computes_is_none() -> None:
    """On a GPU the wait for data is the time between two steps on the device; after a drain, that of the host."""
    clock = make_clock(torch.device("cuda", 0))
    assert clock.idle_seconds(5.0, Event(1.0), Event(1.25)) == pytest.approx(0.25)
    assert clock.idle_seconds(5.0, None, Event(1.25)) == 5.0
    assert make_clock(torch.device("cpu")).idle_seconds(5.0, 1.0, 1.25) == 5.0
