"""What the figures of the HTML report are made of: plain data for plotly.js, never in which color.

Every trace says in its `meta` to which arm it belongs and which role it has; the page gives it the arm's look in the
present theme, and hides it with its arm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ampcompare.formatting import printable
from ampcompare.records.comparison import ArmSummary
from ampcompare.records.run import RunRecord
from ampcompare.report.html.curves import Band, Curve
from ampcompare.report.html.shared_settings import listed

__all__ = [
    "ArmRuns",
    "FigureTable",
    "Plot",
    "arm_trace",
    "axis",
    "by_name",
    "curves_of",
    "not_drawn",
    "plot_text",
    "sig",
    "stops_of",
]


@dataclass(frozen=True)
class FigureTable:
    """Numbers of a figure for those who cannot see it."""

    headers: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Plot:
    """One figure.

    Attributes:
        key: its name in the page.
        traces: for plotly.js, with `meta: {arm, role}`.
        layout: for plotly.js: axes and reference lines.
        by_arm: one line of the figure per arm, so that its height follows their number.
        can_log: worth seeing on a logarithmic axis.
    """

    key: str
    title: str
    caption: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any]
    table: FigureTable | None = None
    by_arm: bool = False
    can_log: bool = False
    missing: str = field(default="", kw_only=True)


@dataclass(frozen=True)
class ArmRuns:
    place: int
    row: ArmSummary
    records: Sequence[RunRecord]

    @property
    def name(self) -> str:
        return printable(self.row.arm, 60)

    @property
    def ran(self) -> list[RunRecord]:
        return [record for record in self.records if record.status in ("completed", "diverged")]

    @property
    def completed(self) -> list[RunRecord]:
        return [record for record in self.records if record.status == "completed"]


def plot_text(text: str, longest: int = 40) -> str:
    """Return text that plotly.js, which reads a little HTML, shows as it is."""
    shown = printable(text, longest) or "(no name)"
    return shown.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def sig(value: float, digits: int = 5) -> float:
    """Return a number with this many digits; a whole one as an int, which is shorter in JSON."""
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() else rounded


def axis(title: str, **options: Any) -> dict[str, Any]:
    return {"title": {"text": title}, **options}


def arm_trace(arm: ArmRuns, role: str, x: Iterable[float], y: Iterable[float], **options: Any) -> dict[str, Any]:
    return {
        "type": "scatter",
        "x": [sig(value, 7) for value in x],
        "y": [sig(value) for value in y],
        "name": plot_text(arm.row.arm),
        "meta": {"arm": arm.place, "role": role},
        **options,
    }


def _stairs(values: Sequence[float], *, ahead: bool) -> list[float]:
    """Return corners of a staircase: each x but the first twice, each y but the last twice."""
    doubled = [value for value in values for _ in (0, 1)]
    return doubled[1:] if ahead else doubled[:-1]


def curves_of(
    arm: ArmRuns, band: Band, hover: str, *, stairs: bool = False, markers: bool = False
) -> list[dict[str, Any]]:
    """Return the mean over seeds as a line, and the range under it if there are several seeds."""
    if not band.x:
        return []
    x, mean, low, high = (list(part) for part in (band.x, band.mean, band.low, band.high))
    if stairs:
        x = _stairs(x, ahead=True)
        mean, low, high = (_stairs(part, ahead=False) for part in (mean, low, high))
    made = []
    if band.has_width:
        # Its x is that of the line behind it, forth and back; the page puts it there.
        made.append(arm_trace(arm, "band", [], [*high, *reversed(low)]))
    mode = "lines+markers" if markers or len(x) == 1 else "lines"
    return [*made, arm_trace(arm, "line", x, mean, mode=mode, hovertemplate=hover)]


def stops_of(arm: ArmRuns, places: Iterable[tuple[RunRecord, Curve]]) -> list[dict[str, Any]]:
    """Return a cross at the end of what can be drawn of each run that diverged."""
    ends = [(record, curve.x[-1], curve.y[-1]) for record, curve in places if curve.x and record.status == "diverged"]
    if not ends:
        return []
    texts = [
        f"seed {record.config.recipe.seed} diverged at step {record.summary.diverged_step}" for record, _, _ in ends
    ]
    return [
        arm_trace(
            arm,
            "stop",
            [x for _, x, _ in ends],
            [y for _, _, y in ends],
            mode="markers",
            text=texts,
            hovertemplate="%{text}",
        )
    ]


def not_drawn(arms: Sequence[ArmRuns], traces: Sequence[dict[str, Any]], why: Callable[[ArmRuns], str]) -> str:
    drawn = {trace["meta"]["arm"] for trace in traces}
    reasons: dict[str, list[str]] = {}
    for arm in arms:
        if traces and arm.place not in drawn:
            reasons.setdefault(why(arm), []).append(arm.name)
    return "".join(f" Not drawn: {listed(names)} ({reason})." for reason, names in reasons.items())


def by_name(arms: Sequence[ArmRuns], x: dict[str, Any]) -> dict[str, Any]:
    """Return a layout with a line per arm; the names stand on the axis, the lines go by number, so none can merge."""
    names = {"tickvals": [f"a{arm.place}" for arm in arms], "ticktext": [plot_text(arm.row.arm, 26) for arm in arms]}
    return {"xaxis": x, "yaxis": {"type": "category", "autorange": "reversed", **names}}
