"""The contract of a report format, and the columns that all tables share."""

from __future__ import annotations

import abc
from collections.abc import Callable

from ampcompare.comparison import ArmSummary, Comparison

__all__ = ["COLUMNS", "LONGEST_LINE", "VERDICTS", "Reporter", "columns", "printable", "table_rows", "verdict_rows"]

LONGEST_LINE = 100_000  # a reading names every arm, and there may be hundreds


class Reporter(abc.ABC):
    """Turns a comparison into text."""

    @abc.abstractmethod
    def render(self, comparison: Comparison) -> str:
        """Return the report; it ends with a newline."""


def printable(text: str, longest: int = 120) -> str:
    """Return text that came from a user's names or errors as one harmless line."""
    line = "".join(char if char.isprintable() else " " for char in " ".join(text.split()))
    return line if len(line) <= longest else line[: longest - 1] + "…"


def _percent(value: float | None, sd: float | None = None) -> str:
    if value is None:
        return "-"
    return f"{100 * value:.2f}" + (f" ± {100 * sd:.2f}" if sd is not None else "")


def _seconds(value: float | None, sd: float | None = None) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" + (f" ± {sd:.1g}" if sd is not None else "")


def _mebibytes(value: int | None) -> str:
    return "-" if value is None else f"{value / 2**20:.1f}"


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _ratio(row: ArmSummary) -> str:
    return "-" if row.time_ratio is None else f"{row.time_ratio:.2f}"


def _ratio_interval(row: ArmSummary) -> str:
    if row.time_ratio is None or row.time_ratio_low is None or row.time_ratio_high is None:
        return _ratio(row)
    return f"{row.time_ratio:.2f} ({row.time_ratio_low:.2f} to {row.time_ratio_high:.2f})"


def _difference_interval(row: ArmSummary) -> str:
    if row.top1_difference is None:
        return "-"
    shown = f"{100 * row.top1_difference:+.2f}"
    if row.top1_difference_low is None or row.top1_difference_high is None:
        return shown
    return f"{shown} ({100 * row.top1_difference_low:+.2f} to {100 * row.top1_difference_high:+.2f})"


def _memory_difference(row: ArmSummary) -> str:
    return "-" if row.memory_difference is None else f"{row.memory_difference / 2**20:+.1f}"


def _skipped(row: ArmSummary) -> str:
    return "-" if row.skipped_steps is None else f"{row.skipped_steps}/{row.num_steps}"


def _scale(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _arm(row: ArmSummary) -> str:
    return printable(row.arm, 60) + (f" (ran {row.ran})" if row.ran else "")


def _engine(row: ArmSummary) -> str:
    engine = row.engine and row.engine.removesuffix("+compat")  # its name says so already
    words = [word for word in (engine, row.half if row.half == "fp16 emulated" else None) if word]
    return printable("; ".join(words), 60) or "torch"


COLUMNS: dict[str, Callable[[ArmSummary], str]] = {
    "arm": _arm,
    "lr": lambda row: f"{row.lr:g}",
    "top-1 %": lambda row: _percent(row.top1_mean, row.top1_sd),
    "best %": lambda row: _percent(row.top1_best),
    "epoch s": lambda row: _seconds(row.epoch_seconds, row.epoch_seconds_sd),
    "memory MiB": lambda row: _mebibytes(row.peak_bytes),
    "samples/s": lambda row: _count(row.samples_per_second),
    "time / ref": _ratio,
    "loss scale": lambda row: _scale(row.final_loss_scale),
    "skipped": _skipped,
    "status": lambda row: printable(row.status, 60),
    "engine": _engine,
}


LAUNCHED: dict[str, Callable[[ArmSummary], str]] = {
    "start s": lambda row: _seconds(row.start_seconds),
    "first batch s": lambda row: _seconds(row.loader_start_seconds),
}
EXCHANGE: dict[str, Callable[[ArmSummary], str]] = {"all-reduce %": lambda row: _percent(row.allreduce_share)}


VERDICTS: dict[str, Callable[[ArmSummary], str]] = {
    "arm": _arm,
    "top-1 points": _difference_interval,
    "accuracy": lambda row: printable(row.accuracy_verdict, 60) or "-",
    "step time": _ratio_interval,
    "time": lambda row: printable(row.time_verdict, 60) or "-",
    "MiB": _memory_difference,
    "pairs": lambda row: str(row.pairs),
}


def columns(comparison: Comparison) -> dict[str, Callable[[ArmSummary], str]]:
    """Return the columns of the table: those of every table, and those that only some comparisons have values for."""
    found = dict(COLUMNS)
    ways = {(cell.launcher, cell.workers, cell.threads) for cell in (record.config for record in comparison.records)}
    if len(ways) > 1:  # how processes and loaders are started is what is compared
        found |= LAUNCHED
    if any(row.allreduce_share is not None for row in comparison.arms):
        found |= EXCHANGE
    return found


def table_rows(comparison: Comparison) -> list[list[str]]:
    """Return the cells of the table, a row per arm in the order of `columns`."""
    shown = columns(comparison)
    return [[column(row) for column in shown.values()] for row in comparison.arms]


def verdict_rows(comparison: Comparison) -> list[list[str]]:
    """Return the cells of the table of verdicts in the order of `VERDICTS`: a row per arm but the reference."""
    others = [row for row in comparison.arms if row.arm != comparison.reference]
    return [[column(row) for column in VERDICTS.values()] for row in others]
