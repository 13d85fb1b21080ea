"""The files that a benchmark leaves: a page for readers, and its figures for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["varying", "write_results"]


def varying(rows: Sequence[Mapping[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """Return a sentence on the columns that hold one value in all rows, and the rows without them.

    Columns that are empty or `-` in all rows are left out of both. Fewer than three rows stay as they are.
    """
    if len(rows) < 3:
        return "", [dict(row) for row in rows]
    same = {name: value for name, value in rows[0].items() if all(row[name] == value for row in rows)}
    shown = [f"{name} {value}" for name, value in same.items() if value not in ("", "-", None)]
    sentence = f"In each row: {'; '.join(shown)}." if shown else ""
    return sentence, [{name: value for name, value in row.items() if name not in same} for row in rows]


def write_results(
    out: str, title: str, about: str | None, facts: str, text: str, data: Mapping[str, Any] | None = None
) -> None:
    """Write OUT.md, and OUT.json where there is data.

    Args:
        about: the docstring of the benchmark, which says what was done.
        facts: one line on machine and versions.
        text: tables and sentences, in Markdown.
    """
    page = f"# {title}\n\n```\n{about}```\n\n{facts}\n\n{text.rstrip()}\n"
    Path(out + ".md").write_text(page, encoding="utf-8")
    if data is not None:
        Path(out + ".json").write_text(json.dumps({"environment": facts, **data}) + "\n", encoding="utf-8")
