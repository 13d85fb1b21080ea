"""One run of a user's own script under a watch: `python -m ampcompare.diagnosis.script_process REQUEST`.

REQUEST is a JSON file: the fields of `Request`. What was seen is written to `answer`.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["Request", "main"]


@dataclass(frozen=True)
class Request:
    """What to run, and what to see of it.

    Attributes:
        settings: the fields of `ExecSettings`.
        is_module: the script is the name of a module.
        lines: file:line of calls that run in fp32.
        rank: the process that is watched; the others only stop with it.
        answer: file for the diagnosis and the names of functions in fp32.
    """

    settings: dict[str, Any]
    is_module: bool
    steps: int
    at: list[int]
    reference: str
    lines: list[str]
    rank: int
    answer: str

    def write(self, path: Path) -> None:
        """Write the request for a process."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


def main(path: str) -> int:
    """Run the script of a request and return its exit code."""
    import torch

    from ampcompare.backends.arm import Arm
    from ampcompare.diagnosis.diagnose import report_of
    from ampcompare.diagnosis.observation import Observation
    from ampcompare.diagnosis.script_observer import ScriptObserver
    from ampcompare.diagnosis.step_watch import StepWatch
    from ampcompare.errors import AmpCompareError
    from ampcompare.legacy.prepare import Prepared
    from ampcompare.legacy.settings import ExecSettings
    from ampcompare.legacy.stderr import note
    from ampcompare.legacy.target import Target, script_target
    from ampcompare.records.run import dump_json
    from ampcompare.script.prepare import prepare_script, run_script

    request = Request(**json.loads(Path(path).read_text(encoding="utf-8")))
    settings = ExecSettings(**{**request.settings, "arguments": tuple(request.settings["arguments"])})
    arguments = list(settings.arguments)
    target = Target(settings.name, arguments, is_module=True)
    if not request.is_module:
        target = script_target(settings.name, arguments)
    is_main = int(os.environ.get("RANK", "0")) == request.rank
    observation = Observation()
    reference = None if request.reference == "none" else getattr(torch, request.reference)
    watch = StepWatch(
        observation,
        steps=request.steps,
        at=(request.at or None) if is_main else (),
        reference=reference,
        kept_lines=request.lines,
    )
    observer = ScriptObserver(watch, ends_early=os.environ.get("WORLD_SIZE", "1") == "1")

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
    if is_main and observation.facts:
        notes = [f"the script ended with exit code {status} after {observation.steps} steps"] if status else []
        if observer.compiles:
            notes.append("torch.compile was left out: it joins the operations that are watched one by one")
        found = report_of(
            observation, Arm.parse(str(settings.arm)), reference=reference, subject=settings.name, notes=notes
        )
        answer = {
            "diagnosis": json.loads(dump_json(found)),
            "functions": sorted(observation.functions),
            "device": observation.device_type,
        }
        Path(request.answer).write_text(json.dumps(answer), encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
