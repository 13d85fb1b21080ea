"""Published figures next to measured ones: the columns of that table, and a line that says how far to trust it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ampcompare.comparison import ArmSummary, Comparison
from ampcompare.published import PublishedRow
from ampcompare.record import RunRecord
from ampcompare.report.base import LONGEST_LINE, printable

__all__ = ["PublishedTable", "published_legend", "published_table"]

MIB = 2**20
MOST_NAMED = 6
PublishedTable = tuple[list[str], list[list[str]]]


def published_table(comparison: Comparison) -> PublishedTable | None:
    """Return headers and rows, only with columns that somebody published something for; None without a publication."""
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
        "top-1 %, measured": _percent(row.top1_mean) or _status(row) if row else "not run",
        "best %, published": _percent(published.top1_best),
        "best %, measured": _percent(row.top1_best if row else None),
        "time, published": _clock(published.seconds),
        "time, measured": _clock(statistics.fmean(walls) if walls else None),
        "epoch, published": _clock(published.epoch_seconds),
        "epoch, measured": _clock(row.epoch_seconds if row else None),
        "MiB, published": _mebibytes(published.peak_bytes),
        "MiB, measured": _mebibytes(row.peak_bytes if row else None),
        "remark": printable(published.remark, 80),
    }


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f}"


def _mebibytes(size: int | None) -> str:
    return "" if size is None else f"{size / MIB:.0f}"


def _status(row: ArmSummary) -> str:
    return printable(row.status, 40)


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return ""
    if seconds < 60:
        return f"{seconds:.3g}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m{rest:02d}s" if hours else f"{minutes}m{rest:02d}s"


def published_legend(comparison: Comparison) -> str:
    """Return one line: whose figures these are, and in what the runs beside them differ."""
    published = comparison.published
    if published is None:
        return ""
    where = f", on {published.machine}" if published.machine else ""
    words = f"Published: {published.source}{where}; one run per line. Measured: means over seeds on this machine"
    if published.scale is not None:
        words += (
            f", at scale {published.scale} of recipe {published.recipe}: the same arms and relations on other data "
            "with another network, so directions can be held against each other, numbers cannot"
        )
    elif published.differs:
        more = f" and {len(published.differs) - MOST_NAMED} more" if len(published.differs) > MOST_NAMED else ""
        words += f", with other settings than published: {'; '.join(published.differs[:MOST_NAMED])}{more}"
    return printable(f"{words}.", LONGEST_LINE)
