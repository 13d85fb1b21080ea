"""What else the machine did while a cell was timed: load, clock, share of the processor, and the GPU's own account.

Read in the process of the cell between two blocks of steps, so that no timed step holds a reading.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import psutil
import torch

from ampcompare.launch.gpu import GpuWatch
from ampcompare.record import Readings

__all__ = ["MachineWatch", "outlier_share"]

INTERVAL_SECONDS = 0.5
OUTLIER_MADS = 3
MAD_TO_SD = 1.4826  # of a normal distribution


def outlier_share(seconds: Sequence[float]) -> float | None:
    """Return the share of step times further than 3 scaled median absolute deviations from the median.

    None where all but a few are equal, which is the resolution of the clock and no spread.
    """
    if not seconds:
        return None
    middle = statistics.median(seconds)
    deviations = [abs(value - middle) for value in seconds]
    limit = OUTLIER_MADS * MAD_TO_SD * statistics.median(deviations)
    return sum(deviation > limit for deviation in deviations) / len(seconds) if limit > 0 else None


class MachineWatch:
    """Reads the machine from its making on, at most twice a second."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = GpuWatch(device) if device.type == "cuda" else None
        self._wall = time.perf_counter()
        self._cpu = time.process_time()
        self._load: list[float] = []
        self._clocks: list[float] = []
        self._next = 0.0
        self.look()

    def look(self) -> None:
        """Take a reading, unless the last one is too fresh."""
        if time.perf_counter() < self._next:
            return
        self._load.append(psutil.getloadavg()[0])
        if self._gpu is not None:
            self._gpu.look()
        else:
            self._clocks += _fastest_core()
        self._next = time.perf_counter() + INTERVAL_SECONDS

    def readings(self, step_seconds: Sequence[float]) -> Readings:
        """Return what was seen since the making.

        Args:
            step_seconds: of every timed step.
        """
        self._next = 0.0
        self.look()
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        clocks = self._clocks if self._gpu is None else self._gpu.clocks
        return Readings(
            timed_steps=len(step_seconds),
            outlier_share=outlier_share(step_seconds),
            cpu_share=cpu / wall if self._gpu is None else None,
            load_average=max(self._load),
            cores=psutil.cpu_count(),
            clock_low_mhz=min(clocks, default=None),
            clock_high_mhz=max(clocks, default=None),
            throttled=sorted(self._gpu.throttled) if self._gpu else [],
            other_processes=self._gpu.other_processes if self._gpu else None,
        )


def _fastest_core() -> list[float]:
    """Return the clock of the core that runs fastest, which is the one at work; nothing where it cannot be read."""
    try:
        cores = psutil.cpu_freq(percpu=True)
    except (OSError, NotImplementedError, RuntimeError):  # virtual machines and some systems have no such file
        return []
    return [max(core.current for core in cores)] if cores else []
