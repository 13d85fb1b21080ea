"""One run of a loop under an arm, profiled."""

import csv
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import torch
from torch.optim import Optimizer

from ampcompare.backends.arm import Arm
from ampcompare.base.errors import ConfigError
from ampcompare.base.tensors.products import dtype_name
from ampcompare.base.tensors.tf32 import Tf32Switches
from ampcompare.diagnosis.loops import LoopConditions, arm_precision_isolated
from ampcompare.diagnosis.profiling.operation_counter import (
    OperationCounts,
    repeated_casts_by_line,
    sizes_unfit_for_tensor_cores,
)
from ampcompare.diagnosis.profiling.step_profiler import MeasuredSteps, StepCounts, StepProfiler
from ampcompare.diagnosis.profiling.trace import TraceTotals
from ampcompare.diagnosis.watched_precision import StepsDone, WatchedPrecision
from ampcompare.results.records.profile import (
    ArmProfile,
    DeviceUtilization,
    HostRead,
    ModuleTime,
    Operation,
    Phase,
    RepeatedCast,
    StepPart,
    UnalignedProduct,
    WorkKind,
)
from ampcompare.settings.config import RunConfig
from ampcompare.training.precision.base import Precision, StepOutcome, owned_params
from ampcompare.training.precision.cpu_half import choose_cpu_half_mode_and_context
from ampcompare.training.process.device import resolve_device, synchronize_device

MAX_OPERATIONS = 20
MAX_LAYERS = 12
MAX_PRODUCTS = 12
MAX_SYNCS = 8
LEAST_SHARE = 1e-4
SIZE = 512  # of the matrices on a CPU
GPU_SIZE = 8192
COPY_BYTES = 64 * 2**20
REPEATS = 5
TYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class ProfiledPrecision(WatchedPrecision):
    """Ends a step after `step`; or where the next batch is asked for, if the loop takes its batches from `batches`."""

    def __init__(self, inner: Precision, profiler: StepProfiler) -> None:
        super().__init__(inner, profiler)
        self._profiler = profiler
        self._has_batches = False

    def time_batches(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield batches, with the time that each takes as the phase "data"; a step begins with each."""
        self._has_batches = True
        for batch in self._profiler.marks.time_batches(batches):
            yield batch
            self._end_step()

    def step(self, *optimizers: Optimizer) -> StepOutcome:
        outcome = self.inner.step(*optimizers)
        self._profiler.marks.begin_phase("other")
        if not self._has_batches:
            self._end_step()
        return outcome

    def _end_step(self) -> None:
        self._profiler.end_step()
        if self._profiler.is_over:
            raise StepsDone


Loop = Callable[[ProfiledPrecision], Any]


def train_loop_under_step_profiler(
    loop: Loop,
    arm: Arm,
    steps: StepCounts,
    device: torch.device,
    *,
    half: str = "auto",
    lists: str = "cuda",
    seed: int = 0,
) -> tuple[StepProfiler, torch.dtype | None, str | None]:
    """Train a loop until all steps are made; return what measured them, the 16-bit type, and how that was computed."""
    profiler = StepProfiler(steps, device)
    conditions = LoopConditions(device=str(device), half=half, lists=lists, seed=seed)
    with (
        arm_precision_isolated(arm, conditions, profiler.place_memory_ledger_beneath_emulation) as precision,
        closing(profiler),
        suppress(StepsDone),
    ):
        loop(ProfiledPrecision(precision, profiler))
    mode, _ = choose_cpu_half_mode_and_context(half, precision.half_dtype, device)
    return profiler, precision.half_dtype, mode


def profile_from_steps(
    arm: Arm, profiler: StepProfiler, half_dtype: torch.dtype | None, mode: str | None
) -> ArmProfile:
    """Return the profile of an arm from what its steps showed, with the peaks of the device where they are known.

    Args:
        arm: that was profiled.
        profiler: behind its last step.
        half_dtype: the 16-bit type in which the arm computes; None in fp32.
        mode: how 16 bits are computed, as "fp16 emulated"; None on a GPU.
    """
    measured, device = profiler.measured, profiler.device
    half = "" if half_dtype is None else dtype_name(half_dtype)
    profile = profile_from_measured(
        str(arm),
        measured,
        device=device_name(device),
        half_dtype=half,
        half=mode or "",
        optimizer=", ".join(dict.fromkeys(map(optimizer_name_and_kind, profiler.marks.optimizers))),
    )
    if profile.limits is None:
        return profile
    dtype = half or ("tf32" if device.type == "cuda" and _has_tf32_on() else "fp32")
    peak = _peak_rates_of_device(device, dtype, emulated=bool(profile.emulated_dtype))
    limits = profile.limits.model_copy(
        update={
            "peak_flops": peak.flops,
            "peak_bytes": peak.bytes,
            "peak_dtype": dtype,
            "source": peak.source,
        }
    )
    return profile.model_copy(update={"limits": limits})


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def optimizer_name_and_kind(optimizer: Any) -> str:
    """Return the class of an optimizer and how it steps, as in "Adam (for-loop)"."""
    defaults = getattr(optimizer, "defaults", {})
    how = ""
    if defaults.get("fused"):
        how = "fused"
    elif defaults.get("foreach"):
        how = "foreach"
    elif "foreach" in defaults:
        params = owned_params(optimizer)
        on_gpu = bool(params) and all(param.device.type in ("cuda", "xpu") for param in params)
        how = "foreach" if on_gpu and defaults.get("foreach") is None else "for-loop"
    return f"{type(optimizer).__name__}{f' ({how})' if how else ''}"


def _has_tf32_on() -> bool:
    if torch.version.hip is not None:
        return False
    switches = Tf32Switches.read()
    return torch.cuda.get_device_capability()[0] >= 8 and "tf32" in (switches.products, switches.convolutions)


def profile_from_measured(arm: str, measured: MeasuredSteps, **facts: object) -> ArmProfile:
    """Return the profile of an arm without reasons, limits of the device and trials; `facts` are further fields."""
    account, counts = measured.account, measured.counts
    factors = _seconds_per_traced_second(measured)
    whole = measured.step_seconds / account.seconds if account.seconds else 0.0
    found: dict[str, Any] = {
        "seconds": measured.step_seconds,
        "parts": _parts_of_step(measured, factors),
        "operations": _longest_operations(account, factors),
        "layers": [
            ModuleTime(
                module=name, seconds=seconds * whole, fp32_seconds=account.fp32_layers.get(name, 0.0) * whole
            )
            for name, seconds in sorted(account.layers.items(), key=lambda one: -one[1])[:MAX_LAYERS]
        ],
        "memory": measured.memory,
        "fp32_seconds": _seconds_in_fp32(account, factors),
    }
    if counts is not None:
        found |= {
            "products": _products_too_odd_for_tensor_cores(counts),
            "syncs": _host_read_places(counts, account),
            "repeated": [
                RepeatedCast(where=where, module=module, casts=count, bytes=size)
                for where, module, count, size in repeated_casts_by_line(counts)[:MAX_SYNCS]
            ],
            "limits": DeviceUtilization(flops=counts.flops, bytes=counts.bytes, cast_bytes=counts.cast_bytes),
            "optimizer_operations": counts.optimizer_operations,
        }
    return ArmProfile(arm=arm, **found, **facts)


def _seconds_per_traced_second(measured: MeasuredSteps) -> dict[Phase, float]:
    """Return for each phase the seconds of a step without the profiler for each second in the trace.

    The host's times are those of the phases themselves: the profiler slows each phase by the number of its
    operations. A device works at its own pace: there the whole step is scaled.
    """
    account = measured.account
    seen: dict[Phase, float] = defaultdict(float)
    for (phase, _), seconds in account.parts.items():
        seen[phase] += seconds
    total = sum(seen.values())
    if account.is_gpu:
        return dict.fromkeys(seen, measured.step_seconds / total if total else 0.0)
    return {
        phase: measured.phases.get(phase, 0.0) / seconds for phase, seconds in seen.items() if seconds > 0
    }


def _parts_of_step(measured: MeasuredSteps, factors: dict[Phase, float]) -> list[StepPart]:
    account = measured.account
    found: dict[tuple[Phase, WorkKind], float] = defaultdict(float)
    for key, seconds in account.parts.items():
        found[key] += max(0.0, seconds) * factors.get(key[0], 0.0)
    if not account.is_gpu:
        for phase, seconds in measured.phases.items():
            if phase not in factors:  # no operation of it was seen
                found[phase, "host"] += seconds
    return [
        StepPart(phase=phase, kind=kind, seconds=seconds)
        for (phase, kind), seconds in sorted(found.items(), key=lambda one: -one[1])
        if seconds > 0
    ]


def _seconds_in_fp32(account: TraceTotals, factors: dict[Phase, float]) -> float:
    return sum(
        max(0.0, seconds) * factors.get(phase, 0.0)
        for (_, phase, kind, dtype), seconds in account.operations.items()
        if phase in ("forward", "backward") and dtype == "fp32" and kind not in ("cast", "copy", "emulation")
    )


def _longest_operations(account: TraceTotals, factors: dict[Phase, float]) -> list[Operation]:
    rows = [
        Operation(
            name=name,
            phase=phase,
            kind=kind,
            dtype=dtype,
            seconds=max(0.0, seconds) * factors.get(phase, 0.0),
        )
        for (name, phase, kind, dtype), seconds in account.operations.items()
        if kind != "host"
    ]
    return sorted(rows, key=lambda row: -row.seconds)[:MAX_OPERATIONS]


def _products_too_odd_for_tensor_cores(counts: OperationCounts) -> list[UnalignedProduct]:
    forward = sum(counts.products.values())
    rows: dict[tuple[str, str, str, tuple[str, ...]], float] = defaultdict(float)
    for shape, flops in counts.products.items():
        missed = sizes_unfit_for_tensor_cores(shape)
        if missed:
            rows[shape.module, shape.operation, shape.dtype, tuple(missed)] += flops / forward
    found = [
        UnalignedProduct(module=module, operation=operation, dtype=dtype, sizes=list(sizes), share=share)
        for (module, operation, dtype, sizes), share in rows.items()
        if share > LEAST_SHARE
    ]
    return sorted(found, key=lambda one: -one.share)[:MAX_PRODUCTS]


def _host_read_places(counts: OperationCounts, account: TraceTotals) -> list[HostRead]:
    """Return the places that read the device; the time that the host waited is spread over them by their calls."""
    steps = max(1, account.steps)
    names = {"item": ("aten::_local_scalar_dense", "aten::item"), "nonzero": ("aten::nonzero",)}
    calls: dict[str, int] = defaultdict(int)
    for (_, what), count in counts.syncs.items():
        calls[what] += count
    waited = {
        what: sum(account.waits.get(name, 0.0) for name in names.get(what, ("aten::copy_", "aten::_to_copy")))
        / steps
        for what in calls
    }
    if not account.is_gpu:
        reads = sum(seconds for (_, kind), seconds in account.parts.items() if kind == "sync") / steps
        waited["item" if "item" in waited else "print"] = reads
    rows = [
        HostRead(
            where=where,
            what=what,
            calls=count / counts.sync_steps[where, what],
            seconds=waited[what] * count / calls[what],
            steps=counts.sync_steps[where, what],
            watched=counts.steps,
        )
        for (where, what), count in counts.syncs.items()
    ]
    return sorted(rows, key=lambda row: (-row.steps, -row.calls))[:MAX_SYNCS]


@dataclass(frozen=True)
class _DevicePeakRates:
    """FLOPs and bytes per second of a device for a type; None where unknown."""

    flops: float | None
    bytes: float | None
    source: str


@cache
def _rows_of_data_sheet_peaks() -> list[dict[str, str]]:
    text = (files("ampcompare.diagnosis.profiling") / "data" / "peaks.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def find_peak_rates_in_table(device_name: str, dtype: str) -> _DevicePeakRates | None:
    """Return the peak of the data sheet; the first row whose name is in that of the device counts.

    A name stands alone: "L4" is not in "NVIDIA L40S". A row without figures is a device that is none of those below it.
    """
    for row in _rows_of_data_sheet_peaks():
        if re.search(rf"(?<![A-Za-z0-9]){re.escape(row['name'])}(?![A-Za-z0-9])", device_name):
            if not row.get(dtype):
                return None
            return _DevicePeakRates(
                1e12 * float(row[dtype]), 1e9 * float(row["gigabytes_per_second"]), row["source"]
            )
    return None


def _peak_rates_of_device(device: torch.device, dtype: str, *, emulated: bool = False) -> _DevicePeakRates:
    """Return the peak of a device for a type such as "bf16"; measured (in fp32 if emulated) without a data sheet."""
    if device.type == "cuda":
        known = find_peak_rates_in_table(torch.cuda.get_device_name(device), dtype)
        if known is not None:
            return known
    return measure_peak_rates_of_device(device, "fp32" if emulated else dtype)


@cache
def measure_peak_rates_of_device(device: torch.device, dtype: str) -> _DevicePeakRates:
    """Measure the fastest of some square products, and of some copies."""
    kind = TYPES.get(dtype)
    if kind is None:
        return _DevicePeakRates(None, None, "")
    size = SIZE if kind is torch.float32 else SIZE // 2
    if device.type != "cpu":
        size = GPU_SIZE
    left = torch.ones(size, size, dtype=kind, device=device)
    source = torch.ones(COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    products = _measure_fastest_call_seconds(lambda: torch.mm(left, left), device)
    copies = _measure_fastest_call_seconds(lambda: target.copy_(source), device)
    return _DevicePeakRates(
        2 * size**3 / products, 2 * COPY_BYTES / copies, f"measured here: {dtype} products of {size}, copies"
    )


def _measure_fastest_call_seconds(call: Callable[[], object], device: torch.device) -> float:
    best = float("inf")
    with torch.no_grad():
        for _ in range(REPEATS):
            synchronize_device(device)
            begin = time.perf_counter()
            call()
            synchronize_device(device)
            best = min(best, time.perf_counter() - begin)
    return max(best, 1e-9)


def profile_and_trace_of_loop(
    loop: Loop, config: RunConfig, *, steps: int, profiled: int
) -> tuple[ArmProfile, dict[str, Any]]:
    """Train a loop under the arm of a configuration, and return its profile and trace.

    Args:
        loop: what trains; it is called with the arm's precision.
        config: for arm, device, seed, and how 16-bit types are computed on a CPU.
        steps: that are timed.
        profiled: further steps under torch's profiler.

    Raises:
        ConfigError: it made fewer steps than a profile needs.
    """
    arm, device = config.parsed_arm, resolve_device(config.device)
    wanted = StepCounts(timed=steps, profiled=profiled)
    found = train_loop_under_step_profiler(
        loop, arm, wanted, device, half=config.cpu_half, lists=config.autocast_lists, seed=config.recipe.seed
    )
    measured = found[0].measured
    if not measured.account.steps:
        raise ConfigError(
            f"the loop made {measured.steps} steps, but a profile needs {wanted.total - wanted.watched + 1}: "
            f"{wanted.warmup} to warm up, "
            f"{wanted.timed} timed, {wanted.profiled} under the profiler, and three that are counted"
        )
    return profile_from_steps(arm, *found), measured.trace
