"""The report of a profile, before it has a format: sentences, and one step of each arm side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ampcompare.base.formatting import printable
from ampcompare.results.records.profile import (
    KINDS,
    PHASES,
    ArmProfile,
    Held,
    Limits,
    Memory,
    Profile,
    RankTimes,
    Reason,
    Trial,
)
from ampcompare.results.report.document import Block, Document, Figure, Items, Section, Table, Text

__all__ = ["COLORS", "Bar", "Bars", "memory_sentences", "profile_document", "segments_of"]

MIN_SHARE = 0.001  # of a step: a row is left out where no arm reaches it
MAX_LAYERS = 8
MAX_OPERATIONS = 8
MIN_CHANGE = 0.01  # of the peak of memory
REST = "workspace and others"
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


def _size_cell(size: float, arm: ArmProfile) -> str:
    return _mib(size) if size else "-"


def _module(name: str) -> str:
    return printable(name or "outside of modules", 44, keep_end=16)


def _tables(profile: Profile) -> list[Table]:
    """Return the tables of a profile, with a column for each arm."""
    arms = [arm for arm in profile.arms if not arm.failure]
    names = [printable(arm.arm, 40) for arm in arms]
    step = ["step", *(_milliseconds(arm.seconds) for arm in arms)]
    phases = _rows(arms, lambda arm: (((title,), arm.of_phase(key)) for key, title in PHASES.items()), _cell, _seconds)
    kinds = _rows(arms, lambda arm: (((title,), arm.of_kind(key)) for key, title in KINDS.items()), _cell, _seconds)
    kept = _rows(arms, lambda arm: (((_module(one.kind), one.dtype), one.bytes) for one in _held(arm, "layers")))
    layers = _rows(arms, lambda arm: (((_module(one.module),), one.seconds) for one in arm.layers), _cell)
    tables = [
        Table.of(["phase", *names], [*phases, step], "One step, ms"),
        Table.of(["kind", *names], [*kinds, step], "The same by kind of work, ms"),
        Table.of(["", *names], _limits(arms), "Limits"),
        Table.of(["", *names], _memory(arms), "Memory at the peak of a step, MiB"),
        Table.of(["layer", "type", *names], kept[:MAX_LAYERS], "Activations kept, by layer, MiB"),
        Table.of(["layer", *names], layers[:MAX_LAYERS], "Layers, forward and backward, ms"),
        Table.of(
            ["operation", "phase", "type", *names],
            _rows(
                arms,
                lambda arm: (
                    ((printable(one.name, 44), one.phase, one.dtype or "-"), one.seconds)
                    for one in arm.operations[:MAX_OPERATIONS]
                ),
                _cell,
            ),
            "Operations, ms",
        ),
        Table.of(
            ["arm", "change", "saves of the step"],
            [[arm.arm, one.change, one.failure or f"{100 * one.gain:+.0f} %"] for arm in arms for one in arm.trials],
            "Switches that were trained",
        ),
        Table.of(
            ["arm", "rank", "step (ms)", "communication (ms)", "hidden"],
            [
                [arm.arm, str(rank.rank), _milliseconds(rank.seconds), *_communication(rank)]
                for arm in arms
                for rank in arm.ranks
            ],
            "Ranks",
        ),
    ]
    return [table for table in tables if table.rows]


def _communication(rank: RankTimes) -> list[str]:
    known = rank.communication
    return ["-", "-"] if known is None else [_milliseconds(known.seconds), _percent(known.overlap_share)]


def _seconds(arm: ArmProfile) -> float:
    return arm.seconds


def _held(arm: ArmProfile, name: Literal["held", "layers"]) -> Sequence[Held]:
    return () if arm.memory is None else getattr(arm.memory, name)


def _rows(
    arms: Sequence[ArmProfile],
    values: Callable[[ArmProfile], Iterable[tuple[tuple[str, ...], float]]],
    text: Callable[[float, ArmProfile], str] = _size_cell,
    whole: Callable[[ArmProfile], float] = lambda arm: 0.0,
) -> list[list[str]]:
    """Return a row for each head, with the sum of its values under each arm, if that is a notable share anywhere.

    Args:
        values: of an arm, each with its head.
        whole: what values of an arm are shares of.
    """
    rows: dict[tuple[str, ...], list[float]] = {}
    for place, arm in enumerate(arms):
        for head, value in values(arm):
            rows.setdefault(head, [0.0] * len(arms))[place] += value
    return [
        [*head, *map(text, sums, arms)]
        for head, sums in rows.items()
        if any(value and value >= MIN_SHARE * whole(arm) for value, arm in zip(sums, arms, strict=True))
    ]


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
    memories = [arm.memory for arm in arms]
    if not any(memories):
        return []

    def row(title: str, value: Callable[[Memory], float | None]) -> list[str]:
        return [title, *("-" if memory is None else _mib(value(memory)) for memory in memories)]

    rows = _rows(
        arms,
        lambda arm: (((f"{one.kind}, {one.dtype}",), one.bytes) for one in _held(arm, "held")),
        whole=lambda arm: arm.memory.measured_bytes if arm.memory else 0.0,
    )
    reserved = row("reserved by the allocator", lambda memory: memory.reserved_bytes)
    return [
        *rows,
        row(REST, lambda memory: memory.rest_bytes),
        row("peak", lambda memory: memory.measured_bytes),
        *([reserved] if any(cell != "-" for cell in reserved[1:]) else []),
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
        Section("step", _time_bars("One step by phase", arms, PHASES, ArmProfile.of_phase)),
        Section("work", _time_bars("One step by kind of work", arms, KINDS, ArmProfile.of_kind)),
        Section("memory", _memory_bars(arms)),
    ]
    return Document(
        "profile",
        sections,
        profile,
        "Profile",
        printable(answer, 600),
        [printable(part, 120) for part in (profile.subject, profile.device) if part],
    )


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
class Bars:
    """A bar for each arm, and what their colors mean.

    Attributes:
        key: name and color of each kind of segment.
    """

    title: str
    bars: list[Bar]
    key: list[tuple[str, int]]


def _bars(
    title: str, arms: Sequence[tuple[str, float, Mapping[str, float]]], words: Callable[[float], str]
) -> list[Block]:
    """Return a bar for each arm.

    Args:
        arms: name, the whole, and its parts by their names, which all arms have in one order.
        words: of a value.
    """
    colors = {name: index % COLORS for _, _, parts in arms for index, name in enumerate(parts)}
    largest = max((whole for _, whole, _ in arms), default=0.0) or 1.0
    bars = [
        Bar(
            printable(arm, 30),
            segments_of([(name, value, colors[name]) for name, value in parts.items()], largest, words),
            words(whole),
        )
        for arm, whole, parts in arms
    ]
    return [Figure("bars", lambda: Bars(title, bars, list(colors.items())))] if bars else []


def _time_bars(
    title: str, arms: Sequence[ArmProfile], names: Mapping[Any, str], seconds: Callable[[ArmProfile, Any], float]
) -> list[Block]:
    parts = [(arm.arm, arm.seconds, {text: seconds(arm, name) for name, text in names.items()}) for arm in arms]
    return _bars(title, parts, lambda value: f"{_milliseconds(value)} ms")


def _memory_bars(arms: Sequence[ArmProfile]) -> list[Block]:
    """Return the peak of memory by what holds it."""
    known = [(arm.arm, arm.memory) for arm in arms if arm.memory is not None]
    kinds = dict.fromkeys(held.kind for _, memory in known for held in memory.held)
    parts = [
        (
            arm,
            memory.measured_bytes,
            {kind: float(sum(held.bytes for held in memory.held if held.kind == kind)) for kind in kinds}
            | {REST: float(max(0, memory.rest_bytes))},
        )
        for arm, memory in known
    ]
    return _bars("Peak of memory", parts, lambda size: f"{_mib(size)} MiB")


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
