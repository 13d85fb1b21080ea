"""One run of a user's own script under a watch: `python -m ampcompare.script.diagnosed REQUEST`.

REQUEST is the file of a `Request`. The watched process writes what was seen to `answer`, and its exit code to `ended`:
other ranks may wait for it for minutes, and need not.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ampcompare.diagnosis.options import Request

__all__ = ["main"]


def main(path: str) -> int:
    """Run the script of a request and return its exit code."""
    from ampcompare.diagnosis.options import Request

    request = Request.read(Path(path))
    is_watched = int(os.environ.get("RANK", "0")) == request.rank
    status = 1
    try:
        status = _run(request, is_watched)
    finally:
        if is_watched:
            Path(request.ended).write_text(str(status), encoding="utf-8")
    return status


def _run(request: Request, is_watched: bool) -> int:
    import torch

    from ampcompare.backends.arm import Arm
    from ampcompare.base.errors import AmpCompareError
    from ampcompare.diagnosis.diagnose import report_of
    from ampcompare.diagnosis.observation import Observation
    from ampcompare.diagnosis.step_watch import StepWatch
    from ampcompare.script.legacy.prepare import Prepared
    from ampcompare.script.legacy.settings import ExecSettings
    from ampcompare.script.legacy.stderr import note
    from ampcompare.script.legacy.target import Target, script_target
    from ampcompare.script.observer import ScriptObserver
    from ampcompare.script.prepare import prepare_script, run_script

    settings = ExecSettings(**{**request.settings, "arguments": tuple(request.settings["arguments"])})
    arguments = list(settings.arguments)
    target = Target(settings.name, arguments, is_module=True)
    if not request.is_module:
        target = script_target(settings.name, arguments)
    observation = Observation()
    reference = None if request.reference == "none" else getattr(torch, request.reference)
    watch = StepWatch(
        observation,
        steps=request.steps,
        at=(request.at or None) if is_watched else (),
        reference=reference,
        kept_lines=request.lines,
    )
    observer = ScriptObserver(watch)

    def prepare(given: ExecSettings) -> Prepared:
        prepared = prepare_script(given)
        assert prepared.recorder is not None
        observer.install(prepared.recorder)
        return prepared

    try:
        status = run_script(target, settings, prepare=prepare)
    except AmpCompareError as error:
        note(str(error))
        return error.exit_code
    observer.end()
    if is_watched and observation.facts:
        compiled = "torch.compile was left out: it fuses the operations that are watched one by one"
        notes = [compiled] if observer.compiles else []
        found = report_of(
            observation, Arm.parse(str(settings.arm)), reference=reference, subject=settings.name, notes=notes
        )
        answer = {
            "diagnosis": found.model_dump(mode="json"),
            "functions": sorted(observation.functions),
            "device": observation.device_type,
        }
        Path(request.answer).write_text(json.dumps(answer), encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
