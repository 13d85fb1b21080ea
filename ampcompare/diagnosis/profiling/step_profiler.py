"""The steps of a profile: some to warm up, some timed, some under torch.profiler, some for memory, some for counts.

The loop calls `end_step` after each of its steps; it is not asked for anything else. Timed steps run without the
profiler and give the time of the step, to which the parts of the profiled ones are scaled.
"""

import json
import math
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile, record_function

from ampcompare.base.files.run_files import RunFile
from ampcompare.diagnosis.profiling.marks import PhaseFollower
from ampcompare.diagnosis.profiling.memory import AllocatorBlock, MemoryLedger
from ampcompare.diagnosis.profiling.operation_counter import OperationCounter, OperationCounts
from ampcompare.diagnosis.profiling.trace import TraceTotals, totals_of_trace
from ampcompare.diagnosis.watched_precision import StepObserver
from ampcompare.results.records.profile import MemoryAtPeak, Phase
from ampcompare.training.process.device import synchronize_device

BEGIN = "ampcompare:memory"
DEVICE_TYPES = {"cpu": 0, "cuda": 1}  # numbers of torch in a trace


@dataclass(frozen=True)
class StepCounts:
    """How many steps of each sort are made.

    Attributes:
        watched: operation by operation, for host reads; the first also for all other counts. Two for memory come
            before. 0 for none of these.
    """

    warmup: int = 5
    timed: int = 10
    profiled: int = 3
    watched: int = 5

    @property
    def total(self) -> int:
        return self.warmup + self.timed + self.profiled + (2 + self.watched if self.watched else 0)


@dataclass
class MeasuredSteps:
    """What the steps of one arm showed."""

    # seconds of the timed steps that count: the faster half
    phases: dict[Phase, float] = field(default_factory=dict)
    step_seconds: float = 0.0
    account: TraceTotals = field(default_factory=TraceTotals)
    memory: MemoryAtPeak | None = None
    counts: OperationCounts | None = None
    steps: int = 0
    trace: dict[str, Any] = field(default_factory=dict)  # events of torch.profiler


class StepProfiler(StepObserver):
    """Runs through the sorts of steps as the loop makes them.

    Args:
        steps: how many of each sort.
        device: on which the model trains; it is synchronized at the end of steps that are timed.

    Attributes:
        measured: what the steps showed; whole once `is_over`.
        marks: where in a step the loop is at present.
    """

    def __init__(self, steps: StepCounts, device: torch.device) -> None:
        self.measured = MeasuredSteps()
        self.marks = PhaseFollower(self._mark_gradients_behind_backward)
        self._steps = steps
        self._first_profiled = steps.warmup + steps.timed
        self._first_watched = self._first_profiled + steps.profiled
        self.device = device
        self._profiler: Any = None
        self._ledger = MemoryLedger(self.marks, device)
        self._counter = OperationCounter(self.marks, device)
        self._entered = ExitStack()  # what the present step is seen by
        self._is_ledger_beneath = False
        self._timed: list[tuple[float, dict[Phase, float]]] = []
        self._begun = 0.0
        self._count = 0

    @property
    def is_over(self) -> bool:
        return self._count >= self._steps.total

    def place_memory_ledger_beneath_emulation(self) -> MemoryLedger:
        """Return a mode to enter below an emulation of 16 bits, whose fp32 copies of a step it counts as memory."""
        self._is_ledger_beneath = True
        return self._ledger

    def begin(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Name the modules, and begin with the first step.

        Args:
            models: whose modules are named in the profile.
            optimizers: of the loop; nothing is read of them.
        """
        self.marks.name_modules_of_new_models(models)
        self.open()

    def open(self) -> None:
        self.marks.install()
        self._begun = time.perf_counter()

    def close(self) -> None:
        """Leave torch as it was; steps that were not finished are not used."""
        self.marks.restore_torch()
        with suppress(Exception):
            self._entered.close()

    def end_step(self) -> None:
        """End the present step and prepare the next one."""
        done = self._count
        is_timed = self._steps.warmup <= done < self._first_profiled
        if is_timed:
            synchronize_device(self.device)
        phases = self.marks.end_step_and_take_seconds()
        seconds = time.perf_counter() - self._begun
        if is_timed:
            self._timed.append((seconds, phases))
        self._close_recorders_after_step(done)
        self._count = self.measured.steps = done + 1
        self._open_recorders_for_step(self._count)
        self.marks.phase = "other"
        self.marks.restart_step()
        if self.marks.ranges:
            self.marks.end_profiler_ranges()
        if self._first_profiled <= self._count < self._first_watched:
            self.marks.begin_profiler_ranges()
        self._begun = time.perf_counter()

    def _close_recorders_after_step(self, done: int) -> None:
        """Close what the step that ends was seen by."""
        if done == self._first_profiled - 1:
            self._keep_faster_timed_steps()
        if self._steps.profiled and done == self._first_watched - 1:
            self.marks.end_profiler_ranges()
            synchronize_device(self.device)
            self._entered.close()
            self.measured.trace = _trace_events_of_profiler(self._profiler)
            self.measured.account = totals_of_trace(self.measured.trace["traceEvents"])
        if not self._ledger.is_idle:
            if done == self._first_watched + 1:
                self._measure_peak_memory_of_step()
        elif done > self._first_watched:
            self._counter.end_step()
            self.measured.counts = self._counter.counts
            if done == self._steps.total - 1:
                self._entered.close()

    def _open_recorders_for_step(self, count: int) -> None:
        """Open what the next step is seen by."""
        if count == self._steps.warmup:
            synchronize_device(self.device)
        if count == self._first_profiled and self._steps.profiled:
            activities = [ProfilerActivity.CPU]
            if self.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._profiler = self._entered.enter_context(profile(activities=activities, record_shapes=True))
        if not self._steps.watched:
            return
        if count == self._first_watched:
            self._follow_storages_ahead()
        elif count == self._first_watched + 1:
            self._ledger.begin_step()
            if self.device.type == "cuda":
                synchronize_device(self.device)
                torch.cuda.reset_peak_memory_stats(self.device)
            with record_function(BEGIN):
                pass
        elif count == self._first_watched + 2:
            self.marks.on_print = self._counter.count_tensor_print
            self._entered.callback(setattr, self.marks, "on_print", None)
            self._entered.enter_context(self._counter)

    def _follow_storages_ahead(self) -> None:
        """Follow storages one step ahead: the allocator knows the size of what is freed only if it saw it begin."""
        self._profiler = self._entered.enter_context(
            profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        )
        self._ledger.begin()
        self._entered.callback(self._ledger.end)
        if not self._is_ledger_beneath:
            self._entered.enter_context(self._ledger)

    def _measure_peak_memory_of_step(self) -> None:
        """Take over what memory held at the peak of the watched step, by the ledger and the allocator's trace."""
        measured = reserved = None
        if self.device.type == "cuda":
            measured = torch.cuda.max_memory_allocated(self.device)
            reserved = torch.cuda.max_memory_reserved(self.device)
        self._entered.close()
        self.measured.memory = self._ledger.memory_at_peak(
            blocks_at_peak(_trace_events_of_profiler(self._profiler), self.device), measured, reserved
        )

    def _mark_gradients_behind_backward(self, old: Phase, new: Phase) -> None:
        """Mark the live storages of gradients where the backward pass ends or the optimizer's step begins."""
        if not self._ledger.is_idle and (old == "backward" or new == "optimizer"):
            self._ledger.mark_storages_of_gradients()

    def _keep_faster_timed_steps(self) -> None:
        """Keep the faster half of the timed steps: others were held up by what else the machine does."""
        chosen = sorted(self._timed, key=lambda one: one[0])[: max(1, (len(self._timed) + 1) // 2)]
        self.measured.step_seconds = statistics.fmean(seconds for seconds, _ in chosen)
        names = {name for _, phases in chosen for name in phases}
        self.measured.phases = {
            name: statistics.fmean(one.get(name, 0.0) for _, one in chosen) for name in names
        }


def blocks_at_peak(trace: Mapping[str, Any], device: torch.device) -> list[AllocatorBlock]:
    """Return the blocks of a device's allocator in use at its peak after `BEGIN`, by a trace with `profile_memory`."""
    events = trace["traceEvents"]
    base = int(trace.get("baseTimeNanoseconds", 0))
    begin = next((float(event["ts"]) for event in events if event.get("name") == BEGIN), 0.0)
    number = None if device.type == "cpu" else device.index
    changes = []
    for event in events:
        if event.get("name") == "[memory]":
            place = event["args"]
            if place.get("Device Type") == DEVICE_TYPES[device.type] and number in (
                None,
                place.get("Device Id"),
            ):
                changes.append(event)
    changes.sort(key=lambda event: float(event["ts"]))
    used: dict[int, tuple[int, float]] = {}
    level = highest = 0
    peak: dict[int, tuple[int, float]] = {}
    for event in changes:
        size = int(event["args"]["Bytes"])
        address = int(event["args"]["Addr"])
        when = float(event["ts"])
        level += size
        if size > 0:
            used[address] = size, when
        else:
            used.pop(address, None)
        if when >= begin and (level > highest or not peak):
            highest, peak = level, dict(used)
    again = defaultdict(list)
    for event in changes:
        if int(event["args"]["Bytes"]) > 0:
            again[int(event["args"]["Addr"])].append(float(event["ts"]))
    return [
        AllocatorBlock(
            address,
            size,
            base + int(1000 * when),
            base + 1000 * min((later for later in again[address] if later > when), default=math.inf),
        )
        for address, (size, when) in peak.items()
    ]


def _trace_events_of_profiler(profiler: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="ampcompare-trace-") as folder:
        path = Path(folder) / RunFile.TRACE
        profiler.export_chrome_trace(str(path))
        read: dict[str, Any] = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    return read
