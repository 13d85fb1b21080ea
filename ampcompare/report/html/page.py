"""The report as one HTML file that opens anywhere, offline: tables for everyone, charts where scripts may run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ampcompare.analysis.answer.headline import warnings_and_answer
from ampcompare.analysis.runs.time_validity import invalid_reason
from ampcompare.base.formatting import printable
from ampcompare.records.comparison import Comparison
from ampcompare.records.metric import Metric
from ampcompare.records.run import RunRecord
from ampcompare.report.base import MAX_LINE, Reporter
from ampcompare.report.columns import columns, metric_text, table_rows, verdict_columns, verdict_rows
from ampcompare.report.html.assets import check_packages, look, page_parts, template
from ampcompare.report.html.costs import memory_plot, step_time_plot, time_charts
from ampcompare.report.html.drift import drift_chart, order_with_starts
from ampcompare.report.html.effects import accuracy_effects, time_effects
from ampcompare.report.html.learning_curves import learning_charts
from ampcompare.report.html.runs import ArmRuns, arms_with_runs, time_marks
from ampcompare.report.html.scaling_curves import scaling_charts
from ampcompare.report.html.shared_settings import arm_facts, chosen_settings, shared_environment, shared_settings
from ampcompare.report.legends import legend, overview_legend, verdict_legend
from ampcompare.report.other_precisions import precision_table
from ampcompare.report.overview import make_overview
from ampcompare.report.published import published_legend, published_table
from ampcompare.report.samples import sample_tables

__all__ = ["Html", "comparison_parts"]

MAX_POINTS = 100
ALL_POINTS = 1600  # of one chart, shared by its arms, so that a page of hundreds of arms stays small
SECTIONS = (
    ("effects", "Differences"),
    ("summary", "Summary"),
    ("figures", "Curves"),
    ("costs", "Memory and time"),
    ("runs", "Runs"),
    ("settings", "Settings"),
    ("again", "Reproduce"),
)


class Html(Reporter):
    """One page; it loads nothing, and its security policy forbids it to."""

    def render(self, comparison: Comparison) -> str:
        """Return the page.

        Raises:
            BackendUnavailable: jinja2 is not installed.
        """
        check_packages()
        arms = arms_with_runs(comparison)
        most = max(12, min(MAX_POINTS, ALL_POINTS // max(1, len(arms))))
        learning = learning_charts(arms, comparison.reference, most) + scaling_charts(arms, most)
        timing = [*time_charts(arms, comparison.reference, most), drift_chart(arms)]
        warnings, answer = warnings_and_answer(comparison)
        links = [self.logs.get(record.cell, "") for record in comparison.records]
        settings = shared_settings(comparison)
        page: str = template("report.html.j2").render(
            **comparison_parts(comparison, arms, answer, self.columns),
            warnings=[printable(line, MAX_LINE) for line in warnings],
            sections=[one for one in SECTIONS if one[0] != "effects" or len(arms) > 1],
            details=_details(comparison),
            has_effects=len(arms) > 1,
            accuracy_plot=accuracy_effects(comparison, arms),
            ratio_plot=time_effects(comparison, arms),
            verdict_headers=list(verdict_columns(comparison)),
            verdicts=[[arm or "(no name)", *cells] for arm, *cells in verdict_rows(comparison)],
            verdict_legend=verdict_legend(comparison),
            sample_tables=list(sample_tables(comparison)),
            precisions=precision_table(comparison),
            published=published_table(comparison),
            published_legend=published_legend(comparison),
            learning=learning,
            memory=memory_plot(arms),
            step_times=step_time_plot(arms),
            timing=timing,
            has_times=any(arm.timed for arm in arms),
            logs=links if any(links) else None,
            settings=settings,
            chosen=chosen_settings(comparison, settings),
            environment=shared_environment(comparison),
            arm_facts=arm_facts(comparison),
            command=printable(comparison.command, MAX_LINE),
            order=order_with_starts(comparison),
            **page_parts(
                [
                    {**look(index, row.arm), "is_reference": row.arm == comparison.reference}
                    for index, row in enumerate(comparison.arms)
                ],
                [*learning, *timing],
            ),
        )
        return page


def comparison_parts(
    comparison: Comparison, arms: list[ArmRuns], answer: Sequence[str], columns: Sequence[str] = ()
) -> dict[str, Any]:
    """Return what the page and the output of a notebook's cell have in common.

    Args:
        answer: the conclusions, the most important first.
        columns: as for `Reporter`.
    """
    title, *lead = [printable(line, MAX_LINE) for line in answer] or [_title(comparison)]
    return {
        "title": title,
        "lead": lead,
        "subtitle": _subtitle(comparison),
        "next_steps": [
            (printable(step.why, MAX_LINE), printable(step.command, MAX_LINE)) for step in comparison.next_steps
        ],
        **_overview(comparison, columns),
        "reading": [printable(line, MAX_LINE) for line in comparison.reading],
        "times_fault": _no_valid_time(arms),
        "run_headers": _run_headers(comparison.metric),
        "runs": [_run(record) for record in comparison.records],
    }


def _no_valid_time(arms: list[ArmRuns]) -> str:
    """Return why no time on the page is a result, where that is so for every arm that ran; else ""."""
    ran = [arm for arm in arms if arm.ran]
    return time_marks(ran) if ran and all(arm.time_fault for arm in ran) else ""


def _title(comparison: Comparison) -> str:
    count = len(comparison.arms)
    if count == 1:
        return f"One arm: {printable(comparison.arms[0].arm, 60)}"
    return f"{count} arms side by side"


def _what_was_trained(record: RunRecord) -> list[str]:
    config = record.config
    if config.script is not None:
        return [f"script {printable(config.script.name, 60)}"]
    recipe = config.recipe
    return [
        f"{printable(recipe.model.arch, 60)} on {printable(recipe.data.name, 60)}",
        f"{recipe.epochs} epoch{'s' if recipe.epochs > 1 else ''}",
        f"batch {recipe.batch_size}",
    ]


def _subtitle(comparison: Comparison) -> list[str]:
    words = []
    if comparison.records:
        words += _what_was_trained(comparison.records[0])
    words.append(f"{len(comparison.seeds)} seed{'s' if len(comparison.seeds) != 1 else ''}")
    words.append(f"reference {printable(comparison.reference, 60)}")
    on_cpu = str(comparison.environment.get("device", "")).startswith("cpu")
    device = comparison.environment.get("processor" if on_cpu else "device_name")
    if device:
        words.append(f"on {printable(str(device), 60)}")
    if len(comparison.records) < len(comparison.order):
        words.append(f"{len(comparison.records)} of {len(comparison.order)} runs done")
    return words


def _overview(comparison: Comparison, asked: Sequence[str]) -> dict[str, Any]:
    """Return the one table, with the notes of rows as its last column, and the lines below it."""
    overview = make_overview(comparison, asked)
    rows = [[cell.text or "-" for cell in row] for row in overview.rows]
    headers = list(overview.columns)
    if any(overview.notes):
        rows = [[*row, "; ".join(notes) or "-"] for row, notes in zip(rows, overview.notes, strict=True)]
        headers.append("notes")
    return {
        "summary": {"headers": headers, "rows": [[arm or "(no name)", *cells] for arm, *cells in rows]},
        "legends": [*overview.facts, *overview_legend(comparison, overview.columns)],
    }


def _details(comparison: Comparison) -> dict[str, Any]:
    """Return the wide table of all that was measured."""
    names = list(columns(comparison))
    rows = [[arm or "(no name)", *cells] for arm, *cells in table_rows(comparison)]
    return {"headers": names, "rows": rows, "legend": legend(comparison)}


def _run_headers(metric: Metric) -> list[str]:
    """Return the heads of the table of runs."""
    best = "best %" if metric.unit == "%" else "best"
    of_metric = [printable(metric.head), best]
    return ["arm", "seed", "status", *of_metric, "loss", "step ms", "train s", "MiB", "loss scale", "skipped", "note"]


def _run(record: RunRecord) -> list[str]:
    """Return the line of one run under `_run_headers`."""
    metric = record.metric
    summary = record.summary
    train_seconds = sum(epoch.train_seconds for epoch in summary.epochs) if summary.epochs else None
    note = record.error or ""
    if summary.diverged_step is not None:
        note = f"step {summary.diverged_step}: {summary.divergence}"
    return [
        printable(record.arm, 60) or "(no name)",
        str(record.config.recipe.seed),
        record.status,
        metric_text(metric, summary.metric_final),
        metric_text(metric, summary.metric_best),
        _number(summary.loss_final, "{:.4g}"),
        *(
            _time(seconds, factor, record)
            for seconds, factor in ((summary.step_seconds_median, 1e3), (train_seconds, 1))
        ),
        _number(summary.peak_bytes, "{:,.1f}", 2**-20),
        _number(summary.final_loss_scale, "{:g}"),
        f"{summary.skipped_steps}/{summary.num_steps}" if summary.num_steps else "-",
        printable(note, 160) or "-",
    ]


def _time(seconds: float | None, factor: float, record: RunRecord) -> str:
    """Return a time of a run in the unit of its column; a word if the times of the run are invalid."""
    return "invalid" if seconds is not None and invalid_reason(record) else _number(seconds, "{:.3g}", factor)


def _number(value: float | None, form: str, factor: float = 1) -> str:
    return "-" if value is None else form.format(value * factor)
