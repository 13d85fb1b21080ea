"""Readings of the machine: outliers by hand, and a real watch on this processor."""

from __future__ import annotations

import time

import pytest
import torch

from ampcompare.launch.machine import MachineWatch, outlier_share


def test_outliers_by_hand() -> None:
    """Of eleven times one lies beyond three scaled deviations of the median."""
    assert outlier_share([10, 11, 9, 10, 12, 8, 10, 11, 9, 10, 50]) == pytest.approx(1 / 11)


@pytest.mark.parametrize("seconds", [[], [1.0] * 9 + [2.0]])
def test_no_spread_no_outliers(seconds: list[float]) -> None:
    """Without a spread there is no measure of an outlier."""
    assert outlier_share(seconds) is None


def test_busy_and_idle_are_told_apart() -> None:
    """A process that sleeps has less of its core than one that computes, and load and cores are read."""
    busy = MachineWatch(torch.device("cpu"))
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    worked = busy.readings([0.1] * 40)
    idle = MachineWatch(torch.device("cpu"))
    time.sleep(0.4)
    slept = idle.readings([])
    assert (worked.timed_steps, slept.timed_steps) == (40, 0)
    assert (worked.cpu_share or 0) > 2 * (slept.cpu_share or 0)
    assert worked.load_average is not None
    assert (worked.cores or 0) >= 1
    assert (worked.throttled, worked.other_processes) == ([], None)
