"""Why an arm is not faster, or not smaller: rules over what was measured, each with its evidence. Needs no torch.

A rule gives a reason only from figures of this profile. What costs nothing on a CPU but makes a GPU wait, or keeps it
from its tensor cores, is counted here and marked `on_gpu`.
"""

from collections.abc import Callable, Iterator, Sequence

from ampcompare.base.formatting import MIB
from ampcompare.diagnosis.profiling.trace import has_at_most_16_bits
from ampcompare.results.records.profile import ArmProfile, HostRead, ReasonForLittleGain, TimedChange

# Shares of a step, or of a peak of memory, from which a part of it is a reason.
DATA = 0.15
HOST = 0.35
SYNC = 0.05
DIMENSIONS = 0.10
WIDE = 0.25
CASTS = 0.10
MOVED = 0.40  # by casts, of all bytes
REPEATED = 0.05
OPTIMIZER = 0.20
TWICE = 0.05
TRIED = 0.05  # what a trial must save
SMALL_BATCH = 0.25
FASTER = 1.05
MAX_EVIDENCE = 5
BATCH = "--batch-size"
Rule = Callable[[ArmProfile, ArmProfile], Iterator[ReasonForLittleGain]]


def reasons_of_profile(arm: ArmProfile, reference: ArmProfile) -> list[ReasonForLittleGain]:
    """Return the reasons of an arm: those of this device first, the largest first."""
    if arm.failure or not arm.seconds:
        return []
    found = [reason for rule in RULES for reason in rule(arm, reference)]
    return sorted(found, key=lambda one: (one.kind == "emulation", one.on_gpu, -one.share))


def seconds_without_emulation(arm: ArmProfile) -> float:
    """Return the seconds of a step without what emulates 16 bits on a CPU."""
    return max(1e-12, arm.seconds - arm.seconds_of_kind("emulation"))


def percent_text(share: float) -> str:
    return f"{100 * share:.0f} %"


def _mib_text(size: float) -> str:
    return f"{size / MIB:.1f} MiB"


def _share_of_step(seconds: float, arm: ArmProfile) -> float:
    return seconds / seconds_without_emulation(arm)


def _share_of_phase(arm: ArmProfile, phase: str) -> float:
    """Return the share of a phase in the step, both without what emulates 16 bits, or a GPU, on a CPU."""
    return _share_of_step(
        sum(one.seconds for one in arm.parts if one.phase == phase and one.kind != "emulation"), arm
    )


def _find_trial_that_saves_most(
    arm: ArmProfile, change: str, min_saved_share: float = TRIED
) -> TimedChange | None:
    """Return the trial of a kind of change that saves most, if it saves enough."""
    tried = [one for one in arm.trials if not one.failure and one.change.startswith(change)]
    best = max(tried, key=lambda one: one.saved_share, default=None)
    return best if best is not None and best.saved_share >= min_saved_share else None


def _saved_share_text(trial: TimedChange | None) -> str:
    return (
        ""
        if trial is None
        else f"{trial.change} saves {percent_text(trial.saved_share)} of the step (tested)"
    )


def _data_loading_reasons(arm: ArmProfile, _: ArmProfile) -> Iterator[ReasonForLittleGain]:
    share = _share_of_phase(arm, "data")
    if share >= DATA:
        trial = _find_trial_that_saves_most(arm, "--workers")
        yield ReasonForLittleGain(
            kind="data",
            text=f"{percent_text(share)} of the step waits for the next batch",
            share=share,
            gain=_saved_share_text(trial)
            or f"up to {percent_text(share)}: load ahead in workers, or do less for each sample",
            tested=trial is not None,
        )


def _host_bound_reasons(arm: ArmProfile, _: ArmProfile) -> Iterator[ReasonForLittleGain]:
    is_gpu = arm.device != "cpu"
    others = ("data", "optimizer")  # which have reasons of their own
    seconds = sum(part.seconds for part in arm.parts if part.kind == "host" and part.phase not in others)
    share = _share_of_step(seconds, arm)
    if share < HOST or arm.emulated_dtype:  # an emulation runs on the host too
        return
    phases = sorted(
        (
            (part.seconds, part.phase)
            for part in arm.parts
            if part.kind == "host" and part.phase not in others
        ),
        reverse=True,
    )
    what = "the device waits for the host" if is_gpu else "the host runs code outside of any operation"
    yield ReasonForLittleGain(
        kind="host",
        text=f"in {percent_text(share)} of the step {what}, most of it in the phase {phases[0][1]}",
        share=share,
        gain=f"up to {percent_text(share)}: larger batches, --cuda-graph or --compile"
        if is_gpu
        else "fewer and larger operations",
    )


def _larger_batch_reasons(arm: ArmProfile, _: ArmProfile) -> Iterator[ReasonForLittleGain]:
    best = _find_trial_that_saves_most(arm, BATCH, SMALL_BATCH)
    if best is not None:
        yield ReasonForLittleGain(
            kind="small batch",
            text=f"with {best.change} a sample takes {percent_text(best.saved_share)} less time: batches of "
            f"{arm.batch_size} do not fill the device",
            share=best.saved_share,
            gain=f"{percent_text(best.saved_share)} of the time of each sample (tested)",
            tested=True,
        )


def _host_read_reasons(arm: ArmProfile, _: ArmProfile) -> Iterator[ReasonForLittleGain]:
    places = [one for one in arm.syncs if one.what != "overflow check"]
    if not places:
        return
    share = _share_of_step(sum(one.seconds for one in places), arm)
    steps = max(one.steps for one in places)
    most = sorted((one for one in places if one.steps == steps), key=lambda one: -one.calls)
    calls = sum(one.calls for one in most)
    where = next((one.where for one in most if one.where), "")
    at = f"{_steps_of_read_text(most[0])}{f', at {where}' if where else ''}"
    if share >= SYNC:
        text = f"{percent_text(share)} of the step reads values of tensors one by one, {calls:.3g} times {at}"
        gain = f"up to {percent_text(share)}: keep them on the device, and read many at once, every so many steps"
    elif where and arm.device == "cpu":
        values = "value" if calls == 1 else "values"
        text = (
            f"the host reads {calls:.3g} {values} of tensors {at}: nothing on a CPU, but on a GPU it waits there for "
            "all work before"
        )
        gain = ""
    else:
        return
    yield ReasonForLittleGain(
        kind="synchronization",
        text=text,
        share=min(1.0, share),
        gain=gain,
        on_gpu=share < SYNC,
        evidence=[
            f"{one.calls:.3g} of {one.what} at {one.where or 'a line of a library'}, {_steps_of_read_text(one)}"
            for one in places[:MAX_EVIDENCE]
        ],
    )


def _steps_of_read_text(sync: HostRead) -> str:
    """Return in which of the watched steps a place reads."""
    if sync.steps < sync.watched:
        return f"in {sync.steps} of {sync.watched} steps"
    return "in each step" if sync.watched > 1 else "in the step that was watched"


def _odd_dimension_reasons(arm: ArmProfile, _: ArmProfile) -> Iterator[ReasonForLittleGain]:
    share = sum(one.share for one in arm.products)
    if share < DIMENSIONS or not has_at_most_16_bits(arm.half_dtype):
        return
    names = ", ".join(f"{one.module or one.operation} ({', '.join(one.sizes)})" for one in arm.products[:3])
    yield ReasonForLittleGain(
        kind="dimensions",
        text=f"{percent_text(share)} of the FLOPs of the forward pass are in products whose sizes are no multiples "
        f"of 8: {names}",
        share=share,
        gain="sizes that are multiples of 8, or of 64 on recent GPUs, run on tensor cores at full speed",
        on_gpu=arm.device == "cpu",
        evidence=[
            f"{one.module or 'no module'}: {one.operation}, {', '.join(one.sizes)}, "
            f"{percent_text(one.share)} of the FLOPs"
            for one in arm.products[:MAX_EVIDENCE]
        ],
    )


def _fp32_work_reasons(arm: ArmProfile, _: ArmProfile) -> Iterator[ReasonForLittleGain]:
    share = _share_of_step(arm.fp32_seconds, arm)
    if not has_at_most_16_bits(arm.half_dtype) or share < WIDE:
        return
    rows = [
        one
        for one in arm.operations
        if one.dtype == "fp32"
        and one.phase in ("forward", "backward")
        and one.kind not in ("cast", "copy", "emulation")
    ]
    layers = sorted((one for one in arm.layers if one.fp32_seconds), key=lambda one: -one.fp32_seconds)
    where = f", most in {layers[0].module}" if layers and layers[0].module else ""
    yield ReasonForLittleGain(
        kind="fp32 operations",
        text=f"{percent_text(share)} of the step computes in fp32 in the forward and backward pass{where}",
        share=share,
        gain=f"at most {percent_text(share / 2)}, if 16 bits halve it; `ampcompare explain {arm.arm}` lists what "
        "stays in fp32",
        evidence=[
            f"{one.name}, {one.phase} pass: {percent_text(_share_of_step(one.seconds, arm))} of the step"
            for one in rows[:MAX_EVIDENCE]
        ],
    )


def _costly_cast_reasons(arm: ArmProfile, _: ArmProfile) -> Iterator[ReasonForLittleGain]:
    seconds = sum(
        part.seconds for part in arm.parts if part.kind == "cast" and part.phase not in ("optimizer", "data")
    )
    share = _share_of_step(seconds, arm)
    limits = arm.limits
    moved = limits.cast_bytes if limits is not None else 0.0
    total = limits.bytes if limits is not None else 0.0
    again = sum(one.bytes for one in arm.repeated)
    is_repeated = bool(total) and again / total >= REPEATED
    if share < CASTS and not is_repeated and (not total or moved / total < MOVED):
        return
    of_all = moved / total if total else 0.0
    text = (
        f"casts take {percent_text(share)} of the step and move {_mib_text(moved)}, "
        f"{percent_text(of_all)} of all bytes"
    )
    if is_repeated:
        first = arm.repeated[0]
        place = first.where or first.module or "a library"
        text += f"; {_mib_text(again)} of it casts the same tensor again, {first.casts} times at {place}"
    yield ReasonForLittleGain(
        kind="casts",
        text=text,
        share=max(share, again / total if is_repeated else 0.0, of_all if of_all >= MOVED else 0.0),
        gain="cast once, before the loop"
        if is_repeated
        else "keep neighbors in one type; half:... casts no weights",
        evidence=[
            f"{one.casts} casts at {one.where or one.module}, {_mib_text(one.bytes)}"
            for one in arm.repeated[:MAX_EVIDENCE]
        ],
    )


def _slow_optimizer_reasons(arm: ArmProfile, _: ArmProfile) -> Iterator[ReasonForLittleGain]:
    share = _share_of_phase(arm, "optimizer")
    trial = _find_trial_that_saves_most(arm, "--optimizer-implementation")
    if trial is None and (share < OPTIMIZER or "for-loop" not in arm.optimizer or arm.trials):
        return
    if trial is not None and share < TRIED:
        return
    count = f" in {arm.optimizer_operations} operations" if arm.optimizer_operations else ""
    yield ReasonForLittleGain(
        kind="optimizer",
        text=f"{arm.optimizer or 'the optimizer'} takes {percent_text(share)} of the step{count}",
        share=share,
        gain=_saved_share_text(trial) or "try fused=True or foreach=True",
        tested=trial is not None,
    )


def _repeated_work_reasons(arm: ArmProfile, _: ArmProfile) -> Iterator[ReasonForLittleGain]:
    memory = arm.memory
    if memory is None or not memory.measured_bytes:
        return
    share = memory.kept_twice_bytes / memory.measured_bytes
    if share >= TWICE:
        names = ", ".join(one.kind or "outside of submodules" for one in memory.kept_twice[:3])
        yield ReasonForLittleGain(
            kind="kept twice",
            text=f"{_mib_text(memory.kept_twice_bytes)} of activations, {percent_text(share)} of the peak of memory, "
            f"are kept in two types: {names}",
            share=share,
            gain=f"{_mib_text(memory.kept_twice_bytes)} of memory: let both operations read one type",
            evidence=[
                f"{one.kind or 'outside of submodules'}: {_mib_text(one.bytes)} in {one.dtype}"
                for one in memory.kept_twice
            ],
        )


def _graph_break_reasons(arm: ArmProfile, reference: ArmProfile) -> Iterator[ReasonForLittleGain]:
    breaks = arm.graph_breaks or {}
    count, before = sum(breaks.values()), sum((reference.graph_breaks or {}).values())
    if count and (count > before or arm.arm == reference.arm):
        first = max(breaks, key=lambda name: breaks[name])
        yield ReasonForLittleGain(
            kind="graph breaks",
            text=f"torch.compile breaks the graph {count} times ({before} in the reference): {first}",
            share=0.0,
            gain="code without breaks is compiled whole",
            evidence=[f"{number} of {name}" for name, number in list(breaks.items())[:MAX_EVIDENCE]],
        )


def _emulated_half_reasons(arm: ArmProfile, _: ArmProfile) -> Iterator[ReasonForLittleGain]:
    if arm.emulated_dtype:
        share = arm.seconds_of_kind("emulation") / arm.seconds
        yield ReasonForLittleGain(
            kind="emulation",
            text=f"products of {arm.half_dtype} are computed in fp32 and rounded: its times say nothing about a GPU",
            share=min(1.0, share),
        )


RULES: Sequence[Rule] = (
    _data_loading_reasons,
    _host_bound_reasons,
    _larger_batch_reasons,
    _host_read_reasons,
    _odd_dimension_reasons,
    _fp32_work_reasons,
    _costly_cast_reasons,
    _slow_optimizer_reasons,
    _repeated_work_reasons,
    _graph_break_reasons,
    _emulated_half_reasons,
)


def profiles_with_reasons(arms: Sequence[ArmProfile]) -> list[ArmProfile]:
    return [arm.model_copy(update={"reasons": reasons_of_profile(arm, arms[0])}) for arm in arms]


def headline_of_profiles(arms: Sequence[ArmProfile]) -> list[str]:
    """Return a sentence for each arm: how fast and how large it is next to the first, and its first reason."""
    return [_speed_and_size_sentence(arm, arms[0]) for arm in arms]


def _speed_and_size_sentence(arm: ArmProfile, reference: ArmProfile) -> str:
    if arm.failure:
        return f"{arm.arm} has no profile: {arm.failure}"
    faults = [one for one in arm.reasons if one.kind != "emulation" and not one.on_gpu]
    why = f": {faults[0].text}" if faults else ""
    if arm.arm == reference.arm or not reference.seconds:
        return f"{arm.arm} takes {1000 * arm.seconds:.2f} ms a step{why}"
    memory = _memory_difference_text(arm, reference)
    if arm.emulated_dtype:
        return f"{arm.arm} computes in fp32 and rounds (emulated), so its time is no measure{memory}"
    ratio = f"{arm.seconds / reference.seconds:.2f}x the step time"
    if reference.seconds >= FASTER * arm.seconds:
        still = f"; still, {faults[0].text}" if faults else ""
        return f"{arm.arm} takes {ratio} of {reference.arm}{memory}{still}"
    return f"{arm.arm} is not faster than {reference.arm} ({ratio}{memory.replace('; ', ', ', 1)}){why}"


def _memory_difference_text(arm: ArmProfile, reference: ArmProfile) -> str:
    if arm.memory is None or reference.memory is None or not reference.memory.measured_bytes:
        return ""
    return f"; memory {arm.memory.measured_bytes / reference.memory.measured_bytes:.2f}x"
