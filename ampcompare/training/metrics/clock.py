"""Time of a step, read without adding a synchronization to the timed window."""

from __future__ import annotations

import abc
import time
from typing import Any, ClassVar

import torch

from ampcompare.base.environment.gpus import ACCELERATORS

__all__ = ["Clock", "HostClock", "make_clock"]


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
    def seconds(self, start: Any, end: Any) -> float:
        """Return the time between two marks; may wait until the device has reached the second."""

    def idle_seconds(self, waited: float, end: Any | None, start: Any) -> float:
        """Return how long a device had no step to compute; called at a drain.

        Args:
            waited: how long the host waited for the batch.
            end: mark of the end of the step before; None for the first step after a drain.
            start: mark of the start of the step.
        """
        return waited


class HostClock(Clock):
    """Wall time of the host, for devices that compute while the host waits."""

    on_host = True
    mark = staticmethod(time.perf_counter)

    def seconds(self, start: float, end: float) -> float:
        return end - start


class CudaClock(Clock):
    """CUDA events on the current stream."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def idle_seconds(self, waited: float, end: torch.cuda.Event | None, start: torch.cuda.Event) -> float:
        # While the GPU still computes, a waiting host costs nothing; a copy that the GPU waits for does.
        return waited if end is None else self.seconds(end, start)


class EventClock(Clock):
    """torch's events of any accelerator, on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> torch.Event:
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.Event, end: torch.Event) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def idle_seconds(self, waited: float, end: torch.Event | None, start: torch.Event) -> float:
        return waited if end is None else self.seconds(end, start)


def make_clock(device: torch.device) -> Clock:
    """Return the clock of a device."""
    if device.type in ACCELERATORS:
        return EventClock(device)
    return CudaClock() if device.type == "cuda" else HostClock()
