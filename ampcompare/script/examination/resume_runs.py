"""Run a script, and once more as it is started again: `python -m ampcompare.script.examination.resume_runs REQUEST...`.

Each REQUEST is the file of a `ResumeTraceRequest`. The second run finds the files that the first one wrote, also in a
sandbox, which holds for one process and what that starts. It gets the names of the file that was saved last. Behind a
first run that kills copies of itself, the second is made for each set of files that they have left.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from ampcompare.base.processes.start import add_working_directory_first
from ampcompare.script.examination.examined_run import main
from ampcompare.settings.resume_trace import (
    ATTEMPTS,
    CHECKPOINT,
    FOLDER,
    TraceRowKind,
    converted_checkpoint_name,
    last_accelerate_state_folder,
    read_trace_rows,
    rows_of_saved_files,
)


class ForkedProcessDone(Exception):
    """Leads a process that was forked, whose script has ended, to the end of this program, with an exit code."""


def run_requests(requests: list[str]) -> int:
    """Run each request in turn, and return the exit code of the last one that ran."""
    code = 0
    rows: list[dict[str, Any]] = []
    for number, name in enumerate(requests):
        path = Path(name)
        request = json.loads(path.read_text(encoding="utf-8"))
        if number:
            _set_checkpoint_in_request(
                request, rows_of_saved_files(rows)[-1]["path"], last_accelerate_state_folder(rows)
            )
            path.write_text(json.dumps(request), encoding="utf-8")
        code = _run_in_fork(path)
        rows = read_trace_rows(Path(request["trace"]))  # missing where the script could not be started
        if not code and request["kill"] is not None:
            _resume_from_files_of_kills(Path(request["kill"]["folder"]), rows, Path(requests[-1]))
            break
        if code or not rows or rows[-1]["kind"] != TraceRowKind.STOP:
            break
    return code


def _run_in_fork(request: Path) -> int:
    if not (child := os.fork()):
        add_working_directory_first()
        raise ForkedProcessDone(main("resumed", str(request)))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _set_checkpoint_in_request(request: dict[str, Any], saved: str, states: str) -> None:
    request["checkpoint"], request["states"] = saved, states
    named = converted_checkpoint_name(saved) if request["convert"] else saved
    given = request["settings"]["arguments"]
    words = [each.replace(CHECKPOINT, named).replace(FOLDER, os.path.dirname(named)) for each in given]
    request["settings"]["arguments"] = words


def _resume_from_files_of_kills(folder: Path, rows: list[dict[str, Any]], template: Path) -> None:
    """Start the script from each set of files that killed copies have left, and write what came of it."""
    from ampcompare.script import arm_process  # noqa: F401 - imports torch once for all of them
    from ampcompare.script.resume.killed_saves import restore_files_of_killed_copy, restore_original_files

    attempts: dict[str, list[dict[str, Any]]] = {}
    for left in sorted({row["left"] for row in rows if row["kind"] == TraceRowKind.KILLED}, key=int):
        restore_files_of_killed_copy(folder / left)
        attempts[left] = []
        request = json.loads(template.read_text(encoding="utf-8"))
        found = [path for path in request["candidates"] if os.path.lexists(path)]
        takes_file = any(CHECKPOINT in word or FOLDER in word for word in request["settings"]["arguments"])
        for number, saved in enumerate(found if takes_file else found[:1] or [""]):
            own = json.loads(template.read_text(encoding="utf-8"))
            _set_checkpoint_in_request(own, saved, own["states"])
            place = folder / left / f"attempt{number}"
            place.mkdir()
            own.update(trace=str(place / "trace.jsonl"), ended=str(place / "ended"))
            own["settings"]["record"] = str(place / "record.jsonl")
            (place / "request.json").write_text(json.dumps(own), encoding="utf-8")
            code = _run_in_fork(place / "request.json")
            attempts[left].append({"saved": saved, "code": code, "place": str(place)})
            if not code and os.path.exists(own["trace"]):
                break
        restore_original_files(folder / left)
    (folder / ATTEMPTS).write_text(json.dumps(attempts), encoding="utf-8")


if __name__ == "__main__":
    try:
        result = run_requests(sys.argv[1:])
    except ForkedProcessDone as end:
        (result,) = end.args
    sys.exit(result)
