"""The clocks that time steps: on the host, on a GPU, on another accelerator."""

from __future__ import annotations

import pytest
import torch

from ampcompare.training.meters import make_clock


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
    assert clock.seconds(start, clock.mark()) > 0


def test_a_wait_behind_which_the_gpu_computes_is_none() -> None:
    """On a GPU the wait for data is the time between two steps on the device; after a drain, that of the host."""
    clock = make_clock(torch.device("cuda", 0))
    assert clock.idle_seconds(5.0, Event(1.0), Event(1.25)) == pytest.approx(0.25)
    assert clock.idle_seconds(5.0, None, Event(1.25)) == 5.0
    assert make_clock(torch.device("cpu")).idle_seconds(5.0, 1.0, 1.25) == 5.0
