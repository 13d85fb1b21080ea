"""Readings of the machine: a GPU that says what the test wants, and a real watch on this processor."""

from types import SimpleNamespace

import pytest
import torch

from ampcompare.experiment.launch.worker.monitor import SystemMonitor


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
        self.millijoules = 10**9

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        return self.clock

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(used=self.clock * 2**20)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        return self.millijoules

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return 4

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[object]:
        return []


def test_the_clock_of_an_idle_gpu_is_no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU is read after timed steps only: not before them, in the warm-up, or after an evaluation's end."""
    nvml = Nvml()
    monkeypatch.setattr(
        "ampcompare.experiment.launch.worker.monitor._nvml_module_and_gpu_handle",
        lambda device: (nvml, "handle"),
    )
    monkeypatch.setattr("ampcompare.experiment.launch.worker.monitor.INTERVAL_SECONDS", 0.0)
    watch = SystemMonitor(torch.device("cuda", 0))
    watch.sample_if_due(timed=False)
    for nvml.clock in (1980, 1965):
        watch.sample_if_due(timed=True)
    nvml.clock = 345
    readings = watch.readings([0.1] * 40)
    assert (readings.clock_low_mhz, readings.clock_high_mhz) == (1965, 1980)
    assert (readings.throttled, readings.other_processes) == (["power limit"], 0)
    assert readings.device_bytes == 1980 * 2**20
    assert readings.load_average is not None


def test_energy_is_that_of_timed_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm-up, evaluations and the first block of an epoch are left out; the rest is divided by its samples."""
    nvml = Nvml()
    monkeypatch.setattr(
        "ampcompare.experiment.launch.worker.monitor._nvml_module_and_gpu_handle",
        lambda device: (nvml, "handle"),
    )
    watch = SystemMonitor(torch.device("cuda", 0))
    assert watch.energy is not None
    for epoch, timed, joules in [
        (0, False, 500),
        (0, True, 20),
        (0, True, 30),
        (1, True, 999),
        (1, True, 10),
    ]:
        nvml.millijoules += 1000 * joules
        watch.energy.add_block_of_steps(epoch, 5, timed=timed)
    assert (watch.energy.joules, watch.energy.steps) == (60.0, 15)
    assert watch.readings([], units=8).joules_per_unit == pytest.approx(60 / (15 * 8))
    assert watch.readings([]).joules_per_unit is None


def test_no_counter_is_no_energy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU has no meter; a GPU whose driver refuses, or that NVML does not know, has no value."""
    assert SystemMonitor(torch.device("cpu")).energy is None

    class Older(Nvml):
        def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
            raise OSError("not supported")

    for opened in [(Older(), "handle"), (None, None)]:
        monkeypatch.setattr(
            "ampcompare.experiment.launch.worker.monitor._nvml_module_and_gpu_handle",
            lambda _, found=opened: found,
        )
        watch = SystemMonitor(torch.device("cuda", 0))
        assert watch.energy is not None
        for _ in range(3):
            watch.energy.add_block_of_steps(0, 5, timed=True)
        assert watch.readings([], units=8).joules_per_unit is None
