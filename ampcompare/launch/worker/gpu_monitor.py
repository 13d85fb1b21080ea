"""Clock, throttling, energy and other processes of a GPU, from NVML if nvidia-ml-py (extra `gpu`) is installed."""

from __future__ import annotations

import os
from typing import Any

import torch

__all__ = ["GpuMonitor"]

# NVML's constants, without their prefix, in plain words.
REASONS = {
    "SwPowerCap": "power limit",
    "HwSlowdown": "hardware slowdown",
    "SwThermalSlowdown": "temperature",
    "HwThermalSlowdown": "temperature",
    "HwPowerBrakeSlowdown": "power brake",
}


class GpuMonitor:
    """Samples one GPU; without NVML or the package it stays empty.

    Attributes:
        clocks: of the multiprocessors at each sample, in MHz.
        throttled: reasons that were active at any sample.
        other_processes: largest number of other compute processes; None if unknown.
    """

    def __init__(self, device: torch.device) -> None:
        self.clocks: list[float] = []
        self.throttled: set[str] = set()
        self.other_processes: int | None = None
        self._nvml, self._handle = _open(device)

    def sample(self) -> None:
        """Take a sample."""
        nvml, handle = self._nvml, self._handle
        if nvml is None:
            return
        try:
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

    def energy(self) -> float | None:
        """Return the joules that the GPU has used since its driver was loaded; None where it does not count them."""
        nvml, handle = self._nvml, self._handle
        if nvml is None:
            return None
        try:
            return float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1000
        except nvml.NVMLError:  # GPUs before Volta have no counter
            return None


def _open(device: torch.device) -> tuple[Any, Any]:
    """Return the NVML module and the handle of torch's device, or (None, None)."""
    try:
        import pynvml
    except ImportError:
        return None, None
    identity = getattr(torch.cuda.get_device_properties(device), "uuid", None)  # torch before 2.5 has none
    if identity is None:
        return None, None
    try:
        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{identity}")
    except pynvml.NVMLError:
        return None, None
