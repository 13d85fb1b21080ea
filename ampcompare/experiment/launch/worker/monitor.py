"""System load, clocks and throttling during a timed run.

Sampled in the process of the cell between two blocks of steps, so that no timed step contains a sample.
"""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from ampcompare.results.records.run import SystemReadings
from ampcompare.training.run_summary import find_medians_of_halves, outlier_share_of_times

INTERVAL_SECONDS = 0.5
# NVML's constants, without their prefix, in plain words.
REASONS = {
    "SwPowerCap": "power limit",
    "HwSlowdown": "hardware slowdown",
    "SwThermalSlowdown": "temperature",
    "HwThermalSlowdown": "temperature",
    "HwPowerBrakeSlowdown": "power brake",
}


class SystemMonitor:
    """Samples the machine at most twice a second, from its creation on.

    A GPU is sampled only right after timed steps: an idle GPU lowers its clock.

    Attributes:
        energy: of the GPU, counted block by block; None on other devices.
    """

    def __init__(self, device: torch.device) -> None:
        self._gpu = _GpuMonitor(device) if device.type == "cuda" else None
        self.energy = None if self._gpu is None else _EnergyMeter(self._gpu.energy_joules)
        self._wall = time.perf_counter()
        self._cpu = time.process_time()
        self._waited = _seconds_without_core()
        self._load: list[float] = []
        self._clocks: list[float] = []
        self._next = 0.0
        self.sample_if_due(timed=False)

    def sample_if_due(self, *, timed: bool) -> None:
        """Take a sample, unless the last one is too recent; `timed`: the device has just finished timed steps."""
        if time.perf_counter() < self._next:
            return
        self._load.append(psutil.getloadavg()[0])
        if self._gpu is None:
            self._clocks += _highest_clock_mhz()
        elif timed:
            self._gpu.sample()
        else:
            return  # without delaying the first sample of the GPU
        self._next = time.perf_counter() + INTERVAL_SECONDS

    def readings(self, step_seconds: Sequence[float], units: int | None = None) -> SystemReadings:
        """Return the readings since the creation.

        Args:
            units: samples, or whatever runs count, that the GPU trains on in a step; None where others share them.
        """
        self._next = 0.0
        self.sample_if_due(timed=False)
        wall = time.perf_counter() - self._wall
        cpu = time.process_time() - self._cpu
        waiting = None
        if self._waited is not None:
            waiting = max(0.0, (_seconds_without_core() or 0.0) - self._waited) / wall
        clocks = self._clocks if self._gpu is None else self._gpu.clocks
        two = find_medians_of_halves(step_seconds)
        return SystemReadings(
            timed_steps=len(step_seconds),
            outlier_share=outlier_share_of_times(step_seconds),
            first_half_seconds=two and two.first,
            second_half_seconds=two and two.second,
            halves_error=two and two.error,
            cpu_share=cpu / wall if self._gpu is None else None,
            waiting_share=waiting,
            load_average=max(self._load),
            cores=psutil.cpu_count(),
            clock_low_mhz=min(clocks, default=None),
            clock_high_mhz=max(clocks, default=None),
            throttled=sorted(self._gpu.throttled) if self._gpu else [],
            joules_per_unit=None
            if self.energy is None or units is None
            else self.energy.joules_per_unit(units),
            other_processes=self._gpu.other_processes if self._gpu else None,
            device_bytes=self._gpu.device_bytes if self._gpu else None,
        )


def _seconds_without_core() -> float | None:
    """Return how long this thread has been ready to run while no core was free for it; Linux alone counts that."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


def _highest_clock_mhz() -> list[float]:
    """Return the highest clock of the cores in MHz, which is that of the busy one; empty if it cannot be read."""
    try:
        cores = psutil.cpu_freq(percpu=True)
    except (OSError, NotImplementedError, RuntimeError):
        # virtual machines and some systems have no such file
        return []
    return [max(core.current for core in cores)] if cores else []


class _GpuMonitor:
    """Samples one GPU; without NVML or the package it stays empty.

    Attributes:
        clocks: of the multiprocessors at each sample, in MHz.
        other_processes: largest number of other compute processes; None if unknown.
        device_bytes: most memory of the whole GPU in use, as nvidia-smi shows it; None if unknown.
    """

    def __init__(self, device: torch.device) -> None:
        self.clocks: list[float] = []
        self.throttled: set[str] = set()
        self.other_processes: int | None = None
        self.device_bytes: int | None = None
        self._nvml, self._handle = _nvml_module_and_gpu_handle(device)

    def sample(self) -> None:
        """Take a sample."""
        nvml, handle = self._nvml, self._handle
        if nvml is None:
            return
        try:
            self.device_bytes = max(int(nvml.nvmlDeviceGetMemoryInfo(handle).used), self.device_bytes or 0)
            self.clocks.append(float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)))
            active = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
            for name, reason in REASONS.items():
                if active & getattr(nvml, f"nvmlClocksThrottleReason{name}"):
                    self.throttled.add(reason)
            running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            others = sum(process.pid != os.getpid() for process in running)
            self.other_processes = max(others, self.other_processes or 0)
        except nvml.NVMLError:  # what this GPU or its driver does not report stays unknown
            return

    def energy_joules(self) -> float | None:
        """Return the joules that the GPU has used since its driver was loaded; None where it does not count them."""
        nvml, handle = self._nvml, self._handle
        if nvml is None:
            return None
        try:
            return float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1000
        except nvml.NVMLError:  # GPUs before Volta have no counter
            return None


def _nvml_module_and_gpu_handle(device: torch.device) -> tuple[Any, Any]:
    """Return the NVML module and the handle of torch's device, or (None, None)."""
    try:
        import pynvml
    except ImportError:
        return None, None
    try:
        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(
            f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        )
    except pynvml.NVMLError:
        return None, None


class _EnergyMeter:
    """Adds up the joules that a counter has advanced over blocks of steps, without evaluations and other pauses."""

    def __init__(self, read: Callable[[], float | None]) -> None:
        self.joules = 0.0
        self.steps = 0
        self._read = read
        self._last: tuple[int, float] | None = None

    def add_block_of_steps(self, epoch: int, steps: int, *, timed: bool) -> None:
        """Count a block of steps that the device has just finished.

        Args:
            epoch: of the block; the first block of an epoch only sets the mark.
            timed: whether all of them are after the warm-up.
        """
        now = self._read()
        if now is None:
            return
        if timed and self._last is not None and self._last[0] == epoch:
            self.joules += now - self._last[1]
            self.steps += steps
        self._last = epoch, now

    def joules_per_unit(self, units: int) -> float | None:
        """Return joules per unit, such as a sample; None if nothing was counted."""
        return self.joules / (self.steps * units) if self.steps and self.joules > 0 else None
