"""From what was measured to the profile of an arm: plain data, scaled to the steps without a profiler."""

from __future__ import annotations

from collections import defaultdict

from ampcompare.profiling.step_profiler import Measured
from ampcompare.profiling.trace import Account
from ampcompare.profiling.watch import Seen, missed_sizes, repeated_casts
from ampcompare.records.profile import (
    ArmProfile,
    Communication,
    Layer,
    Limits,
    Operation,
    Part,
    Phase,
    Product,
    Repeated,
    Sync,
    WorkKind,
)

__all__ = ["build_profile"]

MAX_OPERATIONS = 20
MAX_LAYERS = 12
MAX_PRODUCTS = 12
MAX_SYNCS = 8
MIN_PHASE = 0.02  # of the step: below it a phase that the profiler did not see is not worth a part
LEAST_SHARE = 1e-4


def build_profile(arm: str, measured: Measured, **facts: object) -> ArmProfile:
    """Return the profile of an arm without reasons, limits of the device and trials.

    Args:
        facts: further fields of the profile.
    """
    account = measured.account
    steps = max(1, account.steps)
    factors = _factors(measured)
    seen = measured.seen
    communication = None
    if account.collectives:
        whole = measured.step_seconds * steps / account.seconds if account.seconds else 1.0
        communication = Communication(
            seconds=account.communication / steps * whole,
            exposed_seconds=min(account.exposed, account.communication) / steps * whole,
            calls=account.collectives / steps,
        )
    return ArmProfile(
        arm=arm,
        seconds=measured.step_seconds,
        profiled_seconds=account.seconds / steps,
        steps=[len(measured.seconds), account.steps],
        parts=_parts(measured, factors),
        operations=_operations(account, factors),
        layers=_layers(account, measured, seen),
        products=[] if seen is None else _products(seen),
        syncs=[] if seen is None else _syncs(seen, account),
        repeated=[]
        if seen is None
        else [
            Repeated(where=where, module=module, casts=count, bytes=size)
            for where, module, count, size in repeated_casts(seen)[:MAX_SYNCS]
        ],
        memory=measured.memory,
        limits=None
        if seen is None
        else Limits(
            flops=seen.flops,
            flops_by_dtype={name: float(count) for name, count in seen.mixed.items()},
            bytes=seen.bytes,
            cast_bytes=seen.cast_bytes,
        ),
        communication=communication,
        fp32_seconds=_fp32_seconds(account, factors),
        formats={} if seen is None else dict(seen.convolutions),
        optimizer_operations=0 if seen is None else seen.optimizer_operations,
        conv_kernels=sorted(account.conv_kernels)[:MAX_OPERATIONS],
        notes=list(measured.notes),
        **facts,
    )


def _factors(measured: Measured) -> dict[Phase, float]:
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
    return {phase: measured.phases.get(phase, 0.0) / seconds for phase, seconds in seen.items() if seconds > 0}


def _parts(measured: Measured, factors: dict[Phase, float]) -> list[Part]:
    account, steps = measured.account, max(1, measured.account.steps)
    found: dict[tuple[Phase, WorkKind], float] = defaultdict(float)
    for key, seconds in account.parts.items():
        found[key] += max(0.0, seconds) * factors.get(key[0], 0.0)
    if not account.is_gpu:
        for phase, seconds in measured.phases.items():
            if phase not in factors:  # no operation of it was seen
                found[phase, "host"] += seconds
    return [
        Part(phase=phase, kind=kind, seconds=seconds, calls=account.calls.get((phase, kind), 0) / steps)
        for (phase, kind), seconds in sorted(found.items(), key=lambda one: -one[1])
        if seconds > 0
    ]


def _fp32_seconds(account: Account, factors: dict[Phase, float]) -> float:
    return sum(
        max(0.0, one.seconds) * factors.get(phase, 0.0)
        for (_, phase, kind, dtype), one in account.operations.items()
        if phase in ("forward", "backward") and dtype == "fp32" and kind not in ("cast", "copy", "emulation")
    )


def _operations(account: Account, factors: dict[Phase, float]) -> list[Operation]:
    steps = max(1, account.steps)
    rows = [
        Operation(
            name=name,
            phase=phase,
            kind=kind,
            dtype=dtype,
            calls=one.calls / steps,
            seconds=max(0.0, one.seconds) * factors.get(phase, 0.0),
        )
        for (name, phase, kind, dtype), one in account.operations.items()
        if kind != "host"
    ]
    return sorted(rows, key=lambda row: -row.seconds)[:MAX_OPERATIONS]


def _layers(account: Account, measured: Measured, seen: Seen | None) -> list[Layer]:
    steps = max(1, account.steps)
    whole = measured.step_seconds / (account.seconds / steps) if account.seconds else 0.0
    rows = [
        Layer(
            module=name,
            seconds=max(0.0, one.seconds) / steps * whole,
            fp32_seconds=max(0.0, one.fp32_seconds) / steps * whole,
            cast_seconds=max(0.0, one.cast_seconds) / steps * whole,
            flops=0.0 if seen is None else float(seen.layer_flops.get(name, 0)),
        )
        for name, one in account.layers.items()
    ]
    return sorted(rows, key=lambda row: -row.seconds)[:MAX_LAYERS]


def _products(seen: Seen) -> list[Product]:
    forward = sum(seen.products.values())
    rows: dict[tuple[str, str, str, tuple[str, ...]], float] = defaultdict(float)
    for shape, flops in seen.products.items():
        missed = missed_sizes(shape)
        if missed:
            rows[shape.module, shape.operation, shape.dtype, tuple(missed)] += flops / forward
    found = [
        Product(module=module, operation=operation, dtype=dtype, sizes=list(sizes), share=share)
        for (module, operation, dtype, sizes), share in rows.items()
        if share > LEAST_SHARE
    ]
    return sorted(found, key=lambda one: -one.share)[:MAX_PRODUCTS]


def _syncs(seen: Seen, account: Account) -> list[Sync]:
    """Return the places that read the device; the time that the host waited is spread over them by their calls."""
    steps = max(1, account.steps)
    names = {"item": ("aten::_local_scalar_dense", "aten::item"), "nonzero": ("aten::nonzero",)}
    calls: dict[str, int] = defaultdict(int)
    for (_, what), count in seen.syncs.items():
        calls[what] += count
    waited = {
        what: sum(account.waits.get(name, 0.0) for name in names.get(what, ("aten::copy_", "aten::_to_copy"))) / steps
        for what in calls
    }
    if not account.is_gpu:
        reads = sum(seconds for (_, kind), seconds in account.parts.items() if kind == "sync") / steps
        waited["item" if "item" in waited else "print"] = reads
    rows = [
        Sync(where=where, what=what, calls=count, seconds=waited[what] * count / calls[what])
        for (where, what), count in seen.syncs.items()
    ]
    return sorted(rows, key=lambda row: -row.calls)[:MAX_SYNCS]
