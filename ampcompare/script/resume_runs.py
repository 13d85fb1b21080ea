"""Run a script, and once more as it is started again: `python -m ampcompare.script.resume_runs REQUEST...`.

Each REQUEST is the file of a `ResumeRequest`. The second run finds the files that the first one wrote, also in a
sandbox, which holds for one process and what that starts. It gets the names of the file that was saved last.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from ampcompare.script.examination import main
from ampcompare.settings.resume_trace import CHECKPOINT, FOLDER, Row, saved_files


def run_requests(requests: list[str]) -> int:
    """Run each request in turn, and return the exit code of the last one that ran."""
    code, saved = 0, ""
    for number, name in enumerate(requests):
        path = Path(name)
        request = json.loads(path.read_text(encoding="utf-8"))
        if number:
            given = request["settings"]["arguments"]
            words = [each.replace(CHECKPOINT, saved).replace(FOLDER, os.path.dirname(saved)) for each in given]
            request["settings"]["arguments"] = words
            path.write_text(json.dumps(request), encoding="utf-8")
        if not (child := os.fork()):  # of a process without torch
            if not sys.flags.safe_path:
                sys.path.insert(0, os.getcwd())  # as `python -m` does; the folder of the script takes its place
            return main("resumed", name)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        trace = Path(request["trace"])  # missing where the script could not be started
        lines = trace.read_text(encoding="utf-8").splitlines() if trace.exists() else []
        rows = [json.loads(line) for line in lines]
        if code or not rows or rows[-1]["kind"] != Row.STOP:
            break
        saved = saved_files(rows)[-1]["path"]
    return code


if __name__ == "__main__":
    sys.exit(run_requests(sys.argv[1:]))
