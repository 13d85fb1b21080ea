"""One run of a user's own script under examination, in a process of its own: words KIND REQUEST.

| KIND | the run is | REQUEST is the file of a | what is written |
|---|---|---|---|
| `diagnosed` | watched, on rank 0 | `StepWatchRequest` | what was seen, to `answer` |
| `profiled` | profiled, on each rank | `ProfileRequest` | a profile of each rank to its own file, a trace of rank 0 |
| `prefix` | made for its first steps, in fp32 | `PrefixWatchRequest` | what was seen on rank 0, to `answer` |
| `resumed` | traced, whole or up to a file that it saves, on rank 0 | `ResumeTraceRequest` | rows, to `trace` |

Rank 0 also writes its exit code to `ended`: others may wait for it for minutes, and need not.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from ampcompare.diagnosis.options import PrefixWatchRequest, StepWatchRequest
    from ampcompare.diagnosis.profiling.options import ProfileRequest
    from ampcompare.script.invocation.exec_settings import ExecSettings
    from ampcompare.script.process.prepare import PreparedProcess
    from ampcompare.script.recording.recorder import Recorder
    from ampcompare.settings.examination import ExaminedScriptRequest
    from ampcompare.settings.resume_trace import ResumeTraceRequest

SHORT = {"bfloat16": "bf16", "float16": "fp16"}


def main(kind: str, path: str) -> int:
    """Run the script of a request and return its exit code."""
    from ampcompare.base.environment.ranks import rank_of_process
    from ampcompare.base.errors import AmpCompareError
    from ampcompare.diagnosis.options import PrefixWatchRequest, StepWatchRequest
    from ampcompare.diagnosis.profiling.options import ProfileRequest
    from ampcompare.script.invocation.stderr import say_once
    from ampcompare.settings.resume_trace import ResumeTraceRequest

    rank = rank_of_process()
    kinds: dict[str, type[ExaminedScriptRequest]] = {
        "diagnosed": StepWatchRequest,
        "profiled": ProfileRequest,
        "prefix": PrefixWatchRequest,
        "resumed": ResumeTraceRequest,
    }
    request: ExaminedScriptRequest = kinds[kind].read(Path(path))
    status = 1
    try:
        if isinstance(request, StepWatchRequest):
            status = _run_script_diagnosed(request, rank)
        elif isinstance(request, ProfileRequest):
            status = _run_script_profiled(request, rank)
        elif isinstance(request, PrefixWatchRequest):
            status = _run_prefix_watched(request, rank)
        elif isinstance(request, ResumeTraceRequest):
            status = _run_traced_script(request, rank)
    except AmpCompareError as error:
        say_once(str(error))
        status = error.exit_code
    finally:
        if rank == 0:
            Path(request.ended).write_text(str(status), encoding="utf-8")
    return status


def _run_script_diagnosed(request: StepWatchRequest, rank: int) -> int:
    import torch

    from ampcompare.backends.arm import Arm
    from ampcompare.base.errors import ConfigError
    from ampcompare.base.patches import Layer, Subscriptions
    from ampcompare.diagnosis.diagnose import diagnosis_of_observation
    from ampcompare.diagnosis.observation import RunObservation
    from ampcompare.diagnosis.step_watch import StepOperationsWatch
    from ampcompare.script.arm_process import current_stand_in
    from ampcompare.script.remarks.lost_statistics import LostStatisticsWatch, variance_beyond_fp16_text
    from ampcompare.script.watch.limited_gradients import LimitedScaledGradientsWatch
    from ampcompare.script.watch.observer import ScriptObserver

    observation = RunObservation()
    reference = None if request.reference == "none" else getattr(torch, request.reference)
    watch = StepOperationsWatch(
        observation, steps=request.steps, is_idle=rank != 0, reference=reference, kept_lines=request.lines
    )
    watch.updates.masters = lambda optimizer: current_stand_in().torch_amp.masters(optimizer)
    observer = ScriptObserver(watch)
    statistics, limited = LostStatisticsWatch(), LimitedScaledGradientsWatch()
    statistics.follow(Subscriptions(Layer.RECORD))  # until the process ends

    def install(recorder: Recorder) -> None:
        limited.follow(Subscriptions(Layer.WATCH))
        recorder.call_after_each_row(lambda row: limited.end_step() if row["kind"] == "step" else None)
        observer.install(recorder)

    status = _run_with_observer(request, install)
    if status:
        watch.end_unfinished_step(
            only_nonfinite=status == ConfigError.exit_code
        )  # of which the reason is known
    observer.end()
    if observation.facts:
        compiled = "torch.compile was left out: it fuses the operations that are watched one by one"
        notes = [compiled] if observer.compiles else []
        if beyond := statistics.find_layers_beyond_fp16():
            notes.append(variance_beyond_fp16_text(beyond))
        notes += filter(None, [limited.gradient_limits_text()])
        arm = Arm.parse(str(request.settings["arm"]))
        found = diagnosis_of_observation(
            observation, arm, reference=reference, subject=request.settings["name"], notes=notes
        )
        answer = {
            "diagnosis": found.model_dump(mode="json"),
            "functions": sorted(observation.functions),
            "device": observation.device_type,
        }
        Path(request.answer).write_text(json.dumps(answer), encoding="utf-8")
    return status


def _run_script_profiled(request: ProfileRequest, rank: int) -> int:
    """Profile the steps of a script; one ends with the row of the record that says what it did."""
    import torch

    from ampcompare.backends.arm import Arm
    from ampcompare.diagnosis.profiling.measure import profile_from_steps
    from ampcompare.diagnosis.profiling.step_profiler import StepCounts, StepProfiler
    from ampcompare.script.watch.cell_facts import StepsReached
    from ampcompare.training.precision.base import half_dtype_of
    from ampcompare.training.precision.cpu_half import choose_cpu_half_mode_and_context

    arm = Arm.parse(str(request.settings["arm"]))
    device = torch.device(
        "cpu" if request.settings["device"] == "cpu" or not torch.cuda.is_available() else "cuda"
    )
    profiler = StepProfiler(StepCounts(timed=request.steps, profiled=request.profiled), device)
    is_child = False

    def after_row(given: dict[str, Any]) -> None:
        if given["kind"] != "step" or is_child:
            return
        profiler.end_step()
        if profiler.is_over:
            raise StepsReached(0)

    def install(recorder: Recorder) -> None:
        recorder.call_after_each_row(after_row)
        profiler.marks.learns_models = True
        profiler.open()

    def go_elsewhere() -> None:
        nonlocal is_child
        is_child = True
        profiler.marks.stop_following()

    os.register_at_fork(after_in_child=go_elsewhere)
    try:
        status = _run_with_observer(request, install)
    finally:
        profiler.close()
    measured = profiler.measured
    if is_child or not measured.account.steps:
        return status
    half = half_dtype_of(arm)
    mode, _ = choose_cpu_half_mode_and_context("auto", half, device)
    found = profile_from_steps(arm, profiler, half, mode)
    request.answer_path_of_rank(rank).write_text(found.model_dump_json(), encoding="utf-8")
    if rank == 0:
        request.trace_path.write_text(json.dumps(measured.trace), encoding="utf-8")
    return status


def _run_prefix_watched(request: PrefixWatchRequest, rank: int) -> int:
    """Run the first steps of a script in fp32, and write what was seen of them."""
    from ampcompare.diagnosis.prefix import PrefixWatch
    from ampcompare.script.arm_process import lifted_types_of_arm
    from ampcompare.script.watch.cell_facts import StepsReached
    from ampcompare.script.watch.planned_steps import find_num_planned_steps, find_repetitions_of_loops_around

    watches: list[PrefixWatch] = []

    def after_row(given: dict[str, Any]) -> None:
        (watch,) = watches
        if given["kind"] in ("backward", "plain_backward"):
            watch.see_loss(given["loss"])
        elif given["kind"] == "step":
            watch.loops = watch.loops or find_repetitions_of_loops_around() or ()
            watch.planned = watch.planned or (None if watch.loops else find_num_planned_steps())
            if watch.is_over:
                raise StepsReached(0)

    def install(recorder: Recorder) -> None:
        watches.append(PrefixWatch(request.steps, total=request.total))
        recorder.call_after_each_row(after_row)

    status = _run_with_observer(request, install)
    (watch,) = watches
    watch.close()
    types = [SHORT[name] for name in lifted_types_of_arm()]
    found = watch.read_prefix().model_copy(update={"weights": types[0] if types else ""})
    if rank == 0 and found.steps:
        Path(request.answer).write_text(found.model_dump_json(), encoding="utf-8")
    return status


def _run_traced_script(request: ResumeTraceRequest, rank: int) -> int:
    """Run a script and write a trace of its steps, and of what it saves and loads."""
    from ampcompare.base.patches import Subscriptions
    from ampcompare.script.resume.resume_trace import ResumeTraceRecorder
    from ampcompare.script.trainers.resumption import (
        note_accelerate_state_folders,
        start_trainers_from_checkpoint,
    )
    from ampcompare.settings.resume_trace import converted_checkpoint_name

    if request.convert:
        from ampcompare.checkpoints.convert.convert import convert_file

        convert_file(Path(request.checkpoint), Path(converted_checkpoint_name(request.checkpoint)), "native")

    def note_and_start_trainers(note: Callable[..., None], events: Subscriptions) -> None:
        note_accelerate_state_folders(note, events)
        if request.trainers:
            start_trainers_from_checkpoint(request.checkpoint, request.states, note, events)

    def install(recorder: Recorder) -> None:
        if rank == 0:
            trace = ResumeTraceRecorder(
                request.trace,
                request.stop_at,
                ends_with=request.ends_with,
                first_only=request.first_only,
                kill=request.kill,
                trainers=note_and_start_trainers,
            )
            trace.install(recorder)

    return _run_with_observer(request, install, rewrite=request.rewrite)


def _run_with_observer(
    request: ExaminedScriptRequest,
    install: Callable[[Recorder], None],
    *,
    rewrite: str | None = None,
) -> int:
    """Run the script of a request and return its exit code.

    Args:
        install: gets its recorder before it begins.
        rewrite: how it is rewritten, as of `RewrittenTarget`; None: it is not.
    """
    from ampcompare.script.arm_process import prepare_arm_process, run_script
    from ampcompare.script.invocation.exec_settings import ExecSettings
    from ampcompare.script.invocation.target import target_of

    def prepare(given: ExecSettings) -> PreparedProcess:
        prepared = prepare_arm_process(given)
        assert prepared.rows is not None
        install(prepared.rows.recorder)
        return prepared

    arguments = list(request.settings["arguments"])
    settings = ExecSettings(**{**request.settings, "arguments": tuple(arguments)})
    if rewrite is not None:
        from ampcompare.script.examination.rewrite_run import RewrittenTarget

        return run_script(RewrittenTarget(settings.name, arguments, rewrite), settings, prepare=prepare)
    target = target_of(settings.name, arguments, is_module=request.is_module)
    return run_script(target, settings, prepare=prepare)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
