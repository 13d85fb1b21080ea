"""The steps of a profile: some to warm up, some timed, some under torch.profiler, some for memory, some for counts.

The loop calls `end_step` after each of its steps; it is not asked for anything else. Timed steps run without the
profiler and give the time of the step, to which the parts of the profiled ones are scaled.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import math
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ampcompare.base.files.run_files import RunFile
from ampcompare.diagnosis.profiling.ledger import Block, Ledger
from ampcompare.diagnosis.profiling.marks import Marks
from ampcompare.diagnosis.profiling.trace import Account, read_trace
from ampcompare.diagnosis.profiling.watch import Seen, StepSight
from ampcompare.results.records.profile import Memory, Phase

__all__ = ["Measured", "StepProfiler", "Steps"]

BEGIN = "ampcompare:memory"
DEVICE_TYPES = {"cpu": 0, "cuda": 1}  # numbers of torch in a trace
MAX_NESTED = 400  # operations that begin before a time and may still run then


@dataclass(frozen=True)
class Steps:
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
        """All steps."""
        return self.warmup + self.timed + self.profiled + (2 + self.watched if self.watched else 0)


@dataclass
class Measured:
    """What the steps of one arm showed.

    Attributes:
        seconds: of the timed steps.
        phases: seconds by phase of the timed steps that count: the faster half.
        trace: events of torch.profiler.
    """

    seconds: list[float] = field(default_factory=list)
    phases: dict[Phase, float] = field(default_factory=dict)
    step_seconds: float = 0.0
    account: Account = field(default_factory=Account)
    memory: Memory | None = None
    seen: Seen | None = None
    steps: int = 0
    trace: dict[str, Any] = field(default_factory=dict)


class StepProfiler:
    """Runs through the sorts of steps as the loop makes them.

    Args:
        steps: how many of each.
        device: on which the loop trains.
    """

    def __init__(self, steps: Steps, device: torch.device) -> None:
        self.measured = Measured()
        self.marks = Marks(self._on_phase)
        self._steps = steps
        self._device = device
        self._profiler: Any = None
        self._memory_profiler: Any = None
        self._ledger: Ledger | None = None
        self._sight: StepSight | None = None
        self._beneath: StepSight | None = None
        self._timed: list[tuple[float, dict[Phase, float]]] = []
        self._begun = 0.0
        self._count = 0

    @property
    def is_over(self) -> bool:
        """Whether all steps are made."""
        return self._count >= self._steps.total

    def beneath(self) -> StepSight:
        """Return a mode to enter below an emulation of 16 bits, whose fp32 copies of a step it counts as memory."""
        self._beneath = StepSight(self.marks, None, self._device)
        self._beneath.is_idle = True
        return self._beneath

    def open(self) -> None:
        """Begin with the first step."""
        self.marks.install()
        self._begun = time.perf_counter()

    def close(self) -> None:
        """Leave torch as it was; steps that were not finished are not used."""
        self.marks.remove()
        for context in (self._sight, self._profiler, self._memory_profiler):
            if context is not None:
                with contextlib.suppress(Exception):
                    context.__exit__(None, None, None)
        if self._ledger is not None:
            self._ledger.end()
        self._sight = self._profiler = self._memory_profiler = self._ledger = None

    def end_step(self) -> None:
        """End the present step and prepare the next one."""
        steps, done = self._steps, self._count
        is_timed = steps.warmup <= done < steps.warmup + steps.timed
        if is_timed and self._device.type != "cpu":
            self._synchronize()
        phases = self.marks.end_step()
        seconds = time.perf_counter() - self._begun
        if is_timed:
            self._timed.append((seconds, phases))
        self._finish(done)
        self._count = self.measured.steps = done + 1
        self._prepare(self._count)
        self.marks.phase = "other"
        self.marks.restart()
        if self.marks.ranges:
            self.marks.end_ranges()
        if steps.warmup + steps.timed <= self._count < steps.warmup + steps.timed + steps.profiled:
            self.marks.begin_ranges()
        self._begun = time.perf_counter()

    def _finish(self, done: int) -> None:
        """Close what the step that ends was seen by."""
        first_profiled = self._steps.warmup + self._steps.timed
        if done == first_profiled - 1:
            self._sum_up_timed()
        if self._profiler is not None and done == first_profiled + self._steps.profiled - 1:
            self.marks.end_ranges()
            self._synchronize()
            profiler, self._profiler = self._profiler, None
            profiler.__exit__(None, None, None)
            self.measured.trace = _events_of(profiler)
            self.measured.account = read_trace(self.measured.trace["traceEvents"])
        if self._ledger is not None:
            if done == first_profiled + self._steps.profiled + 1:
                self._finish_memory()
        elif self._sight is not None:
            self._sight.end_step()
            self.measured.seen = self._sight.seen
            if done == self._steps.total - 1:
                self._sight.__exit__(None, None, None)
                self._sight = self.marks.on_print = None

    def _prepare(self, count: int) -> None:
        """Open what the next step is seen by."""
        steps = self._steps
        first_profiled = steps.warmup + steps.timed
        if count == steps.warmup and self._device.type != "cpu":
            self._synchronize()
        if count == first_profiled and steps.profiled:
            activities = [ProfilerActivity.CPU]
            if self._device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._profiler = profile(activities=activities, record_shapes=True)
            self._profiler.__enter__()
        watched = first_profiled + steps.profiled
        if steps.watched and count == watched:
            self._prepare_memory()
        elif steps.watched and count == watched + 1:
            assert self._ledger is not None
            self._ledger.begin_step()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
                torch.cuda.reset_peak_memory_stats(self._device)
            with record_function(BEGIN):
                pass
        elif steps.watched and count == watched + 2:
            self._sight = StepSight(self.marks, None, self._device)
            self.marks.on_print = self._sight.printed
            self._sight.__enter__()

    def _prepare_memory(self) -> None:
        """Follow storages one step ahead: the allocator knows the size of what is freed only if it saw it begin."""
        self._ledger = Ledger(self.marks, self._device)
        self._memory_profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._memory_profiler.__enter__()
        self._ledger.begin()
        if self._beneath is not None:
            self._beneath.ledger, self._beneath.is_idle = self._ledger, False
            return
        self._sight = StepSight(self.marks, self._ledger, self._device)
        self._sight.__enter__()

    def _finish_memory(self) -> None:
        assert self._ledger is not None
        ledger, self._ledger = self._ledger, None
        if self._beneath is not None:
            self._beneath.ledger, self._beneath.is_idle = None, True
        if self._sight is not None:
            sight, self._sight = self._sight, None
            sight.__exit__(None, None, None)
        ledger.end()
        measured = reserved = None
        if self._device.type == "cuda":
            measured = torch.cuda.max_memory_allocated(self._device)
            reserved = torch.cuda.max_memory_reserved(self._device)
        profiler, self._memory_profiler = self._memory_profiler, None
        profiler.__exit__(None, None, None)
        self.measured.memory = memory_at_peak(ledger, _events_of(profiler), self._device, measured, reserved)

    def _on_phase(self, old: Phase, new: Phase) -> None:
        if self._ledger is None:
            return
        self._ledger.note_phase(new)
        if old == "backward" or new == "optimizer":
            self._ledger.note_gradients()

    def _sum_up_timed(self) -> None:
        """Keep the faster half of the timed steps: others were held up by what else the machine does."""
        chosen = faster_half(self._timed)
        self.measured.seconds = [seconds for seconds, _ in self._timed]
        self.measured.step_seconds = statistics.fmean(seconds for seconds, _ in chosen)
        names = {name for _, phases in chosen for name in phases}
        self.measured.phases = {name: statistics.fmean(one.get(name, 0.0) for _, one in chosen) for name in names}

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            getattr(torch, self._device.type).synchronize(self._device)


def faster_half(timed: Sequence[tuple[float, Any]]) -> list[tuple[float, Any]]:
    """Return the faster half of some steps, at least one."""
    return sorted(timed, key=lambda one: one[0])[: max(1, (len(timed) + 1) // 2)]


def memory_at_peak(
    ledger: Ledger, trace: Mapping[str, Any], device: torch.device, measured: int | None, reserved: int | None
) -> Memory:
    """Return what holds the peak of memory, from the blocks of the allocator.

    Args:
        measured: peak bytes of a GPU's allocator, which also has blocks of before; None on a CPU.
        reserved: bytes that it holds; None on a CPU.
    """
    return ledger.memory_of(*blocks_at_peak(trace, device), measured, reserved)


def blocks_at_peak(trace: Mapping[str, Any], device: torch.device) -> tuple[list[Block], int]:
    """Return the blocks of an allocator that are in use at its peak after the mark `BEGIN`, and the time of it.

    Args:
        trace: of torch.profiler with `profile_memory`.
        device: whose allocator counts; a GPU has its index.
    """
    events = trace["traceEvents"]
    base = int(trace.get("baseTimeNanoseconds", 0))
    begin = next((float(event["ts"]) for event in events if event.get("name") == BEGIN), 0.0)
    number = None if device.type == "cpu" else device.index
    changes = sorted(
        (
            event
            for event in events
            if event.get("name") == "[memory]"
            and event["args"].get("Device Type") == DEVICE_TYPES[device.type]
            and number in (None, event["args"].get("Device Id"))
        ),
        key=lambda event: float(event["ts"]),
    )
    used: dict[int, tuple[int, float]] = {}
    level = highest = 0
    peak: dict[int, tuple[int, float]] = {}
    at = begin
    for event in changes:
        size, address, when = int(event["args"]["Bytes"]), int(event["args"]["Addr"]), float(event["ts"])
        level += size
        if size > 0:
            used[address] = size, when
        else:
            used.pop(address, None)
        if when >= begin and (level > highest or not peak):
            highest, peak, at = level, dict(used), when
    again = defaultdict(list)
    for event in changes:
        if int(event["args"]["Bytes"]) > 0:
            again[int(event["args"]["Addr"])].append(float(event["ts"]))
    operations = sorted(
        (
            (float(event["ts"]), float(event["ts"]) + float(event["dur"]), str(event["name"]))
            for event in events
            if event.get("cat") == "cpu_op" and "dur" in event
        ),
    )
    found = [
        Block(
            address,
            size,
            base + int(1000 * when),
            base + 1000 * min((later for later in again[address] if later > when), default=math.inf),
            _outermost(operations, when),
        )
        for address, (size, when) in peak.items()
    ]
    return found, base + int(1000 * at)


def _outermost(operations: Sequence[tuple[float, float, str]], when: float) -> str:
    """Return the operation of a trace that runs at a time, without the nodes of autograd around it."""
    last = bisect.bisect_right(operations, (when, math.inf, ""))
    for begin, end, name in operations[max(0, last - MAX_NESTED) : last]:
        if begin <= when <= end and name.startswith(("aten::", "mkldnn", "torch")):
            return name.removeprefix("aten::")
    return "code outside of operations"


def _events_of(profiler: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="ampcompare-trace-") as folder:
        path = Path(folder) / RunFile.TRACE
        profiler.export_chrome_trace(str(path))
        read: dict[str, Any] = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    return read
