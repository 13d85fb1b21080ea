"""The figures of a profile: one step and the peak of memory as bars, and the roofline."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ampcompare.base.formatting import printable
from ampcompare.records.profile import KINDS, PHASES, ArmProfile

__all__ = ["Bars", "kind_bars", "memory_bars", "phase_bars", "roofline"]

WIDTH, HEIGHT = 700.0, 260.0
COLORS = 9  # in report.css
LEAST = 0.004  # of a bar: smaller parts are not drawn


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


def phase_bars(arms: Sequence[ArmProfile]) -> Bars:
    """Return one step by phase."""
    return Bars("One step by phase", [_bar(arm, PHASES, arms, by_phase=True) for arm in arms], _key(PHASES))


def kind_bars(arms: Sequence[ArmProfile]) -> Bars:
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
        _segments(
            values, longest, lambda seconds: f"{1000 * seconds:.3f} ms, {100 * seconds / (arm.seconds or 1):.0f} %"
        ),
        text,
    )


def _segments(values: Sequence[tuple[str, float, int]], whole: float, words: Callable[[float], str]) -> list[Segment]:
    at = 0.0
    found: list[Segment] = []
    for title, value, color in values:
        if value / whole >= LEAST:
            found.append(
                Segment(round(100 * at / whole, 3), round(100 * value / whole, 3), color, f"{title}: {words(value)}")
            )
        at += max(0.0, value)
    return found


def memory_bars(arms: Sequence[ArmProfile]) -> Bars:
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
        bars.append(Bar(printable(arm.arm, 30), _segments(values, largest, words), _mebibytes(memory.measured_bytes)))
    return Bars("Peak of memory", bars, [(name, index % COLORS) for index, name in enumerate(names)])


def _mebibytes(size: float) -> str:
    return f"{size / 2**20:.2f} MiB"


def roofline(arms: Sequence[ArmProfile]) -> Roofline | None:
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
