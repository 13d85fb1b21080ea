"""Results as notebooks show them: text, and HTML without scripts whose style reaches nothing else on the page."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from ampcompare.analysis.answer.headline import warnings_and_answer
from ampcompare.analysis.summary import summarize
from ampcompare.base.formatting import printable
from ampcompare.base.shown import ShownParts
from ampcompare.records.comparison import Comparison
from ampcompare.records.diagnosis import Diagnosis
from ampcompare.records.run import RunRecord
from ampcompare.report.base import FORMATS, MAX_LINE
from ampcompare.report.diagnosis import diagnosis_text
from ampcompare.report.html.assets import look, style, template
from ampcompare.report.html.charts import HEIGHT, WIDTH, make_picture
from ampcompare.report.html.costs import memory_plot, step_time_plot
from ampcompare.report.html.diagnosis_page import diagnosis_parts
from ampcompare.report.html.effects import accuracy_effects, time_effects
from ampcompare.report.html.learning_curves import learning_charts
from ampcompare.report.html.page import comparison_parts
from ampcompare.report.html.runs import arms_with_runs
from ampcompare.report.terminal import Judged, Terminal

__all__ = ["comparison_view", "diagnosis_view", "parts_view", "record_view", "scoped_style", "view"]

TEXT_WIDTH = 100
MOST_POINTS = 60
MOST_ARMS = 24  # with curves: a page draws as many as it likes, an output of a cell should stay small
# What says in which colors a page is shown, before what the reader's system says: JupyterLab and nbconvert, VS Code,
# sites of mkdocs-material, Colab.
DARK = (
    '[data-jp-theme-light="false"]',
    ".vscode-dark",
    '[data-md-color-scheme="slate"]',
    'html[theme="dark"]',
    '[data-theme="dark"]',
)
LIGHT = (
    '[data-jp-theme-light="true"]',
    ".vscode-light",
    '[data-md-color-scheme="default"]',
    'html[theme="light"]',
    '[data-theme="light"]',
)
VARIABLES = re.compile(r'^:root(?:\[data-theme="dark"\])? \{\n(.*?)^\}\n', re.DOTALL | re.MULTILINE)
SYSTEM = re.compile(r"^@media \(prefers-color-scheme: dark\) \{\n.*?^\}\n", re.DOTALL | re.MULTILINE)


@cache
def scoped_style() -> str:
    """Return the style of the page for what is inside of one element: nested rules, and colors on that element."""
    whole = style("report.css")
    light, dark = VARIABLES.findall(whole)
    rest = VARIABLES.sub("", SYSTEM.sub("", whole)).replace("\nbody {", "\n& {").replace("\nhtml", "\n.html")
    here = ".ampcompare-view"
    return "\n".join(
        [
            f"{here} {{ {light} }}",
            f"@media (prefers-color-scheme: dark) {{ {here} {{ {dark} }} }}",
            f":is({', '.join(LIGHT)}) {here} {{ {light} }}",
            f":is({', '.join(DARK)}) {here} {{ {dark} }}",
            # Twice, to win against the rules that JupyterLab has for all tables of outputs.
            f"{here}{here} {{\n{rest}\n{style('notebook.css')}\n}}",
        ]
    )


def view(name: str, **parts: Any) -> str | None:
    """Return a template of a view filled in; None without the packages of the page."""
    if FORMATS["html"].missing:
        return None
    filled: str = template(name).render(**{"warnings": [], "subtitle": [], **parts, "css": scoped_style()})
    return filled


def comparison_view(comparison: Comparison) -> tuple[str, str | None]:
    """Return a comparison as text and as HTML: the answer, the one table, differences, curves and costs."""
    reporter = (Judged if comparison.judged else Terminal)()
    text = reporter.render(comparison).rstrip("\n")
    if FORMATS["html"].missing:
        return f'{text}\n\nWith figures: pip install "ampcompare[html]"', None
    arms = arms_with_runs(comparison)
    few = arms[:MOST_ARMS]
    charts = learning_charts(few, comparison.reference, MOST_POINTS)
    warnings, answer = warnings_and_answer(comparison)
    html = view(
        "comparison_view.html.j2",
        **comparison_parts(comparison, arms, answer),
        warnings=[printable(line, MAX_LINE) for line in warnings],
        effects=[accuracy_effects(comparison, arms), time_effects(comparison, arms)] if len(arms) > 1 else [],
        pictures=[make_picture(chart) for chart in charts if chart.is_drawn],
        size=(WIDTH, HEIGHT),
        costs=[] if comparison.judged else [memory_plot(arms), step_time_plot(arms)],
        arms=[
            {**look(index, row.arm), "is_reference": row.arm == comparison.reference}
            for index, row in enumerate(comparison.arms)
        ],
    )
    return text, html


def record_view(record: RunRecord) -> tuple[str, str | None]:
    """Return a single run, as a comparison of one arm."""
    return comparison_view(summarize([record], arms=[record.arm], reference=record.arm))


def diagnosis_view(diagnosis: Diagnosis) -> tuple[str, str | None]:
    """Return a diagnosis as text and as HTML: all that its page shows."""
    html = None
    if not FORMATS["html"].missing:
        html = view("diagnosis.html.j2", **diagnosis_parts(diagnosis), page="notebook.html.j2")
    return diagnosis_text(diagnosis, width=TEXT_WIDTH).rstrip("\n"), html


def parts_view(result: ShownParts) -> tuple[str, str | None]:
    """Return a result of parts as text, and as HTML with its tables, lists and code."""
    parts = result._parts()
    html = view(
        "table_view.html.j2",
        title=printable(parts.title, MAX_LINE),
        subtitle=[printable(text, 300) for text in parts.subtitle],
        warnings=[printable(text, 500) for text in parts.warnings],
        tables=[
            {"title": title, "headers": list(headers), "rows": [[printable(text, 500) for text in row] for row in rows]}
            for title, headers, rows in parts.tables
        ],
        lists=parts.lists,
        codes=parts.codes,
    )
    return parts.text, html
