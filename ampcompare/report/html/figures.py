"""The figures of the HTML report, from the records of a comparison."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from ampcompare.formatting import printable
from ampcompare.records.comparison import Comparison
from ampcompare.records.run import RunRecord
from ampcompare.report.html.curves import Band, Curve, make_curve, over_seeds
from ampcompare.report.html.drift import drift_figure
from ampcompare.report.html.shared_settings import listed
from ampcompare.report.html.traces import (
    ArmRuns,
    FigureTable,
    Plot,
    arm_trace,
    axis,
    by_name,
    curves_of,
    not_drawn,
    plot_text,
    sig,
    stops_of,
)

__all__ = ["make_figures"]

MAX_POINTS = 100
ALL_POINTS = 1600  # of one figure, shared by its arms, so that a page of hundreds of arms stays small
NEAR_FINAL = 0.99
MIB = 2**20
SAME_PLACE = "x unified"  # one label for all arms at a step or an epoch
QUARTERS = (1, 5, 10, 15, 19)  # places of the 5, 25, 50, 75 and 95 % quantiles in a trace


def make_figures(comparison: Comparison) -> list[Plot]:
    """Return all figures, in the order of the page; one without data says why."""
    by_arm: dict[str, list[RunRecord]] = {row.arm: [] for row in comparison.arms}
    for record in comparison.records:
        by_arm.setdefault(record.arm, []).append(record)
    arms = [ArmRuns(place, row, by_arm[row.arm]) for place, row in enumerate(comparison.arms)]
    most = max(12, min(MAX_POINTS, ALL_POINTS // max(1, len(arms))))
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
        drift_figure(arms),
        _memory(arms),
    ]


def _why_no_epoch(arm: ArmRuns) -> str:
    if any(record.status == "diverged" for record in arm.records):
        step = min(record.summary.diverged_step or 0 for record in arm.records if record.status == "diverged")
        return f"diverged at step {step}, before the first evaluation"
    return "failed" if arm.row.failed else "no results"


def _epochs(record: RunRecord, value: Callable[[Any], float]) -> Curve:
    return make_curve((epoch.epoch + 1, value(epoch)) for epoch in record.summary.epochs)


def _epoch_axis(traces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    last = max((x for trace in traces for x in trace["x"]), default=0)
    return axis("epoch", dtick=1) if last <= 12 else axis("epoch", tickformat="d")


def _accuracy(arms: Sequence[ArmRuns], most: int) -> Plot:
    traces: list[dict[str, Any]] = []
    bands: list[tuple[ArmRuns, Band]] = []
    for arm in arms:
        curves = [(record, _epochs(record, lambda epoch: 100 * epoch.top1)) for record in arm.ran]
        band = over_seeds((curve for _, curve in curves), most)
        bands.append((arm, band))
        traces += curves_of(arm, band, "%{y:.2f} %", markers=len(band.x) <= 30) + stops_of(arm, curves)
    return Plot(
        "accuracy",
        "Validation accuracy",
        f"Top-1 in percent after each epoch.{not_drawn(arms, traces, _why_no_epoch)}",
        traces,
        {"hovermode": SAME_PLACE, "xaxis": _epoch_axis(traces), "yaxis": axis("top-1 %")},
        _by_epoch(bands),
        missing="No epoch was evaluated.",
    )


def _by_epoch(bands: Sequence[tuple[ArmRuns, Band]]) -> FigureTable | None:
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
    return FigureTable(["arm", *(f"epoch {longest[place]:g}" for place in places)], rows)


def _validation_loss(arms: Sequence[ArmRuns], most: int) -> Plot:
    traces: list[dict[str, Any]] = []
    for arm in arms:
        curves = [(record, _epochs(record, lambda epoch: epoch.loss)) for record in arm.ran]
        band = over_seeds((curve for _, curve in curves), most)
        traces += curves_of(arm, band, "%{y:.4g}", markers=len(band.x) <= 30) + stops_of(arm, curves)
    return Plot(
        "validation-loss",
        "Validation loss",
        "Mean loss over the validation set after each epoch.",
        traces,
        {"hovermode": SAME_PLACE, "xaxis": _epoch_axis(traces), "yaxis": axis("loss")},
        can_log=True,
        missing="No epoch was evaluated.",
    )


def _traced(record: RunRecord, values: Sequence[float]) -> Curve:
    return make_curve(zip(record.trace.steps, values, strict=False)) if record.trace else Curve([], [])


NO_TRACE = "These records were made before runs kept a trace of their steps; run the cells again with --force."


def _training_loss(arms: Sequence[ArmRuns], most: int) -> Plot:
    traces: list[dict[str, Any]] = []
    for arm in arms:
        curves = [(record, _before_divergence(record)) for record in arm.ran]
        traces += curves_of(arm, over_seeds((curve for _, curve in curves), most), "%{y:.4g}") + stops_of(arm, curves)
    return Plot(
        "training-loss",
        "Training loss",
        "Loss of single steps, evenly chosen."
        + not_drawn(arms, traces, lambda arm: "no finite loss" if any(r.trace for r in arm.ran) else "no trace"),
        traces,
        {"hovermode": SAME_PLACE, "xaxis": axis("step"), "yaxis": axis("loss")},
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


def _loss_scale(arms: Sequence[ArmRuns], most: int) -> Plot:
    traces: list[dict[str, Any]] = []
    for arm in arms:
        curves = [(record, make_curve(_positive(record))) for record in arm.ran]
        band = over_seeds((curve for _, curve in curves), most, hold=True, mean=statistics.geometric_mean)
        traces += curves_of(arm, band, "%{y:,.6g}", stairs=True) + stops_of(arm, curves)
    values = [y for trace in traces for y in trace["y"]]
    ticks = _powers_of_two(min(values), max(values)) if values else {}
    unscaled = [arm.name for arm in arms if arm.ran and any(r.trace and not r.trace.loss_scales for r in arm.ran)]
    note = f" Without loss scaling: {listed(unscaled)}." if unscaled else ""
    return Plot(
        "loss-scale",
        "Loss scale",
        f"After each step; a drop is an overflow.{note}",
        traces,
        {"hovermode": SAME_PLACE, "xaxis": axis("step"), "yaxis": axis("loss scale", type="log", **ticks)},
        missing=NO_TRACE if not any(r.trace for arm in arms for r in arm.ran) else "No arm scales its loss.",
    )


def _positive(record: RunRecord) -> list[tuple[int, float]]:
    """Return steps and loss scales that a logarithmic axis can show."""
    pairs = zip(record.trace.steps, record.trace.loss_scales, strict=False) if record.trace else ()
    return [(step, scale) for step, scale in pairs if scale > 0]


def _powers_of_two(low: float, high: float) -> dict[str, Any]:
    first, last = math.floor(math.log2(low)), math.ceil(math.log2(high))
    exponents = range(last, first - 1, -max(1, math.ceil((last - first) / 8)))
    return {
        "tickvals": [2.0**power for power in exponents],
        "ticktext": [f"2<sup>{power}</sup>" if power else "1" for power in exponents],
        "range": [math.log10(2) * (first - 0.6), math.log10(2) * (last + 0.6)],
    }


def _skipped(arms: Sequence[ArmRuns], most: int) -> Plot:
    traces: list[dict[str, Any]] = []
    for arm in arms:
        curves = [(record, _traced(record, record.trace.skipped)) for record in arm.ran if record.trace]
        band = over_seeds((curve for _, curve in curves), most, hold=True)
        traces += curves_of(arm, band, "%{y:.4g}", stairs=True) + stops_of(arm, curves)
    return Plot(
        "skipped",
        "Skipped steps",
        "Updates skipped for an overflow, counted up from the first step."
        + (" None was skipped." if traces and not any(y for trace in traces for y in trace["y"]) else ""),
        traces,
        {"hovermode": SAME_PLACE, "xaxis": axis("step"), "yaxis": axis("skipped steps", rangemode="tozero")},
        missing=NO_TRACE,
    )


def _step_times(arms: Sequence[ArmRuns]) -> Plot:
    traces: list[dict[str, Any]] = []
    rows: list[list[str]] = []
    for arm in arms:
        known = [record.trace.step_seconds for record in arm.ran if record.trace and record.trace.step_seconds]
        if not known:
            rows.append([arm.name, *["-"] * len(QUARTERS)])
            continue
        times = [1e3 * statistics.fmean(quantiles[place] for quantiles in known) for place in QUARTERS]
        rows.append([arm.name, *(f"{value:.3g}" for value in times)])
        low, first, median, third, high = ([sig(value, 4)] for value in times)
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
    return Plot(
        "step-times",
        "Time of a step",
        "After the warm-up: median; box: quartiles; whiskers: 5 to 95 %; quantiles are means over seeds.",
        traces,
        by_name(arms, axis("milliseconds", rangemode="tozero")),
        FigureTable(["arm", "5 %", "25 %", "median", "75 %", "95 % (ms)"], rows) if traces else None,
        by_arm=True,
        missing=NO_TRACE,
    )


def _seconds(record: RunRecord) -> list[float]:
    """Return the time trained up to the end of each epoch."""
    return list(accumulate(epoch.train_seconds for epoch in record.summary.epochs))


def _accuracy_over_time(arms: Sequence[ArmRuns], most: int, reference: str) -> Plot:
    traces: list[dict[str, Any]] = []
    target, meaning = _target(arms, reference)
    for arm in arms:
        by_epoch = over_seeds((_epochs(r, lambda epoch: 100 * epoch.top1) for r in arm.ran), most)
        spent = over_seeds((make_curve(enumerate(_seconds(r), 1)) for r in arm.ran), most)
        band = Band(spent.mean, by_epoch.mean, by_epoch.low, by_epoch.high)
        traces += curves_of(arm, band, "%{y:.2f} % at %{x:.3g} s", markers=len(band.x) <= 30)
    shapes = [] if target is None else [{"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": target, "y1": target}]
    return Plot(
        "time-to-accuracy",
        "Time to accuracy",
        f"Top-1 over seconds of training, evaluation left out.{meaning}",
        traces,
        {"xaxis": axis("seconds of training", rangemode="tozero"), "yaxis": axis("top-1 %"), "shapes": shapes},
        None if target is None else _time_to(arms, target),
        missing="No epoch was evaluated.",
    )


def _target(arms: Sequence[ArmRuns], reference: str) -> tuple[float | None, str]:
    """Return the accuracy in percent that arms are timed to, and a sentence on where it comes from."""
    known = [arm for arm in arms if arm.row.top1_mean is not None]
    chosen = next((arm for arm in known if arm.row.arm == reference), known[0] if known else None)
    if chosen is None or chosen.row.top1_mean is None:
        return None, ""
    target = sig(100 * NEAR_FINAL * chosen.row.top1_mean, 4)
    return target, f" The dotted line is {target:g} %: {100 * NEAR_FINAL:g} % of what {chosen.name} ends with."


def _reaches(record: RunRecord, target: float) -> tuple[int, float] | None:
    """Return epochs and seconds until a run first has an accuracy in percent."""
    for epoch, seconds in zip(record.summary.epochs, _seconds(record), strict=True):
        if 100 * epoch.top1 >= target:
            return epoch.epoch + 1, seconds
    return None


def _time_to(arms: Sequence[ArmRuns], target: float) -> FigureTable:
    rows = []
    for arm in arms:
        reached = [found for record in arm.ran if (found := _reaches(record, target)) is not None]
        epochs = f"{statistics.fmean(epoch for epoch, _ in reached):.3g}" if reached else "-"
        seconds = f"{statistics.fmean(spent for _, spent in reached):.3g}" if reached else "-"
        spread = f" ± {statistics.stdev(spent for _, spent in reached):.1g}" if len(reached) > 1 else ""
        rows.append([arm.name, f"{len(reached)} of {len(arm.ran)}", epochs, seconds + spread])
    return FigureTable(["arm", f"runs that reach {target:g} %", "epochs", "seconds"], rows)


def _memory(arms: Sequence[ArmRuns]) -> Plot:
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "x": [sig(arm.row.peak_bytes / MIB)],
            "y": [f"a{arm.place}"],
            "name": plot_text(arm.row.arm),
            "meta": {"arm": arm.place, "role": "bar"},
            "text": [f"{arm.row.peak_bytes / MIB:,.1f}"],
            "hovertemplate": "%{x:,.1f} MiB",
        }
        for arm in arms
        if arm.row.peak_bytes is not None
    ]
    return Plot(
        "memory",
        "Peak memory",
        "Maximum over seeds. On CUDA allocated memory; on a CPU the growth of resident memory.",
        traces,
        by_name(arms, axis("MiB", rangemode="tozero")),
        by_arm=True,
        missing="No run measured its memory.",
    )


def _range(values: Sequence[float]) -> dict[str, Any]:
    mean = statistics.fmean(values)
    above, below = max(values) - mean, mean - min(values)
    return {"type": "data", "symmetric": False, "array": [sig(above)], "arrayminus": [sig(below)]}


def _pareto(arms: Sequence[ArmRuns]) -> Plot:
    traces: list[dict[str, Any]] = []
    rows: list[list[str]] = []
    for arm in arms:
        done = [r.summary for r in arm.completed if r.summary.top1_final is not None and r.summary.epochs]
        if not done:
            continue
        seconds = [sum(epoch.train_seconds for epoch in summary.epochs) for summary in done]
        accuracies = [100 * summary.top1_final for summary in done if summary.top1_final is not None]
        spread = {"error_x": _range(seconds), "error_y": _range(accuracies)} if len(done) > 1 else {}
        hover = "%{y:.2f} % in %{x:.3g} s"
        x, y = [statistics.fmean(seconds)], [statistics.fmean(accuracies)]
        traces.append(arm_trace(arm, "point", x, y, mode="markers", hovertemplate=hover, **spread))
        rows.append([arm.name, f"{y[0]:.2f}", f"{x[0]:.3g}"])
    return Plot(
        "pareto",
        "Accuracy against time",
        "Final top-1 and seconds of training: mean, and range over seeds. The dotted line joins arms that no shown arm "
        f"beats in both.{not_drawn(arms, traces, lambda arm: 'no run was completed')}",
        traces,
        {"xaxis": axis("seconds of training"), "yaxis": axis("final top-1 %")},
        FigureTable(["arm", "final top-1 %", "seconds"], rows) if traces else None,
        missing="No run was completed.",
    )


def _differences(arms: Sequence[ArmRuns], reference: str) -> Plot:
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
            if arm.row.top1_difference_confidence is not None:
                interval += f" ({100 * arm.row.top1_difference_confidence:.3g} %)"
            bounds = {"array": [sig(100 * (high - mean))], "arrayminus": [sig(100 * (mean - low))]}
            spread = {"error_x": {"type": "data", "symmetric": False, **bounds}}
        trace = arm_trace(arm, "point", [100 * mean], [], mode="markers", hovertemplate="%{x:+.2f} points", **spread)
        traces.append({**trace, "y": [f"a{arm.place}"]})
        rows.append([arm.name, f"{100 * mean:+.2f}", interval])
    return Plot(
        "differences",
        f"Top-1 against {printable(reference, 40)}",
        "Mean difference in percentage points, paired by seed. Each interval is that of the test that decided the "
        "verdict, at the level of its step in Holm's method. An arm without a test has no interval.",
        traces,
        by_name(arms, axis("percentage points", zeroline=True)),
        FigureTable(["arm", "difference", "interval"], rows) if traces else None,
        by_arm=True,
        missing="There is no second arm with a run that pairs with one of the reference.",
    )
