"""The columns of the tables of measurements and of verdicts, which all formats share."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ampcompare.formatting import MIB, format_mebibytes, format_percent, format_seconds, printable
from ampcompare.records.comparison import ArmSummary, Comparison
from ampcompare.records.run import RunRecord
from ampcompare.report.intervals import format_interval
from ampcompare.report.verdict_words import is_emulated

__all__ = [
    "COLUMNS",
    "VERDICTS",
    "Column",
    "arm_engine",
    "arm_name",
    "columns",
    "difference_interval",
    "over_runs",
    "ratio_interval",
    "records_by_arm",
    "step_milliseconds",
    "table_rows",
    "verdict_rows",
]


def _always(comparison: Comparison) -> bool:
    return True


@dataclass(frozen=True)
class Column:
    """One column of a table with a row per arm.

    Attributes:
        text: of an arm's row and its records; "-" if there is no value.
        applies: whether a comparison has values for the column; else no table shows it.
        of_run: its value for one run, which the CSV then has too; None if there is no such value.
        overview: whether the one table that a report begins with has it too, where it has room.
    """

    text: Callable[[ArmSummary, Sequence[RunRecord]], str]
    applies: Callable[[Comparison], bool] = _always
    of_run: Callable[[RunRecord], float | None] | None = None
    overview: bool = False

    def __call__(self, row: ArmSummary, records: Sequence[RunRecord] = ()) -> str:
        """Return the text for an arm."""
        return self.text(row, records)


def of_arm(
    text: Callable[[ArmSummary], str],
    applies: Callable[[Comparison], bool] = _always,
    *,
    overview: bool = False,
) -> Column:
    """Return a column of what the summary of an arm holds."""
    return Column(lambda row, records: text(row), applies, overview=overview)


def over_runs(
    value: Callable[[RunRecord], float | None],
    form: Callable[[float], str],
    applies: Callable[[Comparison], bool] = _always,
    *,
    overview: bool = False,
) -> Column:
    """Return a column of the mean over the completed runs of an arm; the CSV has the value of each run.

    Args:
        value: of one run; None if it has none.
        form: text of a mean, such as `"{:.2f}".format`.
        applies: as for `Column`, and so is `overview`.
    """

    def text(row: ArmSummary, records: Sequence[RunRecord]) -> str:
        completed = [value(record) for record in records if record.status == "completed"]
        measured = [number for number in completed if number is not None]
        return form(statistics.fmean(measured)) if measured else "-"

    return Column(text, applies, value, overview)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def step_milliseconds(row: ArmSummary) -> str:
    """Return the step time with two decimals below 10 ms and one above; a word where it is no result."""
    if row.step_seconds_median is None or (row.invalid_time and not row.completed):
        return "-"
    if is_emulated(row):
        return "emulated"
    if row.invalid_time:
        return "invalid"
    milliseconds = 1000 * row.step_seconds_median
    return f"{milliseconds:,.{2 if milliseconds < 10 else 1 if milliseconds < 1000 else 0}f}"


def _ratio(row: ArmSummary) -> str:
    return _number(row.valid_time_ratio, ".2f")


def ratio_interval(row: ArmSummary, comparison: Comparison) -> str:
    """Return the step time over the reference's, with the interval of the deciding test; "-" where it is invalid."""
    ratio = row.valid_time_ratio
    if ratio is None:
        return "-"
    limits = (1 / (1 + comparison.time_margin), 1.0, 1 + comparison.time_margin)
    return format_interval(ratio, row.time_ratio_low, row.time_ratio_high, limits)


def difference_interval(row: ArmSummary, comparison: Comparison) -> str:
    """Return the difference to the reference with the interval of the deciding test, in pp or the judged unit."""
    if row.metric_difference is None:
        return "-"
    table = comparison.judged
    factor, decimals = (100.0, 2) if table is None else (table.factor, table.decimals)
    low, high = (
        None if bound is None else factor * bound for bound in (row.metric_difference_low, row.metric_difference_high)
    )
    limits = (-comparison.margin, 0.0, comparison.margin)
    return format_interval(factor * row.metric_difference, low, high, limits, decimals=decimals, sign="+")


def _memory_difference(row: ArmSummary) -> str:
    if row.memory_difference is None:
        return printable(row.memory_verdict, 60) or "-"
    return f"{row.memory_difference / MIB:+.1f}"


def _skipped(row: ArmSummary) -> str:
    return "-" if row.skipped_steps is None else f"{row.skipped_steps}/{row.num_steps}"


def arm_name(row: ArmSummary) -> str:
    """Return the name of an arm, with what another library ran in its place."""
    return printable(row.arm, 60) + (f" (ran {row.ran})" if row.ran else "")


def arm_engine(row: ArmSummary) -> str:
    """Return the engine or library that an arm ran on, with its version; "" for torch."""
    return printable((row.engine or "").removesuffix("+compat"), 60)  # its name says so already


def _engine(row: ArmSummary) -> str:
    words = [
        word for word in (arm_engine(row), row.half if row.half and row.half.endswith("emulated") else None) if word
    ]
    return printable("; ".join(words), 60) or "torch"


def _start_differs(comparison: Comparison) -> bool:
    """Return whether ways to start processes and loaders are compared."""
    configs = [record.config for record in comparison.records]
    return len({(config.launcher, config.workers, config.threads) for config in configs}) > 1


def _has_ranks(comparison: Comparison) -> bool:
    return any(row.allreduce_share is not None for row in comparison.arms)


COLUMNS: dict[str, Column] = {
    "arm": of_arm(arm_name),
    "lr": of_arm(lambda row: f"{row.lr:g}"),
    "top-1 %": of_arm(lambda row: format_percent(row.metric_mean, row.metric_sd)),
    "best top-1 %": of_arm(lambda row: format_percent(row.metric_best)),
    "epoch (s)": of_arm(lambda row: format_seconds(row.epoch_seconds, row.epoch_seconds_sd)),
    "peak MiB": of_arm(lambda row: format_mebibytes(row.peak_bytes)),
    "step (ms)": of_arm(step_milliseconds),
    "samples/s": of_arm(
        lambda row: _number(None if row.invalid_time or is_emulated(row) else row.samples_per_second, ",.0f")
    ),
    "rel. time": of_arm(_ratio),
    "final loss scale": of_arm(lambda row: _number(row.final_loss_scale, "g")),
    "skipped steps": of_arm(_skipped),
    "status": of_arm(lambda row: printable(row.status, 60)),
    "engine": of_arm(_engine),
    "start (s)": of_arm(lambda row: format_seconds(row.start_seconds), _start_differs),
    "first batch (s)": of_arm(lambda row: format_seconds(row.loader_start_seconds), _start_differs),
    "all-reduce %": of_arm(lambda row: format_percent(row.allreduce_share), _has_ranks),
}
"""The table of measurements. A new line here is in every format."""

VERDICTS: dict[str, Callable[[ArmSummary, Comparison], str]] = {
    "arm": lambda row, comparison: arm_name(row),
    "Δ top-1 (pp)": difference_interval,
    "accuracy verdict": lambda row, comparison: printable(row.accuracy_verdict, 60) or "-",
    "rel. time": ratio_interval,
    "time verdict": lambda row, comparison: printable(row.time_verdict, 60) or "-",
    "Δ peak MiB": lambda row, comparison: _memory_difference(row),
    "paired seeds": lambda row, comparison: str(row.pairs),
}
"""The table of verdicts."""


def columns(comparison: Comparison) -> dict[str, Column]:
    """Return the columns that a comparison has values for."""
    return {name: column for name, column in COLUMNS.items() if column.applies(comparison)}


def table_rows(comparison: Comparison) -> list[list[str]]:
    """Return the texts of the table of measurements: a row per arm, in the order of `columns`."""
    records = records_by_arm(comparison)
    shown = columns(comparison).values()
    return [[column(row, records.get(row.arm, ())) for column in shown] for row in comparison.arms]


def verdict_rows(comparison: Comparison) -> list[list[str]]:
    """Return the texts of the table of verdicts: a row per arm except the reference, in the order of `VERDICTS`."""
    others = [row for row in comparison.arms if row.arm != comparison.reference]
    return [[text(row, comparison) for text in VERDICTS.values()] for row in others]


def records_by_arm(comparison: Comparison) -> dict[str, list[RunRecord]]:
    """Return the records of each arm."""
    records: dict[str, list[RunRecord]] = {}
    for record in comparison.records:
        records.setdefault(record.arm, []).append(record)
    return records
