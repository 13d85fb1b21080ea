"""Clock, throttling and other users of a GPU, by NVML where nvidia-ml-py (extra `gpu`) is installed."""

from __future__ import annotations

import os
from typing import Any

import torch

__all__ = ["GpuWatch"]

# names of NVML's constants, without their prefix, and what they mean to a reader
REASONS = {
    "SwPowerCap": "power limit",
    "HwSlowdown": "hardware slowdown",
    "SwThermalSlowdown": "temperature",
    "HwThermalSlowdown": "temperature",
    "HwPowerBrakeSlowdown": "power brake",
}


class GpuWatch:
    """Reads one GPU; where NVML or the package is missing it has seen nothing.

    Attributes:
        clocks: of the multiprocessors at each look, in MHz.
        throttled: reasons that were active at any look.
        other_processes: most compute processes that were not this one; None if unknown.
    """

    def __init__(self, device: torch.device) -> None:
        self.clocks: list[float] = []
        self.throttled: set[str] = set()
        self.other_processes: int | None = None
        self._nvml, self._handle = _open(device)

    def look(self) -> None:
        """Take a reading."""
        nvml, handle = self._nvml, self._handle
        if nvml is None:
            return
        try:
            self.clocks.append(float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)))
            active = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
            for name, words in REASONS.items():
                if active & getattr(nvml, f"nvmlClocksThrottleReason{name}"):
                    self.throttled.add(words)
            running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            others = sum(process.pid != os.getpid() for process in running)
            self.other_processes = max(others, self.other_processes or 0)
        except nvml.NVMLError:  # what this GPU or its driver does not tell stays unknown
            return


def _open(device: torch.device) -> tuple[Any, Any]:
    """Return the NVML module and the handle of torch's device, or two Nones."""
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
