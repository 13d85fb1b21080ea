"""The processes that a script has started itself, where they train and its first process does not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ampcompare.launch.script.rows import ScriptRows, read_rows

__all__ = ["RECORD", "RECORDS", "error_of_children", "of_training_process", "training_children"]

RECORD = "script.jsonl"
RECORDS = "script*.jsonl"  # those of child processes included
RANKS = "script.rank*.jsonl"  # of ranks that ampcompare has started


def training_children(folder: Path) -> list[ScriptRows]:
    """Return what the processes that the script has started, spawned or forked, have recorded, if they made a step."""
    return [rows for rows in _children(folder) if rows.steps]


def error_of_children(folder: Path) -> str:
    """Return why the first of these processes failed that says so; "" if none does."""
    errors = [str(rows.ended["error"]) for rows in _children(folder) if rows.ended and rows.ended.get("error")]
    return errors[0] if errors else ""


def _children(folder: Path) -> list[ScriptRows]:
    paths = [path for path in sorted(folder.glob(RECORDS)) if path.name != RECORD and not path.match(RANKS)]
    return [read_rows(path) for path in paths]


def of_training_process(folder: Path) -> ScriptRows:
    """Return the rows that stand for a cell: those of its process, or of rank 0 of the processes that it has started.

    They do where the first process made no step and raised no error, and the others are all ranks of one process group,
    with as many steps each, or a single one. An error ends the others at any step, so that their rows say nothing.
    """
    rows = read_rows(folder / RECORD)
    if rows.steps or (rows.ended or {}).get("error"):
        return rows
    children = training_children(folder)
    if not children or not _is_group(children):
        return rows
    first = min(children, key=lambda one: one.rank or (0, 1))
    first.notes.append(f"the steps are those of {'rank 0 of ' if len(children) > 1 else ''}{_number(children)} started")
    return first


def _number(children: Sequence[ScriptRows]) -> str:
    return f"{len(children)} processes that the script has" if len(children) > 1 else "a process that the script has"


def _is_group(children: Sequence[ScriptRows]) -> bool:
    if len(children) == 1:
        return children[0].rank is None or children[0].rank[1] == 1
    places = {one.rank for one in children}
    steps = {len(one.steps) for one in children}
    return places == {(rank, len(children)) for rank in range(len(children))} and len(steps) == 1
