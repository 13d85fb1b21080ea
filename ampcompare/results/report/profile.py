"""The report of a profile, before it has a format: sentences, and one step of each arm side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ampcompare.base.formatting import printable
from ampcompare.results.records.profile import KINDS, PHASES, ArmProfile, Limits, Profile, Reason, Trial
from ampcompare.results.report.document import Block, Document, Figure, Items, Section, Table, Text

__all__ = ["COLORS", "Bar", "Bars", "memory_sentences", "profile_document", "segments_of"]

MIN_SHARE = 0.001  # of a step: a row is left out where no arm reaches it
MAX_LAYERS = 8
MAX_OPERATIONS = 8
MIN_CHANGE = 0.01  # of the peak of memory
WIDTH, HEIGHT = 700.0, 260.0
COLORS = 10  # in report.css
LEAST = 0.004  # of a bar: smaller parts are not drawn


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3f}" if seconds < 0.01 else f"{1000 * seconds:.2f}"


def _mib(size: float | None) -> str:
    return "-" if size is None else f"{size / 2**20:.2f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _cell(seconds: float, arm: ArmProfile) -> str:
    return f"{_milliseconds(seconds)} ({100 * seconds / arm.seconds:.0f} %)" if seconds and arm.seconds else "-"


def _tables(profile: Profile) -> list[Table]:
    """Return the tables of a profile, with a column for each arm."""
    arms = [arm for arm in profile.arms if not arm.failure]
    names = [printable(arm.arm, 40) for arm in arms]
    tables = [
        Table.of(["phase", *names], _rows_of(arms, PHASES, lambda arm, key: arm.of_phase(key)), "One step, ms"),
        Table.of(
            ["kind", *names],
            _rows_of(arms, KINDS, lambda arm, key: arm.of_kind(key)),
            "The same by kind of work, ms",
        ),
        Table.of(["", *names], _limits(arms), "Limits"),
    ]
    if any(arm.memory for arm in arms):
        tables.append(Table.of(["", *names], _memory(arms), "Memory at the peak of a step, MiB"))
        tables.append(Table.of(["layer", *names], _kept_rows(arms), "Activations kept, by layer, MiB"))
    tables.append(Table.of(["layer", *names], _layers(arms), "Layers, forward and backward, ms"))
    tables.append(Table.of(["operation", "phase", "type", *names], _operations(arms), "Operations, ms"))
    trials = [[arm.arm, one.change, one.failure or f"{100 * one.gain:+.0f} %"] for arm in arms for one in arm.trials]
    if trials:
        tables.append(Table.of(["arm", "change", "saves of the step"], trials, "Switches that were trained"))
    ranks = [
        [
            arm.arm,
            str(rank.rank),
            _milliseconds(rank.seconds),
            "-" if rank.communication is None else _milliseconds(rank.communication.seconds),
            "-" if rank.communication is None else _percent(rank.communication.overlap_share),
        ]
        for arm in arms
        for rank in arm.ranks
    ]
    if ranks:
        tables.append(Table.of(["arm", "rank", "step (ms)", "communication (ms)", "hidden"], ranks, "Ranks"))
    return [table for table in tables if table.rows]


def _rows_of(
    arms: Sequence[ArmProfile], names: Mapping[Any, str], value: Callable[[ArmProfile, str], float]
) -> list[list[str]]:
    rows = []
    for key, title in names.items():
        values = [value(arm, key) for arm in arms]
        if any(seconds >= MIN_SHARE * arm.seconds > 0 for seconds, arm in zip(values, arms, strict=True)):
            rows.append([title, *(_cell(seconds, arm) for seconds, arm in zip(values, arms, strict=True))])
    rows.append(["step", *(_milliseconds(arm.seconds) for arm in arms)])
    return rows


def _limits(arms: Sequence[ArmProfile]) -> list[list[str]]:
    def row(title: str, value: Callable[[Limits, ArmProfile], str]) -> list[str]:
        return [title, *("-" if arm.limits is None else value(arm.limits, arm) for arm in arms)]

    if not any(arm.limits for arm in arms):
        return []
    return [
        row("GFLOP of a step", lambda one, _: f"{one.flops / 1e9:.3g}"),
        row("MiB read and written", lambda one, _: _mib(one.bytes)),
        row("of it by casts", lambda one, _: _percent(one.cast_bytes / one.bytes if one.bytes else None)),
        row("FLOP for each byte", lambda one, _: f"{one.intensity or 0:.3g}"),
        row("GFLOP/s", lambda one, arm: f"{one.flops / arm.seconds / 1e9:.3g}" if arm.seconds else "-"),
        row("peak, GFLOP/s", lambda one, _: f"{one.peak_flops / 1e9:.3g}" if one.peak_flops else "-"),
        row("MFU", lambda one, arm: _percent(one.utilization(arm.seconds))),
        row("peak from", lambda one, _: one.source),
    ]


def _memory(arms: Sequence[ArmProfile]) -> list[list[str]]:
    keys = list(
        dict.fromkeys((held.kind, held.dtype) for arm in arms if arm.memory is not None for held in arm.memory.held)
    )
    rows = []
    for kind, dtype in keys:
        sizes = [
            None
            if arm.memory is None
            else sum(held.bytes for held in arm.memory.held if (held.kind, held.dtype) == (kind, dtype))
            for arm in arms
        ]
        if any(
            size and arm.memory and size >= MIN_SHARE * arm.memory.measured_bytes
            for size, arm in zip(sizes, arms, strict=True)
        ):
            rows.append([f"{kind}, {dtype}", *(_mib(size) if size else "-" for size in sizes)])
    rest = ["workspace and others", *("-" if arm.memory is None else _mib(arm.memory.rest_bytes) for arm in arms)]
    peak = ["peak", *("-" if arm.memory is None else _mib(arm.memory.measured_bytes) for arm in arms)]
    reserved = ["reserved by the allocator", *(_mib(arm.memory.reserved_bytes) if arm.memory else "-" for arm in arms)]
    return [*rows, rest, peak, *([reserved] if any(cell != "-" for cell in reserved[1:]) else [])]


def _kept_rows(arms: Sequence[ArmProfile]) -> list[list[str]]:
    found: dict[str, list[str]] = {}
    for place, arm in enumerate(arms):
        for held in arm.memory.layers if arm.memory is not None else []:
            row = found.setdefault(held.kind, [""] * len(arms))
            text = f"{_mib(held.bytes)} {held.dtype}"
            row[place] = f"{row[place]}, {text}" if row[place] else text
    rows = [[printable(name or "outside of modules", 44, keep_end=16), *cells] for name, cells in found.items()]
    return [[cell or "-" for cell in row] for row in rows[:MAX_LAYERS]]


def _layers(arms: Sequence[ArmProfile]) -> list[list[str]]:
    names = list(dict.fromkeys(layer.module for arm in arms for layer in arm.layers))[:MAX_LAYERS]
    by_arm = [{layer.module: layer.seconds for layer in arm.layers} for arm in arms]
    return [
        [
            printable(name or "outside of modules", 44, keep_end=16),
            *(_cell(known.get(name, 0.0), arm) for known, arm in zip(by_arm, arms, strict=True)),
        ]
        for name in names
    ]


def _operations(arms: Sequence[ArmProfile]) -> list[list[str]]:
    rows: dict[tuple[str, str, str], list[float]] = {}
    for place, arm in enumerate(arms):
        for one in arm.operations[:MAX_OPERATIONS]:
            rows.setdefault((one.name, one.phase, one.dtype), [0.0] * len(arms))[place] += one.seconds
    return [
        [
            printable(name, 44),
            phase,
            dtype or "-",
            *(_cell(seconds, arm) for seconds, arm in zip(values, arms, strict=True)),
        ]
        for (name, phase, dtype), values in rows.items()
    ]


def _reason_line(reason: Reason) -> str:
    """Return a reason with its gain in one line."""
    gain = f"; gain: {reason.gain}" if reason.gain else ""
    place = " [GPU]" if reason.on_gpu else ""
    return printable(f"{reason.kind}{place}: {reason.text}{gain}", 1000)


def memory_sentences(arm: ArmProfile) -> list[str]:
    """Return a sentence for each change that was trained for memory: the peak, and the time of a step."""
    is_timed = "emulated" not in arm.half
    return [_memory_sentence(one, is_timed=is_timed) for one in arm.memory_trials]


def _memory_sentence(trial: Trial, *, is_timed: bool) -> str:
    before, after = trial.before_peak_bytes, trial.peak_bytes
    if trial.failure or not before or after is None:
        return f"{trial.change} could not be trained: {trial.failure or 'its peak was not measured'}"
    share = after / before - 1
    if abs(share) < MIN_CHANGE:
        return f"{trial.change} does not change the peak of memory, {_mib(before)} MiB"
    size = f"{100 * abs(share):.0f} % {'more' if share > 0 else 'less'}"
    peak = f"with {trial.change} the peak of memory is {_mib(after)} instead of {_mib(before)} MiB, {size}"
    if not is_timed:
        return peak
    if not trial.gain:
        return f"{peak}, and the work of a step takes as long"
    time = f"{100 * abs(trial.gain):.0f} % {'less' if trial.gain > 0 else 'more'}"
    return f"{peak}, and the work of a step takes {time} time"


def profile_document(profile: Profile) -> Document:
    """Return the report: sentences, reasons with their evidence, what memory depends on, and one step side by side."""
    reasons = [
        Items([(_reason_line(reason), reason.evidence) for reason in arm.reasons], f"Reasons, {printable(arm.arm, 60)}")
        for arm in profile.arms
        if arm.reasons
    ]
    memory = [
        Items(memory_sentences(arm), f"What memory depends on, {printable(arm.arm, 60)}")
        for arm in profile.arms
        if arm.memory_trials
    ]
    arms = [arm for arm in profile.arms if not arm.failure]
    # The first arm is the reference, whose time alone answers nothing.
    answer, *rest = [*profile.headline[1:], *profile.headline[:1]] or [""]
    sections = [
        Section("headline", [Text([sentence]) for sentence in profile.headline]),
        Section("reasons", [*reasons, *memory]),
        Section("tables", _tables(profile)),
        Section("notes", [Items([f"note: {note}" for note in notes])] if (notes := _notes(profile)) else []),
        Section("further", [Text([sentence]) for sentence in rest]),
        Section("step", lambda: _bars(_phase_bars(arms))),
        Section("work", lambda: _bars(_kind_bars(arms))),
        Section("memory", lambda: _bars(_memory_bars(arms))),
        Section("roofline", lambda: [Figure("roofline", lambda: found)] if (found := _roofline(arms)) else []),
    ]
    return Document(
        "profile",
        sections,
        profile,
        "Profile",
        printable(answer, 600),
        [printable(part, 120) for part in (profile.subject, profile.device) if part],
    )


def _bars(found: Bars) -> list[Block]:
    return [Figure("bars", lambda: found)] if found.bars else []


def _notes(profile: Profile) -> list[str]:
    """Return the notes of a profile, with what its figures leave open."""
    notes = list(profile.notes)
    for arm in profile.arms:
        memory = arm.memory
        if memory is not None and abs(memory.rest_bytes) > 0.05 * memory.measured_bytes:
            notes.append(
                f"{arm.arm}: {100 * memory.rest_bytes / memory.measured_bytes:.0f} % of the peak of memory is "
                "workspace of "
                "operations, or held by something else than the training"
            )
        if arm.seconds and abs(arm.accounted_seconds - arm.seconds) > 0.03 * arm.seconds:
            notes.append(
                f"{arm.arm}: the parts add up to {100 * arm.accounted_seconds / arm.seconds:.0f} % of the step"
            )
    return notes


@dataclass(frozen=True)
class Segment:
    """A part of a bar: start and width in percent, a color of the style sheet, and a text."""

    start: float
    width: float
    color: int
    text: str


@dataclass(frozen=True)
class Bar:
    """A bar with its segments."""

    name: str
    segments: list[Segment]
    text: str


@dataclass(frozen=True)
class Point:
    """An arm on the roofline."""

    x: float
    y: float
    color: int
    text: str
    name: str


@dataclass(frozen=True)
class Roofline:
    """FLOP/s over FLOPs per byte, both logarithmic: points of arms under the roofs of their types."""

    points: list[Point]
    roofs: list[tuple[str, str, int]]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]


@dataclass(frozen=True)
class Bars:
    """A bar for each arm, and what their colors mean.

    Attributes:
        key: name and color of each kind of segment.
    """

    title: str
    bars: list[Bar]
    key: list[tuple[str, int]]


def _phase_bars(arms: Sequence[ArmProfile]) -> Bars:
    """Return one step by phase."""
    return Bars("One step by phase", [_bar(arm, PHASES, arms, by_phase=True) for arm in arms], _key(PHASES))


def _kind_bars(arms: Sequence[ArmProfile]) -> Bars:
    """Return one step by kind of work."""
    return Bars("One step by kind of work", [_bar(arm, KINDS, arms, by_phase=False) for arm in arms], _key(KINDS))


def _key(names: Mapping[Any, str]) -> list[tuple[str, int]]:
    return [(title, index % COLORS) for index, title in enumerate(names.values())]


def _bar(arm: ArmProfile, names: Mapping[Any, str], arms: Sequence[ArmProfile], *, by_phase: bool) -> Bar:
    longest = max((one.seconds for one in arms), default=0.0) or 1.0
    values = [
        (title, arm.of_phase(key) if by_phase else arm.of_kind(key), index % COLORS)
        for index, (key, title) in enumerate(names.items())
    ]
    text = f"{1000 * arm.seconds:.2f} ms"
    return Bar(
        printable(arm.arm, 30),
        segments_of(
            values, longest, lambda seconds: f"{1000 * seconds:.3f} ms, {100 * seconds / (arm.seconds or 1):.0f} %"
        ),
        text,
    )


def segments_of(values: Sequence[tuple[str, float, int]], whole: float, words: Callable[[float], str]) -> list[Segment]:
    """Return the parts of a bar.

    Args:
        values: name, value and color of each part.
        whole: value of the longest bar.
        words: of a value.
    """
    at = 0.0
    found: list[Segment] = []
    for title, value, color in values:
        if value / whole >= LEAST:
            found.append(
                Segment(round(100 * at / whole, 3), round(100 * value / whole, 3), color, f"{title}: {words(value)}")
            )
        at += max(0.0, value)
    return found


def _memory_bars(arms: Sequence[ArmProfile]) -> Bars:
    """Return the peak of memory by what holds it."""
    known = [(arm, arm.memory) for arm in arms if arm.memory is not None]
    names = list(dict.fromkeys(held.kind for _, memory in known for held in memory.held))
    names.append("workspace and others")
    largest = max((memory.measured_bytes for _, memory in known), default=0) or 1
    bars = []
    for arm, memory in known:
        values = [
            (name, float(sum(held.bytes for held in memory.held if held.kind == name)), index % COLORS)
            for index, name in enumerate(names[:-1])
        ]
        values.append((names[-1], float(max(0, memory.rest_bytes)), (len(names) - 1) % COLORS))
        words = _mebibytes
        bars.append(Bar(printable(arm.arm, 30), segments_of(values, largest, words), _mebibytes(memory.measured_bytes)))
    return Bars("Peak of memory", bars, [(name, index % COLORS) for index, name in enumerate(names)])


def _mebibytes(size: float) -> str:
    return f"{size / 2**20:.2f} MiB"


def _roofline(arms: Sequence[ArmProfile]) -> Roofline | None:
    """Return the figure; None where no arm has FLOPs and peaks."""
    known = [
        (index, arm, arm.limits)
        for index, arm in enumerate(arms)
        if arm.limits is not None
        and arm.limits.flops
        and arm.limits.peak_flops
        and arm.limits.peak_bytes
        and arm.seconds
    ]
    if not known:
        return None
    ridges = [(one.peak_flops or 1) / (one.peak_bytes or 1) for _, _, one in known]
    intensities = [one.intensity or 1 for _, _, one in known]
    reached = [one.flops / arm.seconds for _, arm, one in known]
    x_low = math.floor(math.log10(min([*intensities, *ridges]))) - 1
    x_high = math.ceil(math.log10(max([*intensities, *ridges]))) + 1
    y_low = math.floor(math.log10(min(reached)))
    y_high = math.ceil(math.log10(max(one.peak_flops or 1 for _, _, one in known)))

    def at_x(value: float) -> float:
        return round(WIDTH * (math.log10(value) - x_low) / (x_high - x_low), 1)

    def at_y(value: float) -> float:
        return round(HEIGHT * (1 - (math.log10(value) - y_low) / (y_high - y_low)), 1)

    roofs: dict[tuple[str, str], int] = {}
    for index, _, one in known:
        peak, wide = one.peak_flops or 1.0, one.peak_bytes or 1.0
        left = max(10.0**x_low, 10.0**y_low / wide)
        corner = peak / wide
        points = [(left, left * wide), (corner, peak), (10.0**x_high, peak)]
        line = " ".join(f"{at_x(x)},{at_y(y)}" for x, y in points)
        roofs.setdefault((one.peak_dtype, line), index % COLORS)
    return Roofline(
        points=[
            Point(
                at_x(one.intensity or 1.0),
                at_y(one.flops / arm.seconds),
                index % COLORS,
                f"{arm.arm}: {one.intensity or 0:.3g} FLOP/byte, {one.flops / arm.seconds / 1e9:.3g} GFLOP/s",
                printable(arm.arm, 30),
            )
            for index, arm, one in known
        ],
        roofs=[(line, dtype, color) for (dtype, line), color in roofs.items()],
        x_ticks=[(at_x(10.0**power), f"1e{power}") for power in range(x_low, x_high + 1)],
        y_ticks=[(at_y(10.0**power), f"1e{power}") for power in range(y_low, y_high + 1)],
    )
