"""What is measured on a device: the time of a step, without a synchronization in the timed window, and peak memory."""

import abc
import contextlib
import sys
import time
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias

import psutil
import torch

from ampcompare.base.environment.gpus import ACCELERATORS


class Clock(abc.ABC):
    """Marks on the timeline of a device. A mark does not wait; the time between two marks is read at a drain.

    Attributes:
        on_host: whether a mark is a value of `time.perf_counter`.
    """

    on_host: ClassVar[bool] = False

    @abc.abstractmethod
    def mark(self) -> Any:
        """Mark this moment."""

    @abc.abstractmethod
    def seconds_between(self, start: Any, end: Any) -> float:
        """Return the time between two marks; may wait until the device has reached the second."""

    def idle_seconds(self, seconds_waited: float, end: Any | None, start: Any) -> float:
        """Return how long a device had no step to compute, where the host `seconds_waited` for a batch; at a drain.

        `end` marks the end of the step before; None for the first step after a drain.
        """
        return seconds_waited


class HostClock(Clock):
    """Wall time of the host, for devices that compute while the host waits."""

    on_host = True
    mark = staticmethod(time.perf_counter)

    def seconds_between(self, start: float, end: float) -> float:
        return end - start


class EventClock(Clock):
    """torch's events of an accelerator, on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> Any:
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def seconds_between(self, start: Any, end: Any) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def idle_seconds(self, seconds_waited: float, end: Any | None, start: Any) -> float:
        # While the device still computes, a waiting host costs nothing; a copy that the device waits for does.
        return seconds_waited if end is None else self.seconds_between(end, start)


class CudaClock(EventClock):
    """CUDA events on the current stream."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def make_clock(device: torch.device) -> Clock:
    """Return the clock of a device."""
    if device.type in ACCELERATORS:
        return EventClock(device)
    return CudaClock(device) if device.type == "cuda" else HostClock()


class PeakMemory(NamedTuple):
    """Peak memory of a run, in bytes.

    Attributes:
        used: CUDA and XPU: peak bytes in tensors; MPS: bytes that Metal holds for torch, which it seldom gives back;
            CPU: peak resident memory minus its value when the meter was created.
        reserved: CUDA and XPU: peak bytes held by the caching allocator; None elsewhere.
    """

    used: int
    reserved: int | None


class AcceleratorMemoryMeter:
    """Counts of the allocator of a GPU or another accelerator, as far as torch has them."""

    def __init__(self, device: torch.device) -> None:
        self.module: Any = getattr(torch, device.type)
        self.device = device
        self.counts_peak = device.type == "cuda" or ACCELERATORS[device.type].counts_peak
        if self.counts_peak:
            self.module.reset_peak_memory_stats(device)

    def peak_memory(self) -> PeakMemory:
        """Return the peak so far."""
        if not self.counts_peak:
            return PeakMemory(self.module.driver_allocated_memory(), None)
        return PeakMemory(
            self.module.max_memory_allocated(self.device), self.module.max_memory_reserved(self.device)
        )


class ResidentMemoryMeter:
    """Resident memory of this process, as the kernel sees it.

    On Linux the kernel's high-water mark is reset first. Other systems have only the mark of the whole process, so the
    peak is 0 if the process was larger before the run.
    """

    def __init__(self) -> None:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # 5: reset the peak to the current value
        self.before = psutil.Process().memory_info().rss

    def peak_memory(self) -> PeakMemory:
        """Return the peak so far."""
        return PeakMemory(max(0, self._resident_high_water() - self.before), None)

    @staticmethod
    def _resident_high_water() -> int:
        try:
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        except OSError:
            pass
        try:
            import resource
        except ImportError:  # Windows, whose counter cannot be reset either
            memory = psutil.Process().memory_info()
            return int(getattr(memory, "peak_wset", memory.rss))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


MemoryMeter: TypeAlias = AcceleratorMemoryMeter | ResidentMemoryMeter
"""Measures from its creation to each `peak` call."""


def make_memory_meter(device: torch.device) -> MemoryMeter:
    """Return the memory meter of a device, started."""
    return ResidentMemoryMeter() if device.type == "cpu" else AcceleratorMemoryMeter(device)
