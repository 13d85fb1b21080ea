"""What the parts ask of a device, once for CUDA and once for a CPU that stands in for it in a rehearsal."""

import abc
import gc
import json
import re
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.ledger import Ledger, WholeReads

Step = Callable[[], object]

# Names of kernels that compute products and convolutions on tensor cores, as cuBLAS, cuDNN and CUTLASS give them.
TENSOR_CORES = re.compile(
    r"(hmma|wgmma|[hs]16\d{3,}|16816|1688|tensorop|gmma|nvjet|xmma.*(f16|bf16|tf32)|(f16|bf16|tf32).*xmma)",
    re.I,
)
PRODUCTS = re.compile(r"^aten::(mm|addmm|bmm|baddbmm|mkldnn_convolution|convolution_backward|thnn_conv2d)$")
# Of each wait; the mode itself warns once that it is a prototype for "synchronizing operations".
SYNC_WARNING = "called a synchronizing CUDA operation"
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy")


class Device(abc.ABC):
    """A device on which loops run; used in the process of the loop only.

    Attributes:
        kind: for `Tensor.to`.
        launched: category of a launch in a trace of the profiler.
    """

    kind: str
    launched: str
    activities: tuple[ProfilerActivity, ...]
    products: re.Pattern[str]

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has done everything."""

    @abc.abstractmethod
    def syncs(self, step: Step) -> int:
        """Run a step and return how often the host waited for the device in it."""

    @abc.abstractmethod
    def peak_bytes(self, run: Step) -> int:
        """Run something that leaves nothing behind, and return the most bytes that tensors held in it."""

    @abc.abstractmethod
    def fits(self, run: Step, limit: int) -> bool:
        """Run something that leaves nothing behind, and return whether `limit` bytes were enough for it."""

    def counts(self, step: Step) -> dict[str, float]:
        """Run a step three times, and count what the host and the device did in it."""
        ledger = Ledger()
        with ledger:
            step()
        waited = self.syncs(step)
        return {
            "syncs": waited,
            "reads": ledger.reads,
            "operations": ledger.writes,
            "operand_bytes": ledger.bytes,
            **self.trace(step),
        }

    def trace(self, step: Step) -> dict[str, float]:
        """Run a step under the profiler, and return the sums of `read_trace`."""
        self.synchronize()
        with profile(activities=list(self.activities)) as trace:
            step()
            self.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            trace.export_chrome_trace(str(path))
            return read_trace(json.loads(path.read_text())["traceEvents"], self.launched, self.products)

    def seconds(self, step: Step, count: int) -> float:
        """Return the wall seconds of one of `count` steps, the work of the device included."""
        self.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            step()
        self.synchronize()
        return (time.perf_counter() - begin) / count


class Cuda(Device):
    """The current CUDA device."""

    kind = "cuda"
    launched = "kernel"
    activities = (ProfilerActivity.CPU, ProfilerActivity.CUDA)
    products = TENSOR_CORES

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def syncs(self, step: Step) -> int:
        self.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return sum(SYNC_WARNING in str(warning.message) for warning in caught)

    def peak_bytes(self, run: Step) -> int:
        gc.collect()
        self.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        self.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def fits(self, run: Step, limit: int) -> bool:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))
        try:
            run()
            self.synchronize()
            return True
        except torch.cuda.OutOfMemoryError:
            return False
        finally:
            gc.collect()
            torch.cuda.empty_cache()


class Rehearsed(Device):
    """A CPU in the place of the device: reads of a number count as waits, operations as launches."""

    kind = "cpu"
    launched = "cpu_op"
    activities = (ProfilerActivity.CPU,)
    products = PRODUCTS

    def synchronize(self) -> None:
        """Do nothing: a CPU computes while the host waits."""

    def syncs(self, step: Step) -> int:
        with WholeReads() as whole, Ledger() as ledger:
            step()
        return ledger.reads + whole.reads

    def peak_bytes(self, run: Step) -> int:
        gc.collect()
        with profile(activities=list(self.activities), profile_memory=True) as trace:
            run()
        held = peak = 0
        for size in _allocations(trace):
            held += size
            peak = max(peak, held)
        return peak

    def fits(self, run: Step, limit: int) -> bool:
        return self.peak_bytes(run) <= limit


def _allocations(trace: Any) -> list[int]:
    """Return the bytes of each allocation, and less than nothing for each release, in the order of time."""
    events = trace.profiler.kineto_results.events()
    memory = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    return [size for _, size in sorted(memory, key=lambda entry: entry[0])]


def make_device(kind: str) -> Device:
    """Return the device of a kind, "cuda" or "cpu"."""
    return Cuda() if kind == "cuda" else Rehearsed()


def read_trace(events: list[dict[str, Any]], launched: str, products: re.Pattern[str]) -> dict[str, float]:
    """Sum up a trace of the profiler in the Chrome format.

    Args:
        launched: category of the events that are launches.
        products: names of the launches that compute products and convolutions on the units made for them.

    Returns:
        `kernels`, `memcpys`, `memsets` (counts), `copied_bytes`, `set_bytes`, `waits` (calls of the driver that wait
        for the device), `device_seconds` (sum over launches), `product_share` (of those seconds, 0 to 1).
    """
    found = {"kernels": 0, "memcpys": 0, "memsets": 0, "copied_bytes": 0, "set_bytes": 0, "waits": 0}
    seconds = product_seconds = 0.0
    for event in events:
        kind, name = event.get("cat"), event.get("name", "")
        size = event.get("args", {}).get("bytes", 0)
        if kind == launched:
            found["kernels"] += 1
            seconds += event.get("dur", 0) / 1e6
            product_seconds += event.get("dur", 0) / 1e6 if products.search(name) else 0.0
        elif kind == "gpu_memcpy":
            found["memcpys"] += 1
            found["copied_bytes"] += size
        elif kind == "gpu_memset":
            found["memsets"] += 1
            found["set_bytes"] += size
        elif kind == "cuda_runtime" and name in WAITS:
            found["waits"] += 1
    share = product_seconds / seconds if seconds else 0.0
    return {**found, "device_seconds": seconds, "product_share": share}
