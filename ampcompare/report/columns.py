"""The columns of the tables of measurements and of verdicts, which all formats share."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ampcompare.formatting import MIB, format_mebibytes, format_percent, format_seconds, printable
from ampcompare.records.comparison import ArmSummary, Comparison
from ampcompare.records.run import RunRecord

__all__ = ["COLUMNS", "VERDICTS", "Column", "columns", "over_runs", "table_rows", "verdict_rows"]


def _always(comparison: Comparison) -> bool:
    return True


@dataclass(frozen=True)
class Column:
    """One column of a table with a row per arm.

    Attributes:
        text: of an arm's row and its records; "-" if there is no value.
        applies: whether a comparison has values for the column; else no table shows it.
        of_run: its value for one run, which the CSV then has too; None if there is no such value.
    """

    text: Callable[[ArmSummary, Sequence[RunRecord]], str]
    applies: Callable[[Comparison], bool] = _always
    of_run: Callable[[RunRecord], float | None] | None = None

    def __call__(self, row: ArmSummary, records: Sequence[RunRecord] = ()) -> str:
        """Return the text for an arm."""
        return self.text(row, records)


def of_arm(text: Callable[[ArmSummary], str], applies: Callable[[Comparison], bool] = _always) -> Column:
    """Return a column of what the summary of an arm holds."""
    return Column(lambda row, records: text(row), applies)


def over_runs(
    value: Callable[[RunRecord], float | None],
    form: Callable[[float], str],
    applies: Callable[[Comparison], bool] = _always,
) -> Column:
    """Return a column of the mean over the completed runs of an arm; the CSV has the value of each run.

    Args:
        value: of one run; None if it has none.
        form: text of a mean, such as `"{:.2f}".format`.
        applies: as for `Column`.
    """

    def text(row: ArmSummary, records: Sequence[RunRecord]) -> str:
        completed = [value(record) for record in records if record.status == "completed"]
        measured = [number for number in completed if number is not None]
        return form(statistics.fmean(measured)) if measured else "-"

    return Column(text, applies, value)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def _ratio(row: ArmSummary) -> str:
    return _number(row.valid_time_ratio, ".2f")


def _ratio_interval(row: ArmSummary) -> str:
    ratio = row.valid_time_ratio
    if ratio is None or row.time_ratio_low is None or row.time_ratio_high is None:
        return _ratio(row)
    return f"{ratio:.2f} ({row.time_ratio_low:.2f} to {row.time_ratio_high:.2f})"


def _difference_interval(row: ArmSummary) -> str:
    if row.top1_difference is None:
        return "-"
    shown = f"{100 * row.top1_difference:+.2f}"
    if row.top1_difference_low is None or row.top1_difference_high is None:
        return shown
    return f"{shown} ({100 * row.top1_difference_low:+.2f} to {100 * row.top1_difference_high:+.2f})"


def _memory_difference(row: ArmSummary) -> str:
    if row.memory_difference is None:
        return printable(row.memory_verdict, 60) or "-"
    return f"{row.memory_difference / MIB:+.1f}"


def _skipped(row: ArmSummary) -> str:
    return "-" if row.skipped_steps is None else f"{row.skipped_steps}/{row.num_steps}"


def _arm(row: ArmSummary) -> str:
    return printable(row.arm, 60) + (f" (ran {row.ran})" if row.ran else "")


def _engine(row: ArmSummary) -> str:
    engine = row.engine and row.engine.removesuffix("+compat")  # its name says so already
    words = [word for word in (engine, row.half if row.half and row.half.endswith("emulated") else None) if word]
    return printable("; ".join(words), 60) or "torch"


def _start_differs(comparison: Comparison) -> bool:
    """Return whether ways to start processes and loaders are compared."""
    configs = [record.config for record in comparison.records]
    return len({(config.launcher, config.workers, config.threads) for config in configs}) > 1


def _has_ranks(comparison: Comparison) -> bool:
    return any(row.allreduce_share is not None for row in comparison.arms)


COLUMNS: dict[str, Column] = {
    "arm": of_arm(_arm),
    "lr": of_arm(lambda row: f"{row.lr:g}"),
    "top-1 %": of_arm(lambda row: format_percent(row.top1_mean, row.top1_sd)),
    "best %": of_arm(lambda row: format_percent(row.top1_best)),
    "epoch s": of_arm(lambda row: format_seconds(row.epoch_seconds, row.epoch_seconds_sd)),
    "memory MiB": of_arm(lambda row: format_mebibytes(row.peak_bytes)),
    "samples/s": of_arm(lambda row: _number(None if row.invalid_time else row.samples_per_second, ",.0f")),
    "time / ref": of_arm(_ratio),
    "loss scale": of_arm(lambda row: _number(row.final_loss_scale, "g")),
    "skipped": of_arm(_skipped),
    "status": of_arm(lambda row: printable(row.status, 60)),
    "engine": of_arm(_engine),
    "start s": of_arm(lambda row: format_seconds(row.start_seconds), _start_differs),
    "first batch s": of_arm(lambda row: format_seconds(row.loader_start_seconds), _start_differs),
    "all-reduce %": of_arm(lambda row: format_percent(row.allreduce_share), _has_ranks),
}
"""The table of measurements. A new line here is in every format."""

VERDICTS: dict[str, Column] = {
    "arm": of_arm(_arm),
    "top-1 points": of_arm(_difference_interval),
    "accuracy": of_arm(lambda row: printable(row.accuracy_verdict, 60) or "-"),
    "step time": of_arm(_ratio_interval),
    "time": of_arm(lambda row: printable(row.time_verdict, 60) or "-"),
    "MiB": of_arm(_memory_difference),
    "pairs": of_arm(lambda row: str(row.pairs)),
}
"""The table of verdicts."""


def columns(comparison: Comparison) -> dict[str, Column]:
    """Return the columns that a comparison has values for."""
    return {name: column for name, column in COLUMNS.items() if column.applies(comparison)}


def table_rows(comparison: Comparison) -> list[list[str]]:
    """Return the texts of the table of measurements: a row per arm, in the order of `columns`."""
    return _rows(comparison, comparison.arms, columns(comparison))


def verdict_rows(comparison: Comparison) -> list[list[str]]:
    """Return the texts of the table of verdicts: a row per arm except the reference, in the order of `VERDICTS`."""
    return _rows(comparison, [row for row in comparison.arms if row.arm != comparison.reference], VERDICTS)


def _rows(comparison: Comparison, arms: Sequence[ArmSummary], shown: dict[str, Column]) -> list[list[str]]:
    records: dict[str, list[RunRecord]] = {}
    for record in comparison.records:
        records.setdefault(record.arm, []).append(record)
    return [[column(row, records.get(row.arm, ())) for column in shown.values()] for row in arms]
