"""The figures of a diagnosis: a map of modules and steps, histograms of exponents, drift by depth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ampcompare.base.formatting import printable
from ampcompare.records.diagnosis import Diagnosis, PlaceReport, Range

__all__ = ["drift_by_depth", "histograms", "range_map"]

SHOWN = 6  # histograms
MAX_ROWS = 60
FP16, FP16_NORMAL = (-24, 15), -14
BF16 = (-133, 127)
LEAST_ERROR = 1e-8


@dataclass(frozen=True)
class Cell:
    """A step of a module on the map: a class of the style sheet, its strength from 0 to 1, and a text."""

    kind: str
    strength: float
    text: str


@dataclass(frozen=True)
class Row:
    """A module on the map."""

    name: str
    cells: list[Cell]


@dataclass(frozen=True)
class Histogram:
    """Exponents of a place, as bars on an axis of `low` to `high`, with the windows of both 16-bit types.

    Attributes:
        bars: position and height in percent.
        windows: name, start and width in percent.
        ticks: position in percent, and exponent.
    """

    name: str
    bars: list[tuple[float, float]]
    bar_width: float
    windows: list[tuple[str, float, float]]
    ticks: list[tuple[float, int]]
    text: str


@dataclass(frozen=True)
class Drift:
    """Errors along the depth of the network: points as SVG writes them, on a logarithmic axis."""

    error: str
    made: str
    ticks: list[tuple[float, str]]
    names: list[str]


@dataclass(frozen=True)
class Map:
    """Modules over steps."""

    steps: list[int]
    rows: list[Row]


def range_map(diagnosis: Diagnosis) -> Map:
    """Return how much of the range of fp16 each module uses in each step that was watched."""
    found = {(cell.module, cell.step): cell.range for cell in diagnosis.map}
    seen = {module for module, _ in found}
    order = [*(name for name in diagnosis.modules if name in seen), *sorted(seen - set(diagnosis.modules))]
    rows = [
        Row(
            printable(name or "outside of modules", 40, keep_end=20),
            [_cell(found.get((name, step)), step) for step in diagnosis.observed],
        )
        for name in order[:MAX_ROWS]
    ]
    return Map(list(diagnosis.observed), rows)


def _cell(values: Range | None, step: int) -> Cell:
    """Return how much of the range of fp16 a module uses: what overflows, what is near, what is too small."""
    if values is None:
        return Cell("none", 0.0, f"step {step}: not run")
    text = f"step {step}: {values.smallest or 0:.2g} to {values.largest or 0:.2g}"
    if values.nonfinite:
        return Cell("bad", 1.0, f"{text}, {values.nonfinite} not finite")
    high, low = values.share(values.top + values.above), values.share(values.below + values.lost)
    if high:
        return Cell("unclear", 0.4 + 0.6 * min(1.0, 10 * high), f"{text}, {100 * high:.2g} % from 32768")
    if low > 0.01:
        return Cell("accent", 0.2 + 0.8 * min(1.0, low), f"{text}, {100 * low:.2g} % below fp16")
    used = (math.log2(values.largest) - FP16[0]) / (FP16[1] - FP16[0]) if values.largest else 0.0
    return Cell("good", 0.1 + 0.7 * min(1.0, max(0.0, used)), text)


def histograms(diagnosis: Diagnosis, worst: Sequence[PlaceReport]) -> list[Histogram]:
    """Return the exponents of the gradients, and of the worst places."""
    found = [
        _histogram(report.place.name + f", {report.place.phase}", report.range.exponents) for report in worst[:SHOWN]
    ]
    if diagnosis.headroom is not None:
        found.insert(0, _histogram("gradients of weights at scale 1", diagnosis.headroom.exponents))
    return [one for one in found if one.bars]


def _histogram(name: str, exponents: dict[int, int]) -> Histogram:
    low = min([FP16[0] - 8, *exponents])
    high = max([FP16[1] + 4, *exponents]) + 1
    size, most = high - low, max(exponents.values(), default=1)

    def at(exponent: float) -> float:
        return round(100 * (min(max(exponent, low), high) - low) / size, 2)

    windows = [("bf16", BF16[0], BF16[1] + 1), ("fp16", FP16[0], FP16[1] + 1), ("", FP16_NORMAL, FP16[1] + 1)]
    total = sum(exponents.values())
    inside = sum(count for power, count in exponents.items() if FP16[0] <= power <= FP16[1])
    return Histogram(
        printable(name, 80),
        [(at(power), round(100 * count / most, 2)) for power, count in sorted(exponents.items())],
        round(100 / size, 2),
        [(label, at(start), at(end) - at(start)) for label, start, end in windows],
        [(at(tick), tick) for tick in range(-140, 140, 10) if low <= tick <= high],
        f"{total} values that are not zero, {100 * inside / total:.1f} % inside fp16" if total else "",
    )


def drift_by_depth(diagnosis: Diagnosis) -> Drift | None:
    """Return the error of each module's last result in the forward pass; None without a wide run."""
    last: dict[str, PlaceReport] = {}
    for report in diagnosis.places:
        if report.place.phase == "forward" and report.error is not None:
            last[report.place.module] = report
    if len(last) < 2:
        return None
    depth = {name: index for index, name in enumerate(filter(None, diagnosis.modules))}
    names = sorted(last, key=lambda name: depth.get(name, len(depth)))  # what is outside of modules ends with the loss

    def line(values: Sequence[float | None]) -> str:
        step = 100 / (len(values) - 1)
        return " ".join(f"{step * at:.2f},{_height(value):.2f}" for at, value in enumerate(values))

    return Drift(
        line([last[name].error for name in names]),
        line([last[name].made for name in names]),
        [(_height(10.0**power), f"1e{power}") for power in range(-8, 1, 2)],
        [printable(name or "outside of modules", 40) for name in names],
    )


def _height(value: float | None) -> float:
    """Return the position of an error from the top, in percent, between 1e-8 and 1."""
    size = min(1.0, max(LEAST_ERROR, value or 0.0))
    return 100 * math.log10(size) / math.log10(LEAST_ERROR)
