"""The report of a profile, before it has a format: sentences, and one step of each arm side by side."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from ampcompare.base.formatting import MIB, printable_line
from ampcompare.results.records.profile import (
    KINDS,
    PHASES,
    ArmProfile,
    DeviceUtilization,
    HeldMemory,
    MemoryAtPeak,
    Profile,
    ReasonForLittleGain,
)
from ampcompare.results.report.document import Block, Document, Figure, Items, Section, Table, Text

MIN_SHARE = 0.001  # of a step: a row is left out where no arm reaches it
MAX_ROWS = 8  # layers and operations of an arm
COLORS = 10  # in report.css
LEAST = 0.004  # of a bar: smaller parts are not drawn


def _milliseconds_text(seconds: float) -> str:
    return f"{1000 * seconds:.3f}" if seconds < 0.01 else f"{1000 * seconds:.2f}"


def _mib_text(size: float) -> str:
    return f"{size / MIB:.2f}"


def _percent_text(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _time_text(seconds: float, arm: ArmProfile) -> str:
    return (
        f"{_milliseconds_text(seconds)} ({100 * seconds / arm.seconds:.0f} %)"
        if seconds and arm.seconds
        else "-"
    )


def _module_text(name: str) -> str:
    return printable_line(name or "outside of submodules", 44, keep_end=16)


def _profile_tables(profile: Profile) -> list[Table]:
    """Return the tables of a profile, with a column for each arm."""
    arms = [arm for arm in profile.arms if not arm.failure]
    names = [printable_line(arm.arm, 40) for arm in arms]
    layers = [[((_module_text(one.module),), one.seconds) for one in arm.layers] for arm in arms]
    operations = [
        [((printable_line(one.name, 44), one.phase, one.dtype or "-"), one.seconds) for one in arm.operations]
        for arm in arms
    ]
    trials = [
        [arm.arm, one.change, one.failure or f"{100 * one.saved_share:+.0f} %"]
        for arm in arms
        for one in arm.trials
    ]
    ranks = [
        [arm.arm, str(rank), _milliseconds_text(seconds)]
        for arm in arms
        for rank, seconds in enumerate(arm.rank_seconds)
    ]
    tables = [
        Table.from_rows(
            ["phase", *names], _step_rows(arms, PHASES, ArmProfile.phase_seconds), "One step, ms"
        ),
        Table.from_rows(
            ["kind", *names],
            _step_rows(arms, KINDS, ArmProfile.seconds_of_kind),
            "The same by kind of work, ms",
        ),
        Table.from_rows(["", *names], _device_limit_rows(arms), "Limits"),
        Table.from_rows(["", *names], _memory_rows(arms), "Memory at the peak of a step, MiB"),
        Table.from_rows(
            ["layer", *names], _rows_of_memory_by_layer_kind(arms), "Activations kept, by layer, MiB"
        ),
        Table.from_rows(
            ["layer", *names], _rows_of_largest_parts(arms, layers), "Layers, forward and backward, ms"
        ),
        Table.from_rows(
            ["operation", "phase", "type", *names], _rows_of_largest_parts(arms, operations), "Operations, ms"
        ),
        Table.from_rows(["arm", "change", "saves of the step"], trials, "Switches that were trained"),
        Table.from_rows(["arm", "rank", "step (ms)"], ranks, "Ranks"),
    ]
    return [table for table in tables if table.rows]


def _step_rows(
    arms: Sequence[ArmProfile], names: Mapping[Any, str], value: Callable[[ArmProfile, str], float]
) -> list[list[str]]:
    rows = []
    for key, title in names.items():
        values = [value(arm, key) for arm in arms]
        if any(seconds >= MIN_SHARE * arm.seconds > 0 for seconds, arm in zip(values, arms, strict=True)):
            rows.append([title, *map(_time_text, values, arms)])
    return [*rows, ["step", *(_milliseconds_text(arm.seconds) for arm in arms)]]


def _device_limit_rows(arms: Sequence[ArmProfile]) -> list[list[str]]:
    rows: dict[str, Callable[[DeviceUtilization, float], str]] = {
        "GFLOP of a step": lambda one, _: f"{one.flops / 1e9:.3g}",
        "MiB read and written": lambda one, _: _mib_text(one.bytes),
        "of it by casts": lambda one, _: _percent_text(one.cast_bytes / one.bytes if one.bytes else None),
        "FLOP for each byte": lambda one, _: f"{one.flops_per_byte or 0:.3g}",
        "GFLOP/s": lambda one, seconds: f"{one.flops / seconds / 1e9:.3g}" if seconds else "-",
        "peak, GFLOP/s": lambda one, _: (
            f"{one.peak_flops / 1e9:.3g} ({one.peak_dtype})" if one.peak_flops else "-"
        ),
        "peak, GB/s": lambda one, _: f"{one.peak_bytes / 1e9:.3g}" if one.peak_bytes else "-",
        "MFU": lambda one, seconds: _percent_text(one.utilization(seconds)),
        "peak from": lambda one, _: one.source,
    }
    if not any(arm.limits for arm in arms):
        return []
    return [
        [title, *("-" if arm.limits is None else text(arm.limits, arm.seconds) for arm in arms)]
        for title, text in rows.items()
    ]


def _memory_rows(arms: Sequence[ArmProfile]) -> list[list[str]]:
    def row_of_memory(title: str, value: Callable[[MemoryAtPeak], float | None]) -> list[str]:
        sizes = [None if arm.memory is None else value(arm.memory) for arm in arms]
        return [title, *("-" if size is None else _mib_text(size) for size in sizes)]

    known = [arm.memory for arm in arms if arm.memory is not None]
    if not known:
        return []
    held = [
        (one.kind, one.dtype)
        for memory in known
        for one in memory.held
        if one.bytes >= MIN_SHARE * memory.measured_bytes
    ]
    rows = [
        row_of_memory(", ".join(filter(None, (kind, dtype))), partial(_bytes_of_kind, kind=kind, dtype=dtype))
        for kind, dtype in dict.fromkeys(held)
    ]
    rows.append(row_of_memory("workspace and others", lambda one: one.rest_bytes))
    rows.append(row_of_memory("peak", lambda one: one.measured_bytes))
    if any(memory.reserved_bytes is not None for memory in known):
        rows.append(row_of_memory("reserved by the allocator", lambda one: one.reserved_bytes))
    return rows


def _bytes_of_kind(memory: MemoryAtPeak, kind: str, dtype: str | None = None) -> int | None:
    """Return the bytes of a kind, and of a type if one is given; None for none."""
    return sum(one.bytes for one in memory.held if one.kind == kind and dtype in (None, one.dtype)) or None


def _rows_of_memory_by_layer_kind(arms: Sequence[ArmProfile]) -> list[list[str]]:
    layers = [[] if arm.memory is None else arm.memory.layers for arm in arms]
    names = list(dict.fromkeys(one.kind for held in layers for one in held))[:MAX_ROWS]

    def sizes_text(held: Sequence[HeldMemory], name: str) -> str:
        sizes = [f"{_mib_text(one.bytes)} {one.dtype}" for one in held if one.kind == name]
        return ", ".join(sizes) or "-"

    return [[_module_text(name), *(sizes_text(held, name) for held in layers)] for name in names]


def _rows_of_largest_parts(
    arms: Sequence[ArmProfile], seconds_by_part_of_arms: Sequence[Sequence[tuple[tuple[str, ...], float]]]
) -> list[list[str]]:
    """Return a row for each of the largest parts of any arm: its names, then its seconds in each arm."""
    seconds: dict[tuple[int, tuple[str, ...]], float] = defaultdict(float)
    for place, parts in enumerate(seconds_by_part_of_arms):
        for key, value in parts:
            seconds[place, key] += value
    keys = dict.fromkeys(key for parts in seconds_by_part_of_arms for key, _ in parts[:MAX_ROWS])
    return [[*key, *(_time_text(seconds[place, key], arm) for place, arm in enumerate(arms))] for key in keys]


def _reason_line(reason: ReasonForLittleGain) -> str:
    """Return a reason with its gain in one line."""
    gain = f"; gain: {reason.gain}" if reason.gain else ""
    place = " [GPU]" if reason.on_gpu else ""
    return printable_line(f"{reason.kind}{place}: {reason.text}{gain}", 1000)


def profile_document(profile: Profile) -> Document:
    """Return the report: sentences, reasons with their evidence, and one step side by side."""
    reasons = [
        Items(
            [(_reason_line(reason), reason.evidence) for reason in arm.reasons],
            f"Reasons, {printable_line(arm.arm, 60)}",
        )
        for arm in profile.arms
        if arm.reasons
    ]
    arms = [arm for arm in profile.arms if not arm.failure]
    # The first arm is the reference, whose time alone answers nothing.
    answer, *rest = [*profile.headline[1:], *profile.headline[:1]] or [""]
    sections = [
        Section("headline", [Text([sentence]) for sentence in profile.headline]),
        Section("reasons", [*reasons]),
        Section("tables", _profile_tables(profile)),
        Section(
            "notes",
            [Items([f"note: {note}" for note in notes])]
            if (notes := _notes_with_open_points(profile))
            else [],
        ),
        Section("further", [Text([sentence]) for sentence in rest]),
        Section("step", lambda: _step_bars("One step by phase", arms, PHASES, ArmProfile.phase_seconds)),
        Section(
            "work", lambda: _step_bars("One step by kind of work", arms, KINDS, ArmProfile.seconds_of_kind)
        ),
        Section("memory", lambda: _memory_bars(arms)),
    ]
    return Document(
        "profile",
        sections,
        profile,
        "Profile",
        printable_line(answer, 600),
        [printable_line(part, 120) for part in (profile.subject, profile.device) if part],
    )


def _notes_with_open_points(profile: Profile) -> list[str]:
    """Return the notes of a profile, with what its figures leave open."""
    notes = list(profile.notes)
    for arm in profile.arms:
        memory = arm.memory
        if memory is not None and abs(memory.rest_bytes) > 0.05 * memory.measured_bytes:
            notes.append(
                f"{arm.arm}: {100 * memory.rest_bytes / memory.measured_bytes:.0f} % of the peak of memory is "
                "workspace of operations, or held by something else than the training"
            )
        if arm.seconds and abs(arm.accounted_seconds - arm.seconds) > 0.03 * arm.seconds:
            notes.append(
                f"{arm.arm}: the parts add up to {100 * arm.accounted_seconds / arm.seconds:.0f} % of the step"
            )
    return notes


def _step_bars(
    title: str,
    arms: Sequence[ArmProfile],
    names: Mapping[Any, str],
    value: Callable[[ArmProfile, str], float],
) -> list[Block]:
    rows = [(arm.arm, arm.seconds, [value(arm, key) for key in names]) for arm in arms]
    return _bar_figure(title, rows, list(names.values()), lambda seconds: f"{_milliseconds_text(seconds)} ms")


def _memory_bars(arms: Sequence[ArmProfile]) -> list[Block]:
    known = [(arm.arm, arm.memory) for arm in arms if arm.memory is not None]
    kinds = list(dict.fromkeys(held.kind for _, memory in known for held in memory.held))
    rows = [
        (
            arm,
            memory.measured_bytes,
            [*(_bytes_of_kind(memory, kind) or 0 for kind in kinds), max(0, memory.rest_bytes)],
        )
        for arm, memory in known
    ]
    return _bar_figure(
        "Peak of memory", rows, [*kinds, "workspace and others"], lambda size: f"{_mib_text(size)} MiB"
    )


def _bar_figure(
    title: str,
    rows: Iterable[tuple[str, float, Sequence[float]]],
    names: Sequence[str],
    format_value: Callable[[float], str],
) -> list[Block]:
    """Return a bar for each row: an arm, its length, and the value of each of the named parts."""
    rows = list(rows)
    longest = max((length for _, length, _ in rows), default=0.0) or 1.0
    bars = [
        {
            "name": printable_line(arm, 30),
            "text": format_value(length),
            "segments": bar_segments(
                names, values, longest, partial(_value_with_percent_text, format_value, length)
            ),
        }
        for arm, length, values in rows
    ]
    key = [(name, index % COLORS) for index, name in enumerate(names)]
    return [Figure("bars", lambda: {"title": title, "bars": bars, "key": key})] if bars else []


def _value_with_percent_text(format_value: Callable[[float], str], length: float, value: float) -> str:
    return f"{format_value(value)}, {100 * value / (length or 1):.0f} %"


def bar_segments(
    names: Sequence[str], values: Sequence[float], longest: float, format_value: Callable[[float], str]
) -> list[tuple[float, float, int, str]]:
    """Return the parts of a bar: start and width in percent of the longest bar, a color, and a text."""
    at, found = 0.0, []
    for index, (name, value) in enumerate(zip(names, values, strict=True)):
        if value / longest >= LEAST:
            start, width = round(100 * at / longest, 3), round(100 * value / longest, 3)
            found.append((start, width, index % COLORS, f"{name}: {format_value(value)}"))
        at += max(0.0, value)
    return found
