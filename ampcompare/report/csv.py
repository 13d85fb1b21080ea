"""One line per cell, for spreadsheets and other programs."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from ampcompare.analysis.runs.time_validity import invalid_reason
from ampcompare.base.formatting import printable
from ampcompare.records.comparison import Comparison
from ampcompare.records.run import RunRecord
from ampcompare.report.base import Reporter
from ampcompare.report.columns import columns
from ampcompare.report.other_precisions import values_in_precisions

__all__ = ["Csv", "safe_text"]

METRIC_FIELDS = ("metric_final", "metric_best", "metric_last_mean")
SUMMARY_FIELDS = (
    "loss_final",
    "num_steps",
    "skipped_steps",
    "step_seconds_median",
    "step_seconds_iqr",
    "samples_per_second",
    "epoch_seconds",
    "peak_bytes",
    "peak_reserved_bytes",
    "final_loss_scale",
    "first_nonfinite_loss_step",
    "diverged_step",
    "start_seconds",
    "loader_start_seconds",
)
TIMES = ("step_seconds_median", "step_seconds_iqr", "samples_per_second", "epoch_seconds", "step_seconds_slowest")
PROCESS_FIELDS = ("world_size", "nodes", "global_batch_size", "allreduce_share", "step_seconds_slowest")
HEAD = ("arm", "seed", "status", "engine", "engine_version", "half", "lr", "metric")
PUBLISHED = ("top1", "top1_best", "seconds", "epoch_seconds", "peak_bytes", "diverged")
VERDICTS = ("accuracy_verdict", "time_verdict", "loss_verdict")
FORMULA = ("=", "+", "-", "@")


def safe_text(text: str) -> str:
    """Return text as one line that no spreadsheet takes for a formula."""
    line = printable(text, 2000)
    return f"'{line}" if line.startswith(FORMULA) else line


def _cell(value: object) -> object:
    return "" if value is None else value


class Csv(Reporter):
    """Plain numbers in full precision, a line per run, each with the verdicts of its arm.

    The metric of verdicts is named in its own column; each other metric has a column `NAME_final`. Shares are 0 to
    1, times in seconds, sizes in bytes. A run whose `invalid_time` says why has no times of steps; `report.json` keeps
    them. Further columns hold the published figures of the row, if any, and the columns
    of the tables that are means over runs.
    """

    def render(self, comparison: Comparison) -> str:
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        published = {line.row: line for line in reversed(comparison.published.rows)} if comparison.published else {}
        of_publication = [f"published_{name}" for name in PUBLISHED] if published else []
        of_runs = {name: column.of_run for name, column in columns(comparison).items() if column.of_run is not None}
        others = list(dict.fromkeys(metric.tag for run in comparison.records for metric in run.metrics[1:]))
        weights = [values_in_precisions(record) for record in comparison.records]
        of_weights = list(dict.fromkeys(name for values in weights for name in values))
        of_metrics = [*METRIC_FIELDS, *(f"{tag}_final" for tag in others)]
        heads = [*HEAD, *of_metrics, *SUMMARY_FIELDS, *PROCESS_FIELDS, *VERDICTS, "invalid_time", "error"]
        writer.writerow([*heads, *of_publication, *of_runs, *of_weights])
        arms = {row.arm: row for row in comparison.arms}
        for record, its_weights in zip(comparison.records, weights, strict=True):
            row = arms.get(record.arm)
            verdicts = [safe_text(getattr(row, name)) if row else "" for name in VERDICTS]
            line = published.get(record.arm)
            published_values = [_cell(getattr(line, name, None)) for name in PUBLISHED] if published else []
            run_values = [_cell(of_run(record)) for of_run in of_runs.values()]
            error = safe_text(record.error or "")
            invalid = safe_text(invalid_reason(record))
            weight_values = [_cell(its_weights.get(name)) for name in of_weights]
            writer.writerow(
                [*self._row(record, others), *verdicts, invalid, error, *published_values, *run_values, *weight_values]
            )
        return out.getvalue()

    @staticmethod
    def _row(record: RunRecord, others: Sequence[str]) -> list[object]:
        engine = record.engine
        recipe = record.config.recipe
        head: list[object] = [
            safe_text(record.arm),
            recipe.seed,
            record.status,
            engine.name if engine else "",
            safe_text(engine.version) if engine else "",
        ]
        names = {metric.tag: metric.name for metric in record.metrics}
        values = [getattr(record.summary, name) for name in METRIC_FIELDS]
        values += [record.summary.others_final.get(names.get(tag, "")) for tag in others]
        hidden = TIMES if invalid_reason(record) else ()
        values += [None if name in hidden else getattr(record.summary, name) for name in SUMMARY_FIELDS]
        values += [None if name in hidden else getattr(record.processes, name, None) for name in PROCESS_FIELDS]
        lr = recipe.optimizer.lr if record.config.script is None else None  # a script has its own
        head += [safe_text(record.half or ""), _cell(lr), safe_text(record.metric.name)]
        return [*head, *map(_cell, values)]
