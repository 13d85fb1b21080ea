"""The meters of peak memory."""

import gc
import sys
from types import SimpleNamespace

import pytest
import torch

from ampcompare.training.meters import make_memory_meter


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak can be reset on Linux only")
def test_resident_meter_sees_a_passing_allocation() -> None:
    """Memory that was taken and given back again counts in the peak, and memory from before does not."""
    gc.collect()  # what other tests have left would be freed meanwhile
    before = torch.ones(16 * 2**20)
    peaks = []
    for _ in range(3):  # the kernel may take other pages of this process back at the same time
        meter = make_memory_meter(torch.device("cpu"))
        block = torch.ones(64 * 2**20)
        del block
        peaks.append(meter.peak().used)
    assert 250 * 2**20 < max(peaks) < 400 * 2**20
    assert before[0] == 1


def test_the_memory_of_an_accelerator_is_what_torch_counts_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """XPU has peaks, from the creation of the meter; of Metal's memory torch knows what it holds now."""
    reset: list[torch.device] = []
    xpu = SimpleNamespace(
        reset_peak_memory_stats=reset.append, max_memory_allocated=lambda _: 3, max_memory_reserved=lambda _: 4
    )
    monkeypatch.setattr(torch, "xpu", xpu)
    monkeypatch.setattr(torch, "mps", SimpleNamespace(driver_allocated_memory=lambda: 5))
    peak = make_memory_meter(torch.device("xpu", 0)).peak()
    assert (peak.used, peak.reserved, reset) == (3, 4, [torch.device("xpu", 0)])
    peak = make_memory_meter(torch.device("mps", 0)).peak()
    assert (peak.used, peak.reserved) == (5, None)
