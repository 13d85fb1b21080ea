"""Read the record of `ampcompare exec --record` and summarize it; needs no torch."""

import os
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ampcompare.base.errors import RecordError
from ampcompare.base.files.read import FileFault, open_regular_file, parse_json, read_text
from ampcompare.base.formatting import format_count, printable_line
from ampcompare.results.records.document import parse_json_number
from ampcompare.results.report.document import Document, Section, Table, Text
from ampcompare.script.recording.tail import rows_only_in_tail_file

FORMAT = "ampcompare-exec"
SCHEMA = 1
MAX_BYTES = 2**31
HEADERS = [
    *("item", "count", "skipped", "overflows", "scale min", "scale max", "final scale"),
    *("first loss", "last loss", "median step s"),
]
MAX_NAME = 60
OTHER_ROWS = (
    *("setup", "weights", "batches", "metric", "memory", "files"),
    *("note", "rank", "plain_backward", "acted", "ledger"),
    *("planned", "seeds", "lost_statistics", "remark", "rounded_codes", "equal_numbers", "guard"),
)


@dataclass
class LossSummary:
    """Backward passes of one `loss_id`."""

    backwards: int = 0
    overflows: int = 0
    scale_min: float | None = None
    scale_max: float | None = None
    scale_final: float | None = None
    loss_first: float | None = None
    loss_last: float | None = None


@dataclass
class OptimizerSummary:
    """Steps of one optimizer; the median is over the time from the end of one step to the end of the next."""

    name: str
    steps: int = 0
    skipped: int = 0
    seconds: list[float] = field(default_factory=list)

    @property
    def median_seconds_without_first(self) -> float | None:
        """Median step time, without the first step."""
        return statistics.median(self.seconds) if self.seconds else None


@dataclass
class ExecSummary:
    """The content of a record. `ended` is None if the process was killed, or is still running."""

    header: dict[str, Any]
    losses: dict[int, LossSummary] = field(default_factory=dict)
    optimizers: dict[int, OptimizerSummary] = field(default_factory=dict)
    opt_levels: list[str] = field(default_factory=list)
    ended: dict[str, Any] | None = None


def is_exec_record(path: Path) -> bool:
    """Return whether a file begins like a record of `ampcompare exec`."""
    try:
        with os.fdopen(open_regular_file(path), encoding="utf-8") as file:
            first = parse_json(file.readline(1_000_000))
    except (OSError, ValueError):
        return False
    return isinstance(first, dict) and first.get("format") == FORMAT


def read_exec_record(path: Path) -> ExecSummary:
    """Read and summarize a record, of which a truncated last line is ignored.

    Raises:
        RecordError: it cannot be read, has another schema, or a line that is no row.
    """
    try:
        lines = read_text(path, max_bytes=MAX_BYTES).splitlines()
    except FileFault as fault:
        raise RecordError(f"cannot read the record {path}: {fault}") from None
    summary = ExecSummary(parse_json(lines[0]))
    if summary.header.get("schema") != SCHEMA:
        raise RecordError(
            f"{path} has schema {summary.header.get('schema')}, and this version reads {SCHEMA}; upgrade ampcompare"
        )
    rows = [summary.header]
    for number, line in enumerate(lines[1:], 2):
        try:
            rows.append(parse_json(line))
            update_summary_by_row(summary, rows[-1])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if number == len(lines):
                break
            raise RecordError(f"{path}, line {number}, is not a row of a record: {error!r}") from None
    for row in rows_only_in_tail_file(path, rows):
        update_summary_by_row(summary, row)
    return summary


def update_summary_by_row(summary: ExecSummary, row: dict[str, Any]) -> None:
    """Add a row to the sums."""
    # which writes no row of its own for a scaler
    if row["kind"] == "weights" and "recorder" in summary.header:
        for number, name in enumerate(row["optimizers"]):
            summary.optimizers.setdefault(number, OptimizerSummary(name))
    if row["kind"] not in OTHER_ROWS:
        ROWS[row["kind"]](summary, row)


def summary_text(summary: ExecSummary) -> str:
    """Return the steps, the skipped ones and the last loss scales, as in "12 steps, 1 skipped, loss scale 32768"."""
    steps = sum(one.steps for one in summary.optimizers.values())
    skipped = sum(one.skipped for one in summary.optimizers.values())
    scales = [
        f"{one.scale_final:.6g}" for _, one in sorted(summary.losses.items()) if one.scale_final is not None
    ]
    if not scales:
        scaling = "no loss scale"
    else:
        scaling = f"loss scale{'s' if len(scales) > 1 else ''} {', '.join(scales)}"
    return f"{format_count(steps, 'step')}, {skipped} skipped, {scaling}"


def _finite_or_none(value: Any) -> float | None:
    return None if value is None else parse_json_number(value)


def _add_initialize_row(summary: ExecSummary, row: dict[str, Any]) -> None:
    summary.opt_levels.append(str(row["opt_level"]))
    for number, name in row["optimizers"].items():
        summary.optimizers.setdefault(int(number), OptimizerSummary(name))


def _add_backward_row(summary: ExecSummary, row: dict[str, Any]) -> None:
    loss = summary.losses.setdefault(int(row["loss_id"]), LossSummary())
    value = _finite_or_none(row["loss"])
    if loss.backwards == 0:
        loss.loss_first = value
    loss.loss_last = value
    loss.backwards += 1
    loss.overflows += bool(row["overflow"])
    scales = [
        scale
        for scale in (_finite_or_none(row["scale_before"]), _finite_or_none(row["scale_after"]))
        if scale is not None
    ]
    if scales:
        loss.scale_min = min([*scales, *([] if loss.scale_min is None else [loss.scale_min])])
        loss.scale_max = max([*scales, *([] if loss.scale_max is None else [loss.scale_max])])
        loss.scale_final = scales[-1]


def _add_step_row(summary: ExecSummary, row: dict[str, Any]) -> None:
    optimizer = summary.optimizers.setdefault(int(row["optimizer"]), OptimizerSummary("?"))
    optimizer.steps += 1
    optimizer.skipped += not row["applied"]
    if row["seconds"] is not None:
        optimizer.seconds.append(float(row["seconds"]))


def _add_end_row(summary: ExecSummary, row: dict[str, Any]) -> None:
    summary.ended = row


ROWS = {
    "initialize": _add_initialize_row,
    "backward": _add_backward_row,
    "step": _add_step_row,
    "end": _add_end_row,
}


def summary_headers_and_rows(summary: ExecSummary) -> tuple[list[str], list[list[str]]]:
    """Return headers and one row per optimizer and loss; what does not apply is empty."""
    rows = [_table_row_of_optimizer(number, one) for number, one in sorted(summary.optimizers.items())]
    return HEADERS, rows + [_table_row_of_loss(number, one) for number, one in sorted(summary.losses.items())]


def _table_row_of_optimizer(number: int, one: OptimizerSummary) -> list[str]:
    median = one.median_seconds_without_first
    name = f"optimizer {number} ({printable_line(one.name, 40)})"
    return [name, str(one.steps), str(one.skipped), *[""] * 6, "" if median is None else f"{median:.4g}"]


def _table_row_of_loss(number: int, one: LossSummary) -> list[str]:
    figures = [one.scale_min, one.scale_max, one.scale_final, one.loss_first, one.loss_last]
    shown = ["" if value is None else f"{value:.6g}" for value in figures]
    return [f"loss {number}", str(one.backwards), "", str(one.overflows), *shown, ""]


def ending_sentence(summary: ExecSummary) -> str:
    """Return one sentence: script, engine, levels, and how it ended."""
    header, ended = summary.header, summary.ended
    if ended is None:
        end = "the record has no end: the process was killed, or is still running"
    elif ended.get("exit_code") is None:
        end = "this is the record of a process that the script started"
    else:
        error = f" by {ended.get('error')}" if ended.get("error") else ""
        end = f"it ended with exit code {ended.get('exit_code')}{error}"
    levels = ", ".join(dict.fromkeys(summary.opt_levels)) or "never initialized"
    version = str(header.get("engine_version", "")).removesuffix("+compat")
    if "recorder" in header:
        there = header.get("environment") or {}
        apex = f", the genuine Apex {there['apex']}" if "apex" in there else ""
        return f"{header.get('script')} on Python {there.get('python')}, torch {there.get('torch')}{apex}; {end}."
    return f"{header.get('script')} on engine {header.get('engine')} {version}, amp {levels}; {end}."


def summary_as_plain_data(summary: ExecSummary) -> dict[str, Any]:
    """Return the summary as plain data."""
    return {
        "header": summary.header,
        "opt_levels": summary.opt_levels,
        "optimizers": [
            {
                "optimizer": number,
                "name": one.name,
                "steps": one.steps,
                "skipped": one.skipped,
                "median_step_seconds": one.median_seconds_without_first,
            }
            for number, one in sorted(summary.optimizers.items())
        ],
        "losses": [{"loss_id": number, **vars(one)} for number, one in sorted(summary.losses.items())],
        "end": summary.ended,
    }


def record_document(path: Path) -> Document:
    """Return the report of a record, before it has a format: a table with a row per optimizer and loss."""
    summary = read_exec_record(path)
    heads, rows = summary_headers_and_rows(summary)
    sections = [
        Section("endings", [Text([printable_line(ending_sentence(summary), 500)])]),
        Section(
            "records",
            [Table.from_rows(heads, [[cell or "-" for cell in row] for row in rows])],
            "Optimizers and losses",
        ),
        Section("values", [Table.for_programs([head.replace(" ", "_") for head in heads], rows)]),
    ]
    title = f"{printable_line(str(summary.header.get('script')), MAX_NAME)}: {summary_text(summary)}"
    return Document(
        "exec",
        sections,
        summary_as_plain_data(summary),
        title=title,
        subtitle=[printable_line(path.name, MAX_NAME)],
    )
