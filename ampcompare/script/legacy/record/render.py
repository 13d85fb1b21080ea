"""Reports of records of `ampcompare exec`: of one, or of several side by side."""

from __future__ import annotations

import csv
import io
import os
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tabulate import tabulate

from ampcompare.base.errors import ConfigError
from ampcompare.base.formatting import printable
from ampcompare.records.run import dump_json
from ampcompare.report.base import MAX_LINE
from ampcompare.report.csv import safe_text
from ampcompare.report.markdown import escaped
from ampcompare.report.tables import grid
from ampcompare.script.legacy.record.summary import REPORT_FORMATS, ExecSummary, document, ending, in_words, tabulated

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["render_records"]

MAX_NAME = 60
NamedRecord = tuple[str, ExecSummary]


def render_records(paths: Sequence[Path], summaries: Sequence[ExecSummary], form: str, width: int | None = None) -> str:
    """Return the report of records; it ends with a newline.

    One record is a table with a row per optimizer and loss. Several are side by side: a row per figure, and a column
    for each record, under the part of its path that tells it from the others.

    Args:
        form: one of `REPORT_FORMATS`.
        width: that a table for a terminal is folded to.

    Raises:
        ConfigError: there is no such format.
        BackendUnavailable: for HTML jinja2 is not installed.
    """
    if form not in REPORT_FORMATS:
        formats = ", ".join(REPORT_FORMATS)
        raise ConfigError(f"{paths[0]} is a record of exec, which has no {form} report; use --format {formats}")
    names = _short_names(paths)
    if form == "json":
        found = [{"file": name, **document(one)} for name, one in zip(names, summaries, strict=True)]
        return dump_json(document(summaries[0]) if len(found) == 1 else found) + "\n"
    headers, rows = tabulated(summaries[0]) if len(summaries) == 1 else _side_by_side(names, summaries)
    if form == "csv":
        text = io.StringIO()
        heads = [safe_text(name.replace(" ", "_") if len(summaries) == 1 else name) for name in headers]
        csv.writer(text, lineterminator="\n").writerows([heads, *rows])
        return text.getvalue()
    shown = [[cell or "-" for cell in row] for row in rows]
    lines = [_line(name, one, alone=len(names) == 1) for name, one in zip(names, summaries, strict=True)]
    if form == "html":
        return _page(headers, shown, lines, names, summaries)
    if form == "table":
        return f"{grid(shown, headers, width)}\n\n" + "".join(f"{line}\n" for line in lines)
    cells = [[escaped(cell) for cell in row] for row in shown]
    table = tabulate(cells, headers=list(map(escaped, headers)), tablefmt="github", disable_numparse=True)
    return f"{table}\n\n" + "\n".join(f"{escaped(line)}\n" for line in lines)


def _line(name: str, summary: ExecSummary, *, alone: bool) -> str:
    text = f"{ending(summary)}{_diagnose(summary)}"
    return printable(text if alone else f"{name}: {text}", 500)


def _diagnose(summary: ExecSummary) -> str:
    """Return what to run to see where overflows began; nothing if there are none."""
    overflows = sum(loss.overflows for loss in summary.losses.values())
    if not overflows:
        return ""
    passes = f"{overflows} backward pass{'' if overflows == 1 else 'es'} overflowed"
    return f" {passes}; diagnose this: {_command(summary)}"


def _command(summary: ExecSummary) -> str:
    """Return the command that diagnoses the script of a record, under the arm that trained it."""
    header, name = summary.header, str(summary.header.get("script"))
    by = summary.opt_levels[-1] if summary.opt_levels else "O1"
    # Recorded are an opt level, the name of an arm, or what scales the losses.
    arm = {"GradScaler": "native:fp16", "FP16_Optimizer": "apex:O2"}.get(by, f"apex:{by}" if by[:1] == "O" else by)
    words = ["ampcompare", "diagnose", "--arm", arm]
    if header.get("device") == "cpu":
        words += ["--device", "cpu"]
    is_path = name.endswith((".py", ".pyc", ".pyz", ".zip")) or os.sep in name
    return shlex.join([*words, "--", *([] if is_path else ["-m"]), name, *map(str, header.get("arguments") or [])])


def _short_names(paths: Sequence[Path]) -> list[str]:
    """Return the names of files, or their whole paths where two have one name."""
    names = [path.name for path in paths]
    whole = [str(path) for path in paths]
    return [
        printable(name if names.count(name) == 1 else long, MAX_NAME) for name, long in zip(names, whole, strict=True)
    ]


def _side_by_side(names: Sequence[str], summaries: Sequence[ExecSummary]) -> tuple[list[str], list[list[str]]]:
    """Return a row for each figure that any of the records has."""
    found: dict[str, dict[int, str]] = {}
    for place, summary in enumerate(summaries):
        found.setdefault("opt level", {})[place] = printable(", ".join(dict.fromkeys(summary.opt_levels)), MAX_NAME)
        headers, rows = tabulated(summary)
        for row in rows:
            item = row[0]
            for head, value in zip(headers[1:], row[1:], strict=True):
                if value:
                    what = ("steps" if item.startswith("optimizer") else "backward passes") if head == "count" else head
                    found.setdefault(f"{item}: {what}", {})[place] = value
    rows = [[figure, *(by_place.get(place, "") for place in range(len(names)))] for figure, by_place in found.items()]
    return ["figure", *names], rows


def _page(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    lines: Sequence[str],
    names: Sequence[str],
    summaries: Sequence[ExecSummary],
) -> str:
    from ampcompare.report.html.assets import check_packages, page_parts, template

    check_packages()
    first = summaries[0]
    alone = f"{printable(str(first.header.get('script')), MAX_NAME)}: {in_words(first)}"
    page: str = template("exec.html.j2").render(
        title=alone if len(names) == 1 else f"{len(names)} records of exec side by side",
        warnings=[],
        lead=lines,
        subtitle=names,
        sections=[("records", "Figures"), ("details", "What ran")],
        count=len(names),
        headers=headers,
        rows=rows,
        details=[(name if len(names) > 1 else "", _facts(one)) for name, one in zip(names, summaries, strict=True)],
        **page_parts([]),
    )
    return page


def _facts(summary: ExecSummary) -> list[tuple[str, str]]:
    header = dict(summary.header)
    environment = header.pop("environment", None)
    facts = {**header, **(environment if isinstance(environment, dict) else {})}
    facts = {name: value for name, value in facts.items() if name not in ("format", "schema")}
    return [(printable(str(name), MAX_NAME), printable(_shown(value), MAX_LINE)) for name, value in facts.items()]


def _shown(value: object) -> str:
    if value is None:
        return "not set"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
