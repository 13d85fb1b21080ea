"""The formats of a report of several experiments."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable

from tabulate import tabulate

from ampcompare.base.errors import ConfigError
from ampcompare.base.formatting import printable
from ampcompare.records.forest import Forest, Measure
from ampcompare.records.run import dump_json
from ampcompare.report.base import MAX_LINE
from ampcompare.report.csv import safe_text
from ampcompare.report.forest_tables import MEASURES, forest_legend, forest_rows, headers, title
from ampcompare.report.markdown import escaped
from ampcompare.report.tables import grid
from ampcompare.report.terminal import paragraph

__all__ = ["render_forest"]

CSV_HEAD = (
    *("measure", "arm", "experiment", "pairs", "experiments", "value", "low", "high", "confidence", "prediction_low"),
    *("prediction_high", "tau", "i_squared", "verdict", "left_out"),
)


def render_forest(forest: Forest, form: str, width: int | None = None) -> str:
    """Return the text of a format.

    Raises:
        ConfigError: the format has no report of several experiments.
        BackendUnavailable: for HTML jinja2 is not installed.
    """
    if form == "html":
        from ampcompare.report.html.forest_page import forest_page

        return forest_page(forest)
    formats: dict[str, Callable[[], str]] = {
        "table": lambda: _terminal(forest, width),
        "md": lambda: _markdown(forest),
        "csv": lambda: _csv(forest),
        "json": lambda: dump_json(forest) + "\n",
    }
    if form not in formats:
        known = ", ".join([*formats, "html"])
        raise ConfigError(
            f"there is no {form} report of several experiments; use --format {known}, or name one of them"
        )
    return formats[form]()


def _measures(forest: Forest) -> list[Measure]:
    return [measure for measure in MEASURES if any(effect.measure == measure for effect in forest.effects)]


def _terminal(forest: Forest, width: int | None) -> str:
    tables = [grid(forest_rows(forest, measure), headers(forest, measure), width) for measure in _measures(forest)]
    headline, lines = (
        "\n".join(paragraph(line, width) for line in part)
        for part in (forest.headline, [forest_legend(forest), *forest.notes])
    )
    return "\n\n".join(filter(None, [headline, *tables, lines])) + "\n"


def _markdown(forest: Forest) -> str:
    parts = [
        f"# {len(forest.experiments)} experiments",
        *([" ".join(map(escaped, forest.headline))] if forest.headline else []),
    ]
    for measure in _measures(forest):
        rows = [[escaped(cell) for cell in row] for row in forest_rows(forest, measure)]
        table: str = tabulate(rows, headers=headers(forest, measure), tablefmt="pipe", disable_numparse=True)
        parts += [f"## {title(forest, measure)}", table]
    parts += [escaped(printable(line, MAX_LINE)) for line in (forest_legend(forest), *forest.notes)]
    return "\n\n".join(parts) + "\n"


def _csv(forest: Forest) -> str:
    """Return plain numbers: differences as shares of 1, ratios of times, tau of a time as that of the logarithm."""
    out = io.StringIO()
    writer = csv.DictWriter(out, CSV_HEAD, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for line in (*forest.effects, *forest.pooled):
        values = {name: value for name, value in line.model_dump().items() if value is not None}
        writer.writerow({name: safe_text(value) if isinstance(value, str) else value for name, value in values.items()})
    return out.getvalue()
