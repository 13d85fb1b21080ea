"""The figures of the HTML report as plain data for plotly.js: what is drawn, never in which color.

Every trace says in its `meta` to which arm it belongs and which role it has; the page gives it the arm's look in the
present theme, and hides it with its arm.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from ampcompare.record import ArmSummary, Comparison, RunRecord
from ampcompare.report.base import printable
from ampcompare.report.series import Band, Curve, make_curve, over_seeds

__all__ = ["Figure", "Table", "make_figures", "plot_text"]

MOST_POINTS = 100
ALL_POINTS = 2400  # of one figure, shared by its arms, so that a page of hundreds of arms stays small
NEAR_FINAL = 0.99
MIB = 2**20
SAME_PLACE = "x unified"  # one label for all arms at a step or an epoch
QUARTERS = (1, 5, 10, 15, 19)  # places of the 5, 25, 50, 75 and 95 % quantiles in a trace


@dataclass(frozen=True)
class Table:
    """Numbers of a figure for those who cannot see it."""

    headers: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Figure:
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
    table: Table | None = None
    by_arm: bool = False
    can_log: bool = False
    missing: str = field(default="", kw_only=True)


@dataclass(frozen=True)
class _Arm:
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


def make_figures(comparison: Comparison) -> list[Figure]:
    """Return all figures, in the order of the page; one without data says why."""
    by_arm: dict[str, list[RunRecord]] = {row.arm: [] for row in comparison.arms}
    for record in comparison.records:
        by_arm.setdefault(record.arm, []).append(record)
    arms = [_Arm(place, row, by_arm[row.arm]) for place, row in enumerate(comparison.arms)]
    most = max(12, min(MOST_POINTS, ALL_POINTS // max(1, len(arms))))
    return [
        _accuracy(arms, most),
        _differences(arms, comparison.reference),
        _accuracy_over_time(arms, most, comparison.reference),
        _pareto(arms),
        _training_loss(arms, most),
        _validation_loss(arms, most),
        _loss_scale(arms, most),
        _skipped(arms, most),
        _step_times(arms),
        _memory(arms),
    ]


def _sig(value: float, digits: int = 5) -> float:
    return float(f"{value:.{digits}g}")


def _axis(title: str, **options: Any) -> dict[str, Any]:
    return {"title": {"text": title}, **options}


def _trace(arm: _Arm, role: str, x: Iterable[float], y: Iterable[float], **options: Any) -> dict[str, Any]:
    return {
        "type": "scatter",
        "x": [_sig(value, 7) for value in x],
        "y": [_sig(value) for value in y],
        "name": plot_text(arm.row.arm),
        "meta": {"arm": arm.place, "role": role},
        **options,
    }


def _stairs(values: Sequence[float], *, ahead: bool) -> list[float]:
    """Return corners of a staircase: each x but the first twice, each y but the last twice."""
    doubled = [value for value in values for _ in (0, 1)]
    return doubled[1:] if ahead else doubled[:-1]


def _curves(arm: _Arm, band: Band, hover: str, *, stairs: bool = False, markers: bool = False) -> list[dict[str, Any]]:
    """Return the mean over seeds as a line, and the range under it where there are several seeds."""
    if not band.x:
        return []
    x, mean, low, high = (list(part) for part in (band.x, band.mean, band.low, band.high))
    if stairs:
        x = _stairs(x, ahead=True)
        mean, low, high = (_stairs(part, ahead=False) for part in (mean, low, high))
    made = []
    if band.has_width:
        made.append(
            _trace(arm, "band", [*x, *reversed(x)], [*high, *reversed(low)], fill="toself", hoverinfo="skip", mode="lines")
        )
    mode = "lines+markers" if markers or len(x) == 1 else "lines"
    return [*made, _trace(arm, "line", x, mean, mode=mode, hovertemplate=hover)]


def _stops(arm: _Arm, places: Iterable[tuple[RunRecord, Curve]]) -> list[dict[str, Any]]:
    """Return a cross at the end of what can be drawn of each run that diverged."""
    ends = [(record, curve.x[-1], curve.y[-1]) for record, curve in places if curve.x and record.status == "diverged"]
    if not ends:
        return []
    texts = [
        f"seed {record.config.recipe.seed} diverged at step {record.summary.diverged_step}" for record, _, _ in ends
    ]
    return [
        _trace(
            arm,
            "stop",
            [x for _, x, _ in ends],
            [y for _, _, y in ends],
            mode="markers",
            text=texts,
            hovertemplate="%{text}",
        )
    ]


def _not_drawn(arms: Sequence[_Arm], traces: Sequence[dict[str, Any]], why: Callable[[_Arm], str]) -> str:
    drawn = {trace["meta"]["arm"] for trace in traces}
    absent = [arm for arm in arms if arm.place not in drawn]
    if not absent or not traces:
        return ""
    shown = [f"{arm.name} ({why(arm)})" for arm in absent[:12]]
    more = f" and {len(absent) - 12} more" if len(absent) > 12 else ""
    return f"Not drawn: {', '.join(shown)}{more}."


def _why_no_epoch(arm: _Arm) -> str:
    if any(record.status == "diverged" for record in arm.records):
        step = min(record.summary.diverged_step or 0 for record in arm.records if record.status == "diverged")
        return f"diverged at step {step}, before the first evaluation"
    return "failed" if arm.row.failed else "no results"


def _epochs(record: RunRecord, value: Callable[[Any], float]) -> Curve:
    return make_curve((epoch.epoch + 1, value(epoch)) for epoch in record.summary.epochs)


def _accuracy(arms: Sequence[_Arm], most: int) -> Figure:
    traces: list[dict[str, Any]] = []
    bands: list[tuple[_Arm, Band]] = []
    for arm in arms:
        curves = [(record, _epochs(record, lambda epoch: 100 * epoch.top1)) for record in arm.ran]
        band = over_seeds((curve for _, curve in curves), most)
        bands.append((arm, band))
        traces += _curves(arm, band, "%{y:.2f} %", markers=len(band.x) <= 30) + _stops(arm, curves)
    axis = _axis("epoch", tickformat="d")
    return Figure(
        "accuracy",
        "Validation accuracy",
        f"Top-1 in percent after each epoch. {_not_drawn(arms, traces, _why_no_epoch)}",
        traces,
        {"hovermode": SAME_PLACE, "xaxis": axis, "yaxis": _axis("top-1 %")},
        _by_epoch(bands),
        missing="No epoch was evaluated.",
    )


def _by_epoch(bands: Sequence[tuple[_Arm, Band]]) -> Table | None:
    """Return means and ranges at up to six epochs that every complete curve has."""
    longest: Sequence[float] = max((band.x for _, band in bands), key=len, default=[])
    if not longest:
        return None
    last = len(longest) - 1
    places = sorted({round(number * last / 5) for number in range(6)})
    rows = []
    for arm, band in bands:
        cells = []
        for place in places:
            if place >= len(band.x):
                cells.append("-")
            elif band.low[place] < band.high[place]:
                cells.append(f"{band.mean[place]:.2f} ({band.low[place]:.2f} to {band.high[place]:.2f})")
            else:
                cells.append(f"{band.mean[place]:.2f}")
        rows.append([arm.name, *cells])
    return Table(["arm", *(f"epoch {longest[place]:g}" for place in places)], rows)


def _validation_loss(arms: Sequence[_Arm], most: int) -> Figure:
    traces: list[dict[str, Any]] = []
    for arm in arms:
        curves = [(record, _epochs(record, lambda epoch: epoch.loss)) for record in arm.ran]
        band = over_seeds((curve for _, curve in curves), most)
        traces += _curves(arm, band, "%{y:.4g}", markers=len(band.x) <= 30) + _stops(arm, curves)
    return Figure(
        "validation-loss",
        "Validation loss",
        "Mean loss over the validation set after each epoch.",
        traces,
        {"hovermode": SAME_PLACE, "xaxis": _axis("epoch", tickformat="d"), "yaxis": _axis("loss")},
        can_log=True,
        missing="No epoch was evaluated.",
    )


def _traced(record: RunRecord, values: Sequence[float]) -> Curve:
    return make_curve(zip(record.trace.steps, values, strict=False)) if record.trace else Curve([], [])


NO_TRACE = "These records were made before runs kept a trace of their steps; run the cells again with --force."


def _training_loss(arms: Sequence[_Arm], most: int) -> Figure:
    traces: list[dict[str, Any]] = []
    for arm in arms:
        curves = [(record, _before_divergence(record)) for record in arm.ran]
        traces += _curves(arm, over_seeds((curve for _, curve in curves), most), "%{y:.4g}") + _stops(arm, curves)
    return Figure(
        "training-loss",
        "Training loss",
        "Loss of single steps, evenly chosen. "
        + _not_drawn(arms, traces, lambda arm: "no finite loss" if any(r.trace for r in arm.ran) else "no trace"),
        traces,
        {"hovermode": SAME_PLACE, "xaxis": _axis("step"), "yaxis": _axis("loss")},
        can_log=True,
        missing=NO_TRACE,
    )


def _before_divergence(record: RunRecord) -> Curve:
    """Return the losses up to the step at which the run diverged; its end is where the cross is drawn."""
    curve = _traced(record, record.trace.losses if record.trace else [])
    end = record.summary.diverged_step
    if end is None or not curve.x:
        return curve
    kept = [(x, y) for x, y in zip(curve.x, curve.y, strict=True) if x <= end]
    return make_curve([*kept, (end, kept[-1][1])] if kept and kept[-1][0] < end else kept)


def _loss_scale(arms: Sequence[_Arm], most: int) -> Figure:
    traces: list[dict[str, Any]] = []
    for arm in arms:
        curves = [
            make_curve((x, y) for x, y in zip(*_positive(record), strict=True)) for record in arm.ran if record.trace
        ]
        traces += _curves(
            arm, over_seeds(curves, most, hold=True, mean=statistics.geometric_mean), "%{y:,.6g}", stairs=True
        )
    values = [y for trace in traces for y in trace["y"]]
    ticks = _powers_of_two(min(values), max(values)) if values else {}
    unscaled = [arm.name for arm in arms if arm.ran and any(r.trace and not r.trace.loss_scales for r in arm.ran)]
    many = f" and {len(unscaled) - 12} more" if len(unscaled) > 12 else ""
    note = f" Without loss scaling: {', '.join(unscaled[:12])}{many}." if unscaled else ""
    return Figure(
        "loss-scale",
        "Loss scale",
        f"After each step; a drop is an overflow.{note}",
        traces,
        {"hovermode": SAME_PLACE, "xaxis": _axis("step"), "yaxis": _axis("loss scale", type="log", **ticks)},
        missing=NO_TRACE if not any(r.trace for arm in arms for r in arm.ran) else "No arm scales its loss.",
    )


def _positive(record: RunRecord) -> tuple[list[int], list[float]]:
    """Return steps and loss scales that a logarithmic axis can show."""
    trace = record.trace
    pairs = list(zip(trace.steps, trace.loss_scales, strict=False)) if trace else []
    kept = [(step, scale) for step, scale in pairs if scale > 0 and math.isfinite(scale)]
    return [step for step, _ in kept], [scale for _, scale in kept]


def _powers_of_two(low: float, high: float) -> dict[str, Any]:
    first, last = math.floor(math.log2(low)), math.ceil(math.log2(high))
    exponents = range(last, first - 1, -max(1, math.ceil((last - first) / 8)))
    return {
        "tickvals": [2.0**power for power in exponents],
        "ticktext": [f"2<sup>{power}</sup>" if power else "1" for power in exponents],
        "range": [math.log10(2) * (first - 0.6), math.log10(2) * (last + 0.6)],
    }


def _skipped(arms: Sequence[_Arm], most: int) -> Figure:
    traces: list[dict[str, Any]] = []
    for arm in arms:
        curves = [_traced(record, record.trace.skipped) for record in arm.ran if record.trace]
        traces += _curves(arm, over_seeds(curves, most, hold=True), "%{y:.4g}", stairs=True)
    return Figure(
        "skipped",
        "Skipped steps",
        "Updates skipped for an overflow, counted up from the first step."
        + (" None was skipped." if traces and not any(y for trace in traces for y in trace["y"]) else ""),
        traces,
        {"hovermode": SAME_PLACE, "xaxis": _axis("step"), "yaxis": _axis("skipped steps", rangemode="tozero")},
        missing=NO_TRACE,
    )


def _by_name(arms: Sequence[_Arm], x: dict[str, Any]) -> dict[str, Any]:
    """Return a layout with a line per arm; the names stand on the axis, the lines go by number, so none can merge."""
    names = {"tickvals": [f"a{arm.place}" for arm in arms], "ticktext": [plot_text(arm.row.arm, 26) for arm in arms]}
    return {"xaxis": x, "yaxis": {"type": "category", "autorange": "reversed", **names}}


def _step_times(arms: Sequence[_Arm]) -> Figure:
    traces: list[dict[str, Any]] = []
    rows: list[list[str]] = []
    for arm in arms:
        known = [record.trace.step_seconds for record in arm.ran if record.trace and record.trace.step_seconds]
        if not known:
            rows.append([arm.name, *["-"] * len(QUARTERS)])
            continue
        times = [1e3 * statistics.fmean(quantiles[place] for quantiles in known) for place in QUARTERS]
        rows.append([arm.name, *(f"{value:.3g}" for value in times)])
        low, first, median, third, high = ([_sig(value, 4)] for value in times)
        traces.append(
            {
                "type": "box",
                "orientation": "h",
                "y": [f"a{arm.place}"],
                "name": plot_text(arm.row.arm),
                "meta": {"arm": arm.place, "role": "box"},
                "lowerfence": low,
                "q1": first,
                "median": median,
                "q3": third,
                "upperfence": high,
                "hoverinfo": "x",
            }
        )
    return Figure(
        "step-times",
        "Time of a step",
        "After the warm-up: median, quarters as a box, 5 to 95 % as whiskers; quantiles are means over seeds.",
        traces,
        _by_name(arms, _axis("milliseconds", rangemode="tozero")),
        Table(["arm", "5 %", "25 %", "median", "75 %", "95 % (ms)"], rows) if traces else None,
        by_arm=True,
        missing=NO_TRACE,
    )


def _seconds(record: RunRecord) -> list[float]:
    """Return the time trained up to the end of each epoch."""
    return list(accumulate(epoch.train_seconds for epoch in record.summary.epochs))


def _accuracy_over_time(arms: Sequence[_Arm], most: int, reference: str) -> Figure:
    traces: list[dict[str, Any]] = []
    target, meaning = _target(arms, reference)
    for arm in arms:
        curves = [(r, make_curve(zip(_seconds(r), (100 * e.top1 for e in r.summary.epochs), strict=True))) for r in arm.ran]
        by_epoch = over_seeds((_epochs(r, lambda epoch: 100 * epoch.top1) for r, _ in curves), most)
        spent = over_seeds((make_curve(enumerate(_seconds(r), 1)) for r, _ in curves), most)
        band = Band(spent.mean, by_epoch.mean, by_epoch.low, by_epoch.high)
        traces += _curves(arm, band, "%{y:.2f} % at %{x:.3g} s", markers=len(band.x) <= 30)
    shapes = [] if target is None else [{"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": target, "y1": target}]
    return Figure(
        "time-to-accuracy",
        "Time to accuracy",
        f"Top-1 over seconds of training, evaluation left out.{meaning}",
        traces,
        {"xaxis": _axis("seconds of training", rangemode="tozero"), "yaxis": _axis("top-1 %"), "shapes": shapes},
        None if target is None else _time_to(arms, target),
        missing="No epoch was evaluated.",
    )


def _target(arms: Sequence[_Arm], reference: str) -> tuple[float | None, str]:
    """Return the accuracy in percent that arms are timed to, and a sentence on where it comes from."""
    known = [arm for arm in arms if arm.row.top1_mean is not None]
    chosen = next((arm for arm in known if arm.row.arm == reference), known[0] if known else None)
    if chosen is None or chosen.row.top1_mean is None:
        return None, ""
    target = _sig(100 * NEAR_FINAL * chosen.row.top1_mean, 4)
    return target, f" The dotted line is {target:g} %: {100 * NEAR_FINAL:g} % of what {chosen.name} ends with."


def _time_to(arms: Sequence[_Arm], target: float) -> Table:
    rows = []
    for arm in arms:
        reached = [
            (epoch.epoch + 1, seconds)
            for record in arm.ran
            for epoch, seconds in [
                next(
                    (pair for pair in zip(record.summary.epochs, _seconds(record), strict=True) if 100 * pair[0].top1 >= target),
                    (None, 0.0),
                )
            ]
            if epoch is not None
        ]
        epochs = f"{statistics.fmean(epoch for epoch, _ in reached):.3g}" if reached else "-"
        seconds = f"{statistics.fmean(spent for _, spent in reached):.3g}" if reached else "-"
        spread = f" ± {statistics.stdev(spent for _, spent in reached):.1g}" if len(reached) > 1 else ""
        rows.append([arm.name, f"{len(reached)} of {len(arm.ran)}", epochs, seconds + spread])
    return Table(["arm", f"runs that reach {target:g} %", "epochs", "seconds"], rows)


def _memory(arms: Sequence[_Arm]) -> Figure:
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "x": [_sig(arm.row.peak_bytes / MIB)],
            "y": [f"a{arm.place}"],
            "name": plot_text(arm.row.arm),
            "meta": {"arm": arm.place, "role": "bar"},
            "text": [f"{arm.row.peak_bytes / MIB:,.1f}"],
            "hovertemplate": "%{x:,.1f} MiB",
        }
        for arm in arms
        if arm.row.peak_bytes is not None
    ]
    return Figure(
        "memory",
        "Peak memory",
        "Highest of all seeds. On CUDA what was allocated; on a CPU the growth of resident memory.",
        traces,
        _by_name(arms, _axis("MiB", rangemode="tozero")),
        by_arm=True,
        missing="No run measured its memory.",
    )


def _range(values: Sequence[float]) -> dict[str, Any]:
    mean = statistics.fmean(values)
    above, below = max(values) - mean, mean - min(values)
    return {"type": "data", "symmetric": False, "array": [_sig(above)], "arrayminus": [_sig(below)]}


def _pareto(arms: Sequence[_Arm]) -> Figure:
    traces: list[dict[str, Any]] = []
    rows: list[list[str]] = []
    for arm in arms:
        done = [(r, 100 * top1) for r in arm.completed if (top1 := r.summary.top1_final) is not None and r.summary.epochs]
        if not done:
            continue
        seconds, accuracies = [_seconds(record)[-1] for record, _ in done], [top1 for _, top1 in done]
        spread = {"error_x": _range(seconds), "error_y": _range(accuracies)} if len(done) > 1 else {}
        hover = "%{y:.2f} % in %{x:.3g} s"
        x, y = [statistics.fmean(seconds)], [statistics.fmean(accuracies)]
        traces.append(_trace(arm, "point", x, y, mode="markers", hovertemplate=hover, **spread))
        rows.append([arm.name, f"{y[0]:.2f}", f"{x[0]:.3g}"])
    return Figure(
        "pareto",
        "Accuracy against time",
        "Final top-1 and seconds of training: mean, and range over seeds. The dotted line joins arms that no shown arm "
        f"beats in both. {_not_drawn(arms, traces, lambda arm: 'no run was completed')}",
        traces,
        {"xaxis": _axis("seconds of training"), "yaxis": _axis("final top-1 %")},
        Table(["arm", "final top-1 %", "seconds"], rows) if traces else None,
        missing="No run was completed.",
    )


def _differences(arms: Sequence[_Arm], reference: str) -> Figure:
    traces: list[dict[str, Any]] = []
    rows: list[list[str]] = []
    for arm in arms:
        mean, low, high = arm.row.top1_difference, arm.row.top1_difference_low, arm.row.top1_difference_high
        if mean is None or arm.row.arm == reference:
            continue
        spread = {}
        interval = "-"
        if low is not None and high is not None:
            interval = f"{100 * low:+.2f} to {100 * high:+.2f}"
            bounds = {"array": [_sig(100 * (high - mean))], "arrayminus": [_sig(100 * (mean - low))]}
            spread = {"error_x": {"type": "data", "symmetric": False, **bounds}}
        trace = _trace(arm, "point", [100 * mean], [], mode="markers", hovertemplate="%{x:+.2f} points", **spread)
        traces.append({**trace, "y": [f"a{arm.place}"]})
        rows.append([arm.name, f"{100 * mean:+.2f}", interval])
    return Figure(
        "differences",
        f"Top-1 against {printable(reference, 40)}",
        "Mean difference in percentage points over pairs of equal seeds, with the interval that holds for all arms at "
        "95 %. Too few pairs, or pairs that all differ alike, have no interval.",
        traces,
        _by_name(arms, _axis("percentage points", zeroline=True)),
        Table(["arm", "difference", "interval"], rows) if traces else None,
        by_arm=True,
        missing="There is no second arm with a run that pairs with one of the reference.",
    )
