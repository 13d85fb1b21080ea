"""The page of several experiments: a forest plot and a table for accuracy, and the same for the step time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ampcompare.formatting import printable
from ampcompare.records.forest import ExperimentEffect, Forest, Measure, PooledEffect
from ampcompare.report.base import MAX_LINE
from ampcompare.report.forest_tables import HEADERS, TITLES, forest_legend, forest_rows
from ampcompare.report.html.page import check_packages, look, page_parts, template
from ampcompare.report.html.traces import FigureTable, Plot, axis, plot_text, sig

__all__ = ["forest_page"]

ROW_HEIGHT = 26
FRAME_HEIGHT = 90
SHORTEST = 180


def forest_page(forest: Forest) -> str:
    """Return the page; it loads nothing.

    Raises:
        BackendUnavailable: jinja2 or plotly is not installed.
    """
    check_packages()
    arms = list(dict.fromkeys(effect.arm for effect in forest.effects))
    looks = [look(place, arm) for place, arm in enumerate(arms, 1)]  # the first color is the reference's
    plots = [_plot(forest, measure, arms) for measure in HEADERS]
    page: str = template("forest.html.j2").render(
        title=f"{len(forest.experiments)} experiments side by side",
        subtitle=[f"reference {printable(forest.reference, 60)}", *(printable(arm, 60) for arm in arms[:6])],
        legend=forest_legend(forest),
        notes=[printable(note, MAX_LINE) for note in forest.notes],
        experiments=[
            [
                printable(one.name, 60),
                printable(one.model, 60),
                printable(one.data, 60),
                printable(", ".join(map(str, one.seeds)), 60),
            ]
            for one in forest.experiments
        ],
        **page_parts([{**one, "on": True} for one in looks], plots),
    )
    return page


def _plot(forest: Forest, measure: Measure, arms: Sequence[str]) -> Plot:
    """Return one figure: a row for each effect, and for each arm a diamond over all of its experiments."""
    traces: list[dict[str, Any]] = []
    names: list[str] = []
    for place, arm in enumerate(arms):
        for effect in forest.effects:
            if (effect.arm, effect.measure) == (arm, measure) and effect.value is not None:
                traces.append(_point(effect, place, f"r{len(names)}"))
                names.append(plot_text(effect.experiment, 26))
        for pooled in forest.pooled:
            if (pooled.arm, pooled.measure) == (arm, measure):
                traces += _diamond(pooled, place, f"r{len(names)}")
                names.append(f"<b>{plot_text(arm, 20)}, all</b>")
    rows = [f"r{number}" for number in range(len(names))]
    edge = forest.margin if measure == "accuracy" else 1 + forest.time_margin
    edges = (-edge, edge) if measure == "accuracy" else (1 / edge, edge)
    unit = axis("points of top-1") if measure == "accuracy" else axis("ratio of step times", type="log")
    return Plot(
        f"forest-{measure}",
        f"{TITLES[measure]} against {printable(forest.reference, 40)}",
        "Each experiment with its interval of 95 %; a diamond: the mean over those that could be tested, with the "
        "interval of its test, and dotted what another experiment would measure. Dotted upright lines: the margin.",
        traces,
        {
            "height": max(SHORTEST, FRAME_HEIGHT + ROW_HEIGHT * len(names)),
            "margin": {"l": 12},
            "xaxis": {**unit, "zeroline": measure == "accuracy"},
            "yaxis": {
                "type": "category",
                "autorange": "reversed",
                "showgrid": False,
                "categoryorder": "array",
                "categoryarray": rows,
                "tickvals": rows,
                "ticktext": names,
            },
            "shapes": [{"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": x, "x1": x} for x in edges],
        },
        FigureTable(HEADERS[measure], forest_rows(forest, measure)),
        missing="No experiment measured it.",
    )


def _scaled(value: float, measure: Measure) -> float:
    return sig(100 * value if measure == "accuracy" else value)


def _bars(value: float, low: float | None, high: float | None, measure: Measure) -> dict[str, Any]:
    if low is None or high is None:
        return {}
    above, below = _scaled(high, measure) - _scaled(value, measure), _scaled(value, measure) - _scaled(low, measure)
    return {"error_x": {"type": "data", "symmetric": False, "array": [sig(above)], "arrayminus": [sig(below)]}}


def _trace(place: int, role: str, x: Sequence[float], row: str, name: str, **options: Any) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "x": list(x),
        "y": [row] * len(x),
        "name": plot_text(name),
        "meta": {"arm": place, "role": role},
        **options,
    }


def _point(effect: ExperimentEffect, place: int, row: str) -> dict[str, Any]:
    value = effect.value or 0.0
    bars = _bars(value, effect.low, effect.high, effect.measure)
    x = [_scaled(value, effect.measure)]
    return _trace(place, "point", x, row, effect.arm, hovertemplate="%{x:.3g}", **bars)


def _diamond(pooled: PooledEffect, place: int, row: str) -> list[dict[str, Any]]:
    measure = pooled.measure
    traces = []
    if pooled.prediction_low is not None and pooled.prediction_high is not None:
        ends = [_scaled(pooled.prediction_low, measure), _scaled(pooled.prediction_high, measure)]
        traces.append(_trace(place, "prediction", ends, row, pooled.arm, hoverinfo="x") | {"mode": "lines"})
    bars = _bars(pooled.value, pooled.low, pooled.high, measure)
    x = [_scaled(pooled.value, measure)]
    return [*traces, _trace(place, "pooled", x, row, pooled.arm, hovertemplate="%{x:.3g}", **bars)]
