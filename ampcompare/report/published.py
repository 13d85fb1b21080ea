"""Published figures next to measured ones: the columns of that table, and a line that says how comparable they are."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ampcompare.base.formatting import format_duration, format_mebibytes, format_percent, printable
from ampcompare.records.comparison import ArmSummary, Comparison
from ampcompare.records.published import PublishedRow
from ampcompare.records.run import RunRecord
from ampcompare.report.base import MAX_LINE

__all__ = ["PublishedTable", "published_legend", "published_table"]

MAX_NAMED = 6
PublishedTable = tuple[list[str], list[list[str]]]


def published_table(comparison: Comparison) -> PublishedTable | None:
    """Return headers and rows, with the columns that have a published value; None without a publication."""
    if comparison.published is None or not comparison.published.rows:
        return None
    arms = {row.arm: row for row in comparison.arms}
    lines = [
        _line(line, arms.get(line.row or ""), [record for record in comparison.records if record.arm == line.row])
        for line in comparison.published.rows
    ]
    said = {name for name in lines[0] if any(line[name] for line in lines)}
    shown = [name for name in lines[0] if name.replace(", measured", ", published") in said]
    return shown, [[line[name] or "-" for name in shown] for line in lines]


def _line(published: PublishedRow, row: ArmSummary | None, records: Sequence[RunRecord]) -> dict[str, str]:
    walls = [record.summary.wall_seconds for record in records if record.summary.wall_seconds is not None]
    names = published.name if published.row in (None, published.name) else f"{published.name} ({published.row})"
    return {
        "as published": printable(names, 80),
        "top-1 %, published": "NaN" if published.diverged and published.top1_best is None else _percent(published.top1),
        "top-1 %, measured": _percent(row.metric_mean) or _status(row) if row else "not run",
        "best %, published": _percent(published.top1_best),
        "best %, measured": _percent(row.metric_best if row else None),
        "time, published": _duration(published.seconds),
        "time, measured": _duration(statistics.fmean(walls) if walls else None),
        "epoch, published": _duration(published.epoch_seconds),
        "epoch, measured": _duration(row.epoch_seconds if row else None),
        "MiB, published": format_mebibytes(published.peak_bytes, decimals=0, missing=""),
        "MiB, measured": format_mebibytes(row.peak_bytes if row else None, decimals=0, missing=""),
        "remark": printable(published.remark, 80),
    }


def _percent(share: float | None) -> str:
    return format_percent(share, missing="")


def _duration(seconds: float | None) -> str:
    return "" if seconds is None else format_duration(seconds)


def _status(row: ArmSummary) -> str:
    return printable(row.status, 40)


def published_legend(comparison: Comparison) -> str:
    """Return one line: whose figures these are, and how the settings of the runs differ."""
    published = comparison.published
    if published is None:
        return ""
    where = f", on {published.machine}" if published.machine else ""
    words = f"Published: {published.source}{where}; one run per line. Measured: means over seeds on this machine"
    if published.scale is not None:
        words += (
            f", at scale {published.scale} of recipe {published.recipe}: the same arms and relations on other data "
            f"with another network, so directions can be compared, but numbers cannot"
        )
    elif published.differs:
        more = f" and {len(published.differs) - MAX_NAMED} more" if len(published.differs) > MAX_NAMED else ""
        words += f", with other settings than published: {'; '.join(published.differs[:MAX_NAMED])}{more}"
    return printable(f"{words}.", MAX_LINE)
