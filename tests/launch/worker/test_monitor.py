"""Readings of the machine: a GPU that says what the test wants, and a real watch on this processor."""

from __future__ import annotations

import time

import pytest
import torch

from ampcompare.launch.worker.monitor import SystemMonitor


class Nvml:
    """A GPU whose clock is what the test says."""

    NVML_CLOCK_SM = 1
    NVMLError = OSError
    nvmlClocksThrottleReasonSwPowerCap = 4
    nvmlClocksThrottleReasonHwSlowdown = 8
    nvmlClocksThrottleReasonSwThermalSlowdown = 32
    nvmlClocksThrottleReasonHwThermalSlowdown = 64
    nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 128

    def __init__(self) -> None:
        self.clock = 345

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        return self.clock

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return 4

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[object]:
        return []


def test_the_clock_of_an_idle_gpu_is_no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU is read after timed steps only: not before them, in the warm-up, or after an evaluation's end."""
    nvml = Nvml()
    monkeypatch.setattr("ampcompare.launch.worker.gpu_monitor._open", lambda device: (nvml, "handle"))
    monkeypatch.setattr("ampcompare.launch.worker.monitor.INTERVAL_SECONDS", 0.0)
    watch = SystemMonitor(torch.device("cuda", 0))
    watch.sample(timed=False)
    for nvml.clock in (1980, 1965):
        watch.sample(timed=True)
    nvml.clock = 345
    readings = watch.readings([0.1] * 40)
    assert (readings.clock_low_mhz, readings.clock_high_mhz) == (1965, 1980)
    assert (readings.throttled, readings.other_processes) == (["power limit"], 0)
    assert readings.load_average is not None


def test_the_warm_up_does_not_put_off_the_first_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first timed block is read however short the time since the watch was made."""
    monkeypatch.setattr("ampcompare.launch.worker.gpu_monitor._open", lambda device: (Nvml(), "handle"))
    watch = SystemMonitor(torch.device("cuda", 0))
    watch.sample(timed=True)
    assert watch.readings([]).clock_low_mhz == 345


def test_busy_and_idle_are_told_apart() -> None:
    """A process that sleeps has less of its core than one that computes, and load and cores are read."""
    busy = SystemMonitor(torch.device("cpu"))
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    worked = busy.readings([0.1] * 40)
    idle = SystemMonitor(torch.device("cpu"))
    time.sleep(0.4)
    slept = idle.readings([])
    assert (worked.timed_steps, slept.timed_steps) == (40, 0)
    assert (worked.cpu_share or 0) > 2 * (slept.cpu_share or 0)
    assert worked.load_average is not None
    assert (worked.cores or 0) >= 1
    assert (worked.throttled, worked.other_processes) == ([], None)
