"""The request for a run of a script whose resumption is verified, and the rows that it writes. Needs no torch."""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ampcompare.settings.examination import ExaminedScriptRequest

# In arguments of the second run: the file that the first one saved last, and its folder.
CHECKPOINT, FOLDER = "{checkpoint}", "{folder}"
STATISTICS = (
    "running_mean",
    "running_var",
    "num_batches_tracked",
)  # names of buffers, which no parameter has
ATTEMPTS = "attempts.json"  # in the folder of what killed copies have left: how the script started from it


@dataclass(frozen=True)
class ResumeTraceRequest(ExaminedScriptRequest):
    """A run that is traced.

    Attributes:
        trace: the file for its rows.
        ends_with: the number of the optimizer whose step ends a step of the trace, in the order of their first use.
        stop_at: end it as a kill would, once it has saved a file at or behind this step; None lets it end.
        first_only: end it behind its first step.
        trainers: a trainer that the script calls without a checkpoint takes the one that was saved last.
        checkpoint: the file that an earlier run has saved last.
        states: the folder that Accelerate has filled last.
        kill: kill copies of the process behind the step `step`, at so many `points`; what they leave lies in `folder`.
        candidates: files from which the script may be started again behind a kill, the newest first.
        rewrite: how the script is rewritten as it starts, "torch" or "adapter"; None runs it as it is.
        convert: `checkpoint` is converted from Apex to torch.amp, and the script gets that file.
    """

    trace: str
    stop_at: int | None
    ends_with: int = 0
    first_only: bool = False
    trainers: bool = False
    checkpoint: str = ""
    states: str = ""
    kill: dict[str, Any] | None = None
    candidates: list[str] = field(default_factory=list)
    rewrite: str | None = None
    convert: bool = False


class TraceRowKind:
    """Kinds of rows of a trace, each with `step`, the number of steps that have ended."""

    # Of a step: `state` is all that a checkpoint has to restore; `made`: which optimizers and scalers are left.
    START = "start"
    BATCH = "batch"  # of a forward pass: a digest, and those of its first `samples`
    LOSS = "loss"
    STEP = "step"  # its end
    # Of a file: `path`, `line`, what it `holds`, the optimizer `behind` whose step it was, its `number` in the order in
    # which those that are left were made, and `counts` of steps.
    SAVE = "save"
    MOVE = "move"  # of a file or folder, from `path` to `to`
    LOAD = "load"
    # Of `what`: a load_state_dict, or a generator; of an optimizer or a scaler also its `number`, in the order as made.
    RESTORE = "restore"
    TRAINER = "trainer"  # a trainer was started `by` what its user would write
    STATES = "states"  # Accelerate has saved all its states to the folder `path`
    KILLED = "killed"  # a copy of the process: `point` in words, and the folder `left` of what was left
    STOP = "stop"


def read_trace_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a trace, none if it is missing, without a last one that is cut."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def last_accelerate_state_folder(rows: Iterable[dict[str, Any]]) -> str:
    """Return the folder that Accelerate has filled last; "" if none."""
    found = [str(row["path"]) for row in rows if row["kind"] == TraceRowKind.STATES]
    return found[-1] if found else ""


def rows_of_saved_files(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of files that were saved, each with the path at which the file is at the end."""
    saved: list[dict[str, Any]] = []
    for row in rows:
        if row["kind"] == TraceRowKind.SAVE:
            saved.append(dict(row))
        elif row["kind"] == TraceRowKind.MOVE:
            for each in saved:
                if each["path"] == row["path"] or each["path"].startswith(row["path"] + os.sep):
                    each["path"] = row["to"] + each["path"].removeprefix(row["path"])
    return saved


def converted_checkpoint_name(path: str) -> str:
    """Return the name of a checkpoint that was converted."""
    stem, suffix = os.path.splitext(path)
    return f"{stem}.converted{suffix}"
