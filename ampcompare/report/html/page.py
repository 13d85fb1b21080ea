"""The report as one HTML file that opens anywhere, offline: tables for everyone, figures where scripts may run."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from ampcompare import __version__
from ampcompare.errors import BackendUnavailable
from ampcompare.formatting import printable
from ampcompare.records.comparison import Comparison
from ampcompare.records.run import RunRecord
from ampcompare.report.base import MAX_LINE, Reporter
from ampcompare.report.columns import VERDICTS, columns, table_rows, verdict_rows
from ampcompare.report.formats import FORMATS
from ampcompare.report.html.drift import order_with_starts
from ampcompare.report.html.figures import make_figures
from ampcompare.report.html.shared_settings import arm_facts, shared_environment, shared_settings
from ampcompare.report.html.traces import Plot
from ampcompare.report.images import image_tables
from ampcompare.report.published import published_legend, published_table
from ampcompare.report.terminal import legend, verdict_legend

__all__ = ["SHOWN_AT_FIRST", "Html", "check_packages", "look", "page_parts", "template"]

SHOWN_AT_FIRST = 12
COLORS = 9  # in report.css
DASHES = ("solid", "dash", "dot", "dashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "pentagon", "hexagon", "star")
NUMBER = re.compile(r"[-+]?[\d.,]+(e[-+]?\d+)?( ± \S+)?( \(.*\))?(/\d+)?|-|nan|inf|-inf")
FIXED_WORDS = {
    "better": "good",
    "ok": "good",
    "identical": "good",
    "equivalent": "good",
    "non-inferior": "good",
    "worse": "bad",
    "failed": "bad",
    "diverged": "bad",
    "invalid": "unclear",
    "learned nothing": "unclear",
    "no verdict": "unclear",
    "inconclusive": "unclear",
    "not comparable": "unclear",
    "interrupted": "unclear",
    "not run": "unclear",
}


class Html(Reporter):
    """One page; it loads nothing, and its security policy forbids it to."""

    def render(self, comparison: Comparison) -> str:
        """Return the page.

        Raises:
            BackendUnavailable: jinja2 or plotly is not installed.
        """
        check_packages()
        figures = make_figures(comparison)
        page: str = template("report.html.j2").render(
            title=_title(comparison),
            comparison=comparison,
            subtitle=_subtitle(comparison),
            reading=[printable(line, MAX_LINE) for line in comparison.reading],
            legend=legend(comparison),
            verdict_headers=list(VERDICTS),
            verdicts=[[arm or "(no name)", *cells] for arm, *cells in verdict_rows(comparison)],
            verdict_legend=verdict_legend(comparison),
            image_tables=list(image_tables(comparison)),
            published=published_table(comparison),
            published_legend=published_legend(comparison),
            summary=_summary(comparison),
            run_headers=RUN_HEADERS,
            runs=[_run(record) for record in comparison.records],
            settings=shared_settings(comparison),
            environment=shared_environment(comparison),
            arm_facts=arm_facts(comparison),
            command=printable(comparison.command, MAX_LINE),
            order=order_with_starts(comparison),
            **page_parts([look(place, row.arm) for place, row in enumerate(comparison.arms)], figures),
        )
        return page


def check_packages() -> None:
    """Check that what a page is made with is installed.

    Raises:
        BackendUnavailable: jinja2 or plotly is not.
    """
    form = FORMATS["html"]
    if form.missing:
        raise BackendUnavailable(
            f"the HTML report needs {' and '.join(form.missing)}, which this environment does not have; "
            f"pip install {' '.join(form.packages)}"
        )


def page_parts(arms: Sequence[dict[str, Any]], figures: Sequence[Plot]) -> dict[str, Any]:
    """Return what every page is given: its arms and figures, style, scripts and their policy."""
    drawn = [
        {"key": figure.key, "traces": figure.traces, "layout": figure.layout, "byArm": figure.by_arm}
        for figure in figures
        if figure.traces
    ]
    return {
        "version": __version__,
        "arms": arms,
        "figures": figures,
        "shown_at_first": SHOWN_AT_FIRST,
        "css": _text("report.css"),
        "scripts": [_plotly(), _text("report.js")],
        "policy": _policy(_plotly(), _text("report.js")),
        "data": _embedded({"arms": arms, "figures": drawn}),
    }


@cache
def template(name: str) -> Any:
    """Return a template by its file name."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    loader = FunctionLoader(_text)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["numeric"] = _numeric
    environment.filters["sense"] = _sense
    return environment.get_template(name)


def _numeric(rows: Sequence[Sequence[str]], count: int) -> list[bool]:
    """Return for each of `count` columns whether it holds numbers and is aligned right."""
    columns = [[row[place] for row in rows] for place in range(count)]
    return [
        all(NUMBER.fullmatch(text) for text in column) and any(char.isdigit() for text in column for char in text)
        for column in columns
    ]


@cache
def _text(name: str) -> str:
    return (files("ampcompare.report.html") / "templates" / name).read_text(encoding="utf-8")


@cache
def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    script: str = get_plotlyjs()
    return script


@cache
def _policy(*scripts: str) -> str:
    """Return a policy under which these scripts run, by their digests, and nothing is loaded from anywhere."""
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _embedded(data: Any) -> str:
    """Return JSON that can stand inside a script element: no text in it can close the element or open another."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def look(place: int, arm: str) -> dict[str, Any]:
    """Return how an arm looks everywhere on the page: color, symbol, and dashes if colors repeat."""
    again = place // COLORS
    return {
        "name": printable(arm, 60) or "(no name)",
        "color": place % COLORS,
        "dash": DASHES[again % len(DASHES)],
        "symbol": SYMBOLS[place % COLORS] + ("-open" if again % 2 else ""),
        "on": place < SHOWN_AT_FIRST,
    }


def _title(comparison: Comparison) -> str:
    count = len(comparison.arms)
    if count == 1:
        return f"One arm: {printable(comparison.arms[0].arm, 60)}"
    return f"{count} arms side by side"


def _subtitle(comparison: Comparison) -> list[str]:
    words = []
    if comparison.records:
        recipe = comparison.records[0].config.recipe
        words.append(f"{printable(recipe.model.arch, 60)} on {printable(recipe.data.name, 60)}")
        words.append(f"{recipe.epochs} epoch{'s' if recipe.epochs > 1 else ''}")
        words.append(f"batch {recipe.batch_size}")
    words.append(f"{len(comparison.seeds)} seed{'s' if len(comparison.seeds) != 1 else ''}")
    words.append(f"reference {printable(comparison.reference, 60)}")
    on_cpu = str(comparison.environment.get("device", "")).startswith("cpu")
    device = comparison.environment.get("processor" if on_cpu else "device_name")
    if device:
        words.append(f"on {printable(str(device), 60)}")
    if len(comparison.records) < len(comparison.order):
        words.append(f"{len(comparison.records)} of {len(comparison.order)} runs done")
    return words


def _sense(text: str) -> str:
    """Return how a verdict or status is colored, by the fixed word that it begins with."""
    return next((sense for word, sense in FIXED_WORDS.items() if text.lower().startswith(word)), "")


def _summary(comparison: Comparison) -> dict[str, Any]:
    """Return the wide table: the arm with its engine, and the columns of every other format."""
    names = list(columns(comparison))
    shown = ["status", *(name for name in names if name not in ("arm", "engine", "status"))]
    rows = []
    for summary, row in zip(comparison.arms, table_rows(comparison), strict=True):
        cells = dict(zip(names, row, strict=True))
        rows.append(
            {
                "arm": cells["arm"] or "(no name)",
                "engine": cells["engine"],
                "is_reference": summary.arm == comparison.reference,
                "cells": [cells[name] for name in shown],
            }
        )
    return {"headers": shown, "rows": rows}


RUN_HEADERS = (
    "arm", "seed", "status", "top-1 %", "best %", "loss", "step ms", "train s", "MiB", "loss scale", "skipped", "note"
)  # fmt: skip


def _run(record: RunRecord) -> list[str]:
    """Return the line of one run under `RUN_HEADERS`."""
    summary = record.summary
    train_seconds = sum(epoch.train_seconds for epoch in summary.epochs) if summary.epochs else None
    note = record.error or ""
    if summary.diverged_step is not None:
        note = f"step {summary.diverged_step}: {summary.divergence}"
    return [
        printable(record.arm, 60) or "(no name)",
        str(record.config.recipe.seed),
        record.status,
        _number(summary.top1_final, "{:.2f}", 100),
        _number(summary.top1_best, "{:.2f}", 100),
        _number(summary.loss_final, "{:.4g}"),
        _number(summary.step_seconds_median, "{:.3g}", 1e3),
        _number(train_seconds, "{:.3g}"),
        _number(summary.peak_bytes, "{:,.1f}", 2**-20),
        _number(summary.final_loss_scale, "{:g}"),
        f"{summary.skipped_steps}/{summary.num_steps}" if summary.num_steps else "-",
        printable(note, 160) or "-",
    ]


def _number(value: float | None, form: str, factor: float = 1) -> str:
    return "-" if value is None else form.format(value * factor)
