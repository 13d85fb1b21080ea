"""Replacements for `torch.cuda` on the CPU: streams, events, contexts, properties."""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import psutil
import torch

__all__ = [
    "ACCELERATOR",
    "CUDA_VERSION",
    "CUDNN_VERSION",
    "FUNCTIONS",
    "NCCL_VERSION",
    "Event",
    "Nothing",
    "Stream",
    "cudart",
    "device_properties",
]

# Versions that scripts compare and print, if torch itself has none: those of torch 2.4.
CUDA_VERSION = "12.1"
CUDNN_VERSION = 90100
NCCL_VERSION = (2, 20, 5)
# The first capability with bfloat16; cuDNN refuses older ones.
CAPABILITY = (8, 0)


class Nothing(AbstractContextManager[Any]):
    """Accepts any arguments and does nothing, as a context or as a decorator."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        return None

    def __call__(self, function: Any) -> Any:
        """Return a decorated function as it is."""
        return function


class Stream(Nothing):
    """A stream whose work is always complete."""

    device = torch.device("cpu")
    cuda_stream = 0
    priority = 0

    def wait_stream(self, stream: Any) -> None:
        """Do nothing: all work is complete."""

    def wait_event(self, event: Any) -> None:
        """Do nothing: all work is complete."""

    def synchronize(self) -> None:
        """Do nothing: all work is complete."""

    def query(self) -> bool:
        """Return True: all work is complete."""
        return True

    def is_capturing(self) -> bool:
        """Return False: there are no graphs."""
        return False

    def record_event(self, event: Event | None = None) -> Event:
        """Return an event recorded now."""
        event = event or Event()
        event.record(self)
        return event


class Event:
    """A time on the wall clock."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._seconds = 0.0

    def record(self, stream: Any = None) -> None:
        """Record the current time."""
        self._seconds = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Do nothing: all work is complete."""

    def synchronize(self) -> None:
        """Do nothing: all work is complete."""

    def query(self) -> bool:
        """Return True: all work is complete."""
        return True

    def elapsed_time(self, end_event: Event) -> float:
        """Return the milliseconds until another event."""
        return 1e3 * (end_event._seconds - self._seconds)


def device_properties(device: Any = None) -> SimpleNamespace:
    """Return the properties that scripts print of a GPU."""
    return SimpleNamespace(
        name="CPU in place of CUDA",
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        total_memory=psutil.virtual_memory().total,
        multi_processor_count=1,
        is_integrated=False,
        is_multi_gpu_board=False,
    )


def cudart() -> SimpleNamespace:
    """Return the profiler's calls, which do nothing."""
    return SimpleNamespace(
        cudaProfilerStart=lambda: 0, cudaProfilerStop=lambda: 0, cudaGetErrorString=lambda error: "no error"
    )


_stream = Stream()


def _always(value: Any) -> Any:
    def constant(*args: Any, **kwargs: Any) -> Any:
        return value

    return constant


def _memory() -> tuple[int, int]:
    memory = psutil.virtual_memory()
    return memory.available, memory.total


FUNCTIONS: dict[str, Any] = {
    "Event": Event,
    "Stream": Stream,
    "StreamContext": Nothing,
    "can_device_access_peer": _always(False),
    "cudart": cudart,
    "current_blas_handle": _always(0),
    "current_device": _always(0),
    "current_stream": _always(_stream),
    "default_stream": _always(_stream),
    "device": Nothing,
    "device_count": _always(1),
    "device_of": Nothing,
    "empty_cache": _always(None),
    "get_arch_list": lambda: [],
    "get_device_capability": _always(CAPABILITY),
    "get_device_name": _always("CPU in place of CUDA"),
    "get_device_properties": device_properties,
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "get_rng_state_all": lambda: [torch.get_rng_state()],
    "init": _always(None),
    "initial_seed": lambda: torch.initial_seed(),
    "ipc_collect": _always(None),
    "is_available": _always(True),
    "is_bf16_supported": _always(True),
    "is_current_stream_capturing": _always(False),
    "manual_seed": _always(None),  # the CPU's generator is seeded by torch.manual_seed
    "manual_seed_all": _always(None),
    "max_memory_allocated": _always(0),
    "max_memory_cached": _always(0),
    "max_memory_reserved": _always(0),
    "mem_get_info": lambda device=None: _memory(),
    "memory_allocated": _always(0),
    "memory_cached": _always(0),
    "memory_reserved": _always(0),
    "memory_snapshot": lambda *args, **kwargs: [],
    "memory_stats": lambda device=None: defaultdict(int),
    "memory_summary": _always("no CUDA memory: this run uses the CPU\n"),
    "reset_accumulated_memory_stats": _always(None),
    "reset_max_memory_allocated": _always(None),
    "reset_max_memory_cached": _always(None),
    "reset_peak_memory_stats": _always(None),
    "seed": _always(None),
    "seed_all": _always(None),
    "set_device": _always(None),
    "set_per_process_memory_fraction": _always(None),
    "set_rng_state": lambda new_state, device=None: torch.set_rng_state(new_state),
    "set_rng_state_all": lambda new_states: torch.set_rng_state(new_states[0]),
    "set_stream": _always(None),
    "stream": Nothing,
    "synchronize": _always(None),
    "utilization": _always(0),
}
# `torch.accelerator` on a machine with a GPU.
ACCELERATOR: dict[str, Any] = {
    "current_accelerator": lambda check_available=False: torch.device("cuda"),
    "current_device_idx": _always(0),
    "current_device_index": _always(0),
    "current_stream": _always(_stream),
    "device_count": _always(1),
    "device_index": Nothing,
    "empty_cache": _always(None),
    "get_device_capability": _always({"supported_dtypes": {torch.float32, torch.float16, torch.bfloat16}}),
    "get_memory_info": lambda device_index=None: _memory(),
    "is_available": _always(True),
    "max_memory_allocated": _always(0),
    "max_memory_reserved": _always(0),
    "memory_allocated": _always(0),
    "memory_reserved": _always(0),
    "memory_stats": lambda device_index=None: defaultdict(int),
    "reset_accumulated_memory_stats": _always(None),
    "reset_peak_memory_stats": _always(None),
    "set_device_idx": _always(None),
    "set_device_index": _always(None),
    "set_stream": _always(None),
    "synchronize": _always(None),
}
