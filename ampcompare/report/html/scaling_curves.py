"""Charts of the loss scale and of skipped steps; where nothing changes, a sentence instead of a chart."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ampcompare.records.run import RunRecord
from ampcompare.report.html.charts import Chart, Series, View, band_series, stops_of
from ampcompare.report.html.curves import make_curve, over_seeds
from ampcompare.report.html.learning_curves import NO_TRACE, traced
from ampcompare.report.html.runs import ArmRuns
from ampcompare.report.html.shared_settings import listed

__all__ = ["scaling_charts"]


def scaling_charts(arms: Sequence[ArmRuns], most: int) -> list[Chart]:
    """Return the loss scale and the skipped steps, each with at most `most` points per curve."""
    return [_loss_scale(arms, most), _skipped(arms, most)]


def _loss_scale(arms: Sequence[ArmRuns], most: int) -> Chart:
    series: list[Series] = []
    stops: list[Series] = []
    constant: dict[float, list[str]] = {}
    for arm in arms:
        curves = [(record, make_curve(_positive(record))) for record in arm.ran]
        band = over_seeds((curve for _, curve in curves), most, hold=True, mean=statistics.geometric_mean)
        if band.x and not band.has_width and band.low[0] == max(band.high) == min(band.low):
            constant.setdefault(band.low[0], []).append(arm.name)
            continue
        series += band_series(arm, band, stairs=True)
        stops += stops_of(arm, curves)
    unscaled = [arm.name for arm in arms if arm.ran and any(r.trace and not r.trace.loss_scales for r in arm.ran)]
    words = [f"{scale:,g} in {listed(names)}" for scale, names in sorted(constant.items(), reverse=True)]
    said = f"Constant: {'; '.join(words)}." if words else ""
    none = f"Without loss scaling: {listed(unscaled)}." if unscaled else ""
    sentence = ""
    if not series:
        has_trace = any(record.trace for arm in arms for record in arm.ran)
        sentence = (
            " ".join(filter(None, (said, none))) if words else "No arm scales its loss." if has_trace else NO_TRACE
        )
    return Chart(
        "loss-scale",
        "Loss scale",
        " ".join(filter(None, ("After each step; a drop is an overflow.", said, none))),
        "step",
        [View("", "loss scale", series, stops, log="always")],
        sentence=sentence,
    )


def _positive(record: RunRecord) -> list[tuple[int, float]]:
    """Return steps and loss scales that a logarithmic axis can show."""
    pairs = zip(record.trace.steps, record.trace.loss_scales, strict=False) if record.trace else ()
    return [(step, scale) for step, scale in pairs if scale > 0]


def _skipped(arms: Sequence[ArmRuns], most: int) -> Chart:
    series: list[Series] = []
    stops: list[Series] = []
    without: list[str] = []
    for arm in arms:
        curves = [(record, traced(record, record.trace.skipped)) for record in arm.ran if record.trace]
        band = over_seeds((curve for _, curve in curves), most, hold=True)
        if band.x and not any(band.high):
            without.append(arm.name)
            continue
        series += band_series(arm, band, stairs=True)
        stops += stops_of(arm, curves)
    sentence = ""
    if not series:
        sentence = "No arm skipped a step." if without else NO_TRACE
    none = f" None were skipped in {listed(without)}." if without else ""
    return Chart(
        "skipped",
        "Skipped steps",
        f"Updates skipped for an overflow, counted up from the first step.{none}",
        "step",
        [View("", "skipped steps", series, stops, whole=True)],
        sentence=sentence,
    )
