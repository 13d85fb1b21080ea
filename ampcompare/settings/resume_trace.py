"""The request for a run of a script whose resumption is verified, and the rows that it writes. Needs no torch."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ampcompare.settings.examination import ScriptRequest

# In arguments of the second run: the file that the first one saved last, and its folder.
CHECKPOINT, FOLDER = "{checkpoint}", "{folder}"


@dataclass(frozen=True)
class ResumeRequest(ScriptRequest):
    """A run that is traced.

    Attributes:
        trace: the file for its rows.
        stop_at: end it as a kill would, once it has saved a file at or behind this step; None lets it end.
    """

    trace: str
    stop_at: int | None


class Row:
    """Kinds of rows of a trace, each with `step`, the number of steps that have ended."""

    START = "start"  # of a step: `state` is all that a checkpoint has to restore
    BATCH = "batch"  # of a forward pass: a digest
    LOSS = "loss"
    STEP = "step"  # its end
    SAVE = "save"  # of a file: `path`, `line`, and what it `holds`
    MOVE = "move"  # of a file or folder, from `path` to `to`
    LOAD = "load"
    RESTORE = "restore"  # of `what`: a load_state_dict, or a generator
    STOP = "stop"


def saved_files(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of files that were saved, each with the path at which the file is at the end."""
    saved: list[dict[str, Any]] = []
    for row in rows:
        if row["kind"] == Row.SAVE:
            saved.append(dict(row))
        elif row["kind"] == Row.MOVE:
            for each in saved:
                if each["path"] == row["path"] or each["path"].startswith(row["path"] + os.sep):
                    each["path"] = row["to"] + each["path"].removeprefix(row["path"])
    return saved
