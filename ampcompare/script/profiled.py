"""One run of a user's own script under a profile: `python -m ampcompare.script.profiled REQUEST`.

REQUEST is the file of a `ProfileRequest`. Each rank writes its profile to a file of its own; rank 0 also writes the
trace and its exit code. A step ends with the row of the record that says what the step did.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ampcompare.diagnosis.profiling.options import ProfileRequest

__all__ = ["main"]


def main(path: str) -> int:
    """Run the script of a request and return its exit code."""
    from ampcompare.diagnosis.profiling.options import ProfileRequest

    request = ProfileRequest.read(Path(path))
    rank = int(os.environ.get("RANK", "0"))
    status = 1
    try:
        status = _run(request, rank)
    finally:
        if rank == 0:
            Path(request.ended).write_text(str(status), encoding="utf-8")
    return status


def _run(request: ProfileRequest, rank: int) -> int:
    import torch

    from ampcompare.backends.arm import Arm
    from ampcompare.base.errors import AmpCompareError
    from ampcompare.diagnosis.profiling.measure import profile_of
    from ampcompare.diagnosis.profiling.step_profiler import StepProfiler, Steps
    from ampcompare.script.legacy.prepare import Prepared
    from ampcompare.script.legacy.settings import ExecSettings
    from ampcompare.script.legacy.stderr import note
    from ampcompare.script.legacy.target import Target, script_target
    from ampcompare.script.prepare import prepare_script, run_script
    from ampcompare.script.recorded.watch import EnoughSteps
    from ampcompare.script.stand_in import half_dtype
    from ampcompare.training.precision.cpu_half import cpu_half

    settings = ExecSettings(**{**request.settings, "arguments": tuple(request.settings["arguments"])})
    arguments = list(settings.arguments)
    target = Target(settings.name, arguments, is_module=True)
    if not request.is_module:
        target = script_target(settings.name, arguments)
    arm = Arm.parse(str(settings.arm))
    device = torch.device("cpu" if settings.device == "cpu" or not torch.cuda.is_available() else "cuda")
    profiler = StepProfiler(Steps(timed=request.steps, profiled=request.profiled), device)
    is_child = False

    def row(given: dict[str, Any]) -> None:
        if given["kind"] != "step" or is_child:
            return
        profiler.end_step()
        if profiler.is_over:
            raise EnoughSteps(0)

    def prepare(given: ExecSettings) -> Prepared:
        prepared = prepare_script(given)
        assert prepared.recorder is not None
        prepared.recorder.after_row(row)
        profiler.marks.learns_models = True
        profiler.open()
        return prepared

    def go_elsewhere() -> None:
        nonlocal is_child
        is_child = True
        profiler.marks.pause()

    os.register_at_fork(after_in_child=go_elsewhere)
    try:
        status = run_script(target, settings, prepare=prepare)
    except AmpCompareError as error:
        note(str(error))
        return error.exit_code
    finally:
        profiler.close()
    measured = profiler.measured
    if is_child or not measured.account.steps:
        return status
    half = half_dtype(arm)
    mode, _ = cpu_half("auto", half, device)
    found = profile_of(arm, measured, half, profiler, mode, device)
    request.answer(rank).write_text(found.model_dump_json(), encoding="utf-8")
    if rank == 0:
        request.trace.write_text(json.dumps(measured.trace), encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
