"""Train a cell in this process, and write its steps and record.

The composition root is `train_cell`, which calls the four stages: `configure_process`, `build_prepared_cell`,
`train_prepared_cell` and `gather_record_of_cell`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil
import torch
import torch.distributed as dist

from ampcompare import guards
from ampcompare.base.environment.fingerprint import environment_fingerprint, host_name
from ampcompare.base.environment.ranks import DistributedEnv
from ampcompare.base.environment.torch_names import own_missing_torch_name_error
from ampcompare.base.errors import AmpCompareError, EnvironmentUnfit
from ampcompare.base.files.loaded_code import UsedInputsRecorder
from ampcompare.base.files.run_files import CellFile
from ampcompare.base.files.write import write_atomically
from ampcompare.base.formatting import first_line_of_text, format_count
from ampcompare.base.tensors.tf32 import Tf32Switches
from ampcompare.experiment.launch.cell_files import (
    copy_first_steps,
    make_writer_of_progress,
    move_checkpoints_to_previous,
    read_config,
    record_with_loaded_code,
    write_config,
    write_record,
)
from ampcompare.experiment.launch.contract import Phase, Progress, record_of_failed_cell
from ampcompare.experiment.launch.places import record_with_place
from ampcompare.experiment.launch.stop_signal import request_stop_at_signals
from ampcompare.experiment.launch.worker.monitor import SystemMonitor
from ampcompare.results.records.document import dump_json
from ampcompare.results.records.evaluation import EpochResult, emulated_type
from ampcompare.results.records.run import ProcessFacts, Resumption, RunRecord, RunSummary
from ampcompare.results.records.step import StepRecord
from ampcompare.settings.config import RunConfig
from ampcompare.tasks.task import make_task
from ampcompare.training.assemble import assemble_run, cpu_half_mode_of_run, make_parallel
from ampcompare.training.checkpoint.resume import AUTO, find_checkpoint, state_to_resume_and_resumption
from ampcompare.training.checkpoint.saver import CheckpointSaver
from ampcompare.training.hashes import parameters_sha256, weights_sha256
from ampcompare.training.loop import measure_allreduce_share
from ampcompare.training.meters import MemoryMeter, make_memory_meter
from ampcompare.training.other_precisions import evaluate_in_other_precisions
from ampcompare.training.parallel.ranks import Communicator, digest_of_weights
from ampcompare.training.precision.base import Precision, make_precision
from ampcompare.training.precision.cpu_half import choose_cpu_half_mode_and_context
from ampcompare.training.process.device import resolve_device
from ampcompare.training.process.process_group import process_group_for_cell
from ampcompare.training.process.switches import configure_process
from ampcompare.training.run_summary import RunMetrics
from ampcompare.training.session import TrainingSession
from ampcompare.training.stop_request import StopRequest

ARM_FAILED = 3
POLL_SECONDS = 0.5


def train_cell_and_write_record(
    config: RunConfig,
    folder: Path,
    on_progress: Callable[[Progress], None] | None = None,
) -> RunRecord:
    """Train one cell in this process; write `config.json`, `steps.jsonl`, `epochs.jsonl` and `record.json` to `folder`.

    Errors of the user's code, of torch and of this package end in a record with status "failed".
    """
    write_config(config, folder)
    code = UsedInputsRecorder(folder, Path.cwd())
    try:
        with process_group_for_cell(config):
            result = train_cell(config, folder, on_progress)
    except Exception as error:  # a failed arm is a row of the table, and the other arms run
        with contextlib.suppress(OSError):  # the disk may be full
            traceback.print_exc()
        result = record_of_failure(config, error)
    code.record_used_inputs()
    result = record_with_place(record_with_loaded_code(result, folder))
    write_record(result, folder)
    return result


def train_cell(
    config: RunConfig,
    folder: Path,
    on_progress: Callable[[Progress], None] | None = None,
    *,
    ranks: Communicator | None = None,
    device: str | None = None,
    world: DistributedEnv | None = None,
    rendezvous_seconds: float | None = None,
) -> RunRecord:
    """Train one cell in this process, alone or as one of `ranks`; rank 0 writes `steps.jsonl`, the caller the record.

    Args:
        device: of this process, if it is not the configuration's.
        world: how the processes were started, if there are several.
        rendezvous_seconds: from the start of the launcher to the end of the rendezvous; None without one, where the
            start of this process counts.
    """
    with _guards_during_warmup(config) as violations:
        begin = time.perf_counter()
        started = datetime.now(UTC).isoformat(timespec="milliseconds")
        process_seconds = time.time() - psutil.Process().create_time()
        start_seconds = process_seconds if rendezvous_seconds is None else rendezvous_seconds
        own_device = resolve_device(device or config.device)
        configure_process(config, own_device)
        attempt = 0 if world is None else world.attempt
        if on_progress is not None:
            on_progress(Progress(0, 0, 0, phase="loading data"))
        cell = build_prepared_cell(config, folder, own_device, ranks or Communicator(), attempt)
        train_prepared_cell(cell, on_progress)
        seconds = time.perf_counter() - begin
        result = gather_record_of_cell(cell, world, start_seconds=start_seconds, seconds=seconds)
    return result.model_copy(update={"guards": violations, "started": started})


def train_cell_in_fork(words: list[str]) -> int:
    """Train the cell whose `config.json` lies in a folder, in a fork, which cleans up nothing that is its server's."""
    exit_when_parent_ends()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a killed process leaves its last lines
    folder = Path(words[0])
    train_cell_and_write_record(read_config(folder), folder, make_writer_of_progress(folder))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def exit_when_parent_ends() -> None:
    """Exit when the parent process is gone; a collective call would otherwise wait forever."""
    parent = os.getppid()

    def exit_when_parent_is_gone() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=exit_when_parent_is_gone, daemon=True).start()


@dataclass(frozen=True)
class PreparedCell:
    """A cell that is ready to train.

    Attributes:
        fp16_mode: how 16-bit arithmetic is computed on this device; None for fp32.
        compute: the context of every step, which emulates fp16 if `fp16_mode` says so.
        steps_path, epochs_path: `steps.jsonl` and `epochs.jsonl` on rank 0, the null device on the others.
        device_facts: name, versions and switches of the device.
    """

    config: RunConfig
    precision: Precision
    session: TrainingSession
    saver: CheckpointSaver
    stop: StopRequest
    metrics: RunMetrics
    memory: MemoryMeter
    fp16_mode: str | None
    compute: contextlib.AbstractContextManager[Any]
    steps_path: Path
    epochs_path: Path
    device_facts: dict[str, Any]
    monitor: SystemMonitor


def build_prepared_cell(
    config: RunConfig, folder: Path, device: torch.device, ranks: Communicator, attempt: int = 0
) -> PreparedCell:
    """Build everything that a cell needs, and restore the checkpoint that it resumes from, if any.

    Raises:
        AmpCompareError: a setting, a checkpoint or the device does not fit; the files of the cell are unchanged.
    """
    precision = make_precision(config.arm, device=str(device), autocast_lists=config.autocast_lists)
    task = make_task(config.recipe)
    memory = make_memory_meter(device)  # before the models: its peak counts from here
    engine = precision.engine.name if precision.engine else None
    parallel = make_parallel(config.parallel, device, engine)
    point = _find_resume_point(config, folder, ranks, attempt)
    state = None if point is None else point.state
    assembly = assemble_run(
        config.recipe,
        task,
        precision,
        device,
        parallel=parallel,
        workers=config.workers,
        ranks=ranks,
        state=state,
        is_twin=config.first_weights == "twin",
    )
    # Only now: a checkpoint that does not fit changes no file.
    ranks.broadcast_from_rank0(lambda: _keep_files_up_to_resume_point(folder, point, attempt))
    steps_path, epochs_path = (
        folder / name if ranks.is_first else Path(os.devnull) for name in (CellFile.STEPS, CellFile.EPOCHS)
    )
    saver = CheckpointSaver(folder / CellFile.CHECKPOINTS, config.saving, _write_log_line, steps_path)
    stop = StopRequest(config.saving.stop_at_step)
    session = TrainingSession(config, assembly, saver=saver, stop=stop)
    units = config.recipe.batch_size * ranks.size * task.units_per_sample
    metrics = RunMetrics(config.warmup_steps, units, task.metrics[0])
    session.stateful["tally"] = metrics  # saved and restored with the session
    if point is None:
        metrics.initial_parameters = parameters_sha256(assembly.replicas)
    else:
        session.load_state_dict(point.state, point.resumption)
    mode = cpu_half_mode_of_run(config.cpu_half, config.recipe.compile)
    fp16_mode, compute = choose_cpu_half_mode_and_context(
        mode, precision.half_dtype, device, config.autocast_lists
    )
    return PreparedCell(
        config=config,
        precision=precision,
        session=session,
        saver=saver,
        stop=stop,
        metrics=metrics,
        memory=memory,
        fp16_mode=fp16_mode,
        compute=compute,
        steps_path=steps_path,
        epochs_path=epochs_path,
        device_facts=device_facts(device, config),
        monitor=SystemMonitor(device),
    )


def _write_log_line(text: str) -> None:
    """Write a line to the log of the cell, unless the disk is full."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{text}\n")


def train_prepared_cell(cell: PreparedCell, on_progress: Callable[[Progress], None] | None = None) -> None:
    """Train to the end, or to a request to stop; write each step, and collect metrics and readings of the machine."""
    metrics = cell.metrics
    session = cell.session
    warmup_steps = cell.config.warmup_steps
    # No report holds the session: in a circle, replicas would outlive an error, and the other ranks wait for this one.
    first_epoch, total = session.position.epoch, session.assembly.total_steps
    block: Sequence[StepRecord] = ()

    def report_progress(phase: Phase) -> None:
        if on_progress is not None:
            epoch = block[-1].epoch if block else first_epoch
            # of a run that was resumed, before its first block
            loss = metrics.losses[-1] if metrics.losses else None
            seconds = statistics.median([each.seconds for each in block]) if block else None
            scale, skipped = metrics.final_loss_scale, metrics.skipped_steps
            on_progress(Progress(metrics.num_steps, total, epoch, phase, loss, scale, skipped, seconds))

    session.on_phase = report_progress
    files = JsonLineFile(cell.steps_path), JsonLineFile(cell.epochs_path)
    with cell.compute, cell.saver, files[0] as steps, files[1] as epochs, request_stop_at_signals(cell.stop):
        epochs.write(
            map(_epoch_result_without_per_sample, metrics.epochs)
        )  # of the run that this one resumes
        for event in session.train_and_yield_events():
            if isinstance(event, EpochResult):
                metrics.add_epoch(event)
                epochs.write([_epoch_result_without_per_sample(event)])
                continue
            metrics.add_steps(event)
            cell.monitor.sample_if_due(timed=metrics.num_steps > warmup_steps)
            if cell.monitor.energy is not None:
                is_timed = metrics.num_steps - len(event) >= warmup_steps
                cell.monitor.energy.add_block_of_steps(event[0].epoch, len(event), timed=is_timed)
            steps.write(event)
            block = event
            report_progress("training")


def _epoch_result_without_per_sample(event: EpochResult) -> EpochResult:
    return event.model_copy(update={"per_sample": None})


def gather_record_of_cell(
    cell: PreparedCell, world: DistributedEnv | None, *, start_seconds: float, seconds: float
) -> RunRecord:
    """Return the record of a cell that has run. With several processes all of them call it: it gathers facts of each.

    Args:
        start_seconds: from the start of the process or launcher until training could begin.
    """
    config = cell.config
    session = cell.session
    metrics = cell.metrics
    summary = metrics.summary_of_run(
        session.divergence,
        cell.memory.peak_memory(),
        seconds,
        ended=session.why_ended_early,
        rollbacks=session.steps_at_rollbacks,
    )
    models, initial = session.assembly.replicas, metrics.initial_parameters
    summary = summary.model_copy(
        update={
            "start_seconds": max(0.0, start_seconds),
            "weights_sha256": weights_sha256(models),  # now: facts of processes take further steps
            "weights_moved": None if initial is None else parameters_sha256(models) != initial,
        }
    )
    if summary.metric_final is not None and not session.interrupted:
        # After the peak of memory was read, and before the facts of processes.
        results = evaluate_in_other_precisions(session, cell.compute)
        summary = summary.model_copy(update={"in_precisions": results})
    with cell.compute:  # it times further steps, which must compute as the others did
        processes = (
            None if world is None else measure_and_gather_process_facts(config, session, world, summary)
        )
    steps_done, task = session.position.step, session.assembly.task
    # of a GPU
    units = None if config.parallel.kind == "dp" else config.recipe.batch_size * task.units_per_sample
    status: Literal["completed", "diverged"] = "completed" if summary.diverged_step is None else "diverged"
    return RunRecord(
        cell=config.digest(),
        arm=config.arm,
        status="interrupted" if session.interrupted else status,
        config=config,
        engine=cell.precision.engine,
        packages=dict(cell.precision.packages),
        ledger=session.ledger.look.read_ledger_from_device(
            loss_scale=metrics.final_loss_scale,
            emulated=cell.precision.emulated or emulated_type(cell.fp16_mode),
        ),
        half=f"{cell.precision.emulated} emulated" if cell.precision.emulated else cell.fp16_mode,
        host=host_name(),
        environment={**environment_fingerprint(), **cell.device_facts},
        metrics=list(task.metrics),
        unit=task.unit,
        summary=summary,
        trace=metrics.tracer.find_trace_of_run(metrics.seconds),
        readings=cell.monitor.readings(metrics.seconds, units),
        processes=processes,
        resumed=session.resumed,
        notes=list(cell.precision.notes),
        error=f"asked to stop after {format_count(steps_done, 'update')}, and saved"
        if session.interrupted
        else None,
    )


@contextmanager
def _guards_during_warmup(config: RunConfig) -> Iterator[list[str]]:
    """Install the guards while a cell is built and makes the warmup updates, which step times leave out.

    After these the guards are removed, so that a timed step runs the same functions as without them. ampcompare's own
    loop needs no check; a model's factory, a data set, or a backend of another package does.

    Yields:
        The violations. The list grows as they are found; each is also a line on stderr.
    """
    violations: list[str] = []

    def note_violation(violation: guards.Violation) -> None:
        violations.append(str(violation))
        sys.stderr.write(f"ampcompare {violation}\n")

    passes = config.warmup_steps * config.recipe.grad_accum_steps
    installed = guards.install_in_mode(config.guards, say=note_violation, passes=passes)
    with installed or contextlib.nullcontext():
        yield violations


class JsonLineFile:
    """Appends records as lines; use it as a context. It is unbuffered, so that every record survives a crash."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise self._error_of_failed_write(error) from error

    def write(self, records: Iterable[StepRecord | EpochResult]) -> None:
        """Append records, each as one line."""
        text = "".join(dump_json(record, indent=None) + "\n" for record in records).encode()
        try:
            while text:  # a nearly full disk may accept only a part
                text = text[self._file.write(text) :]
        except OSError as error:
            raise self._error_of_failed_write(error) from error

    def _error_of_failed_write(self, error: OSError) -> EnvironmentUnfit:
        reason = error.strerror or error
        return EnvironmentUnfit(
            f"cannot write {self._path}: {reason}; free some space or choose another --output-dir"
        )

    def __enter__(self) -> JsonLineFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()


def measure_and_gather_process_facts(
    config: RunConfig, session: TrainingSession, world: DistributedEnv, summary: RunSummary
) -> ProcessFacts:
    """Gather what differs between ranks. All ranks call it, after training: it trains further steps to time them."""
    assembly, ranks = session.assembly, session.assembly.ranks
    by_rank = ranks.gather((summary.step_seconds_median, summary.peak_bytes, summary.start_seconds))
    seconds = [step_seconds for step_seconds, _, _ in by_rank if step_seconds is not None]
    wrapper = type(assembly.models[0])
    weights = digest_of_weights(assembly.replicas)  # before further steps change them
    share = None
    # Where forward passes wait for other ranks, no other program would make a step without reducing.
    ended_well = summary.diverged_step is None and not session.interrupted
    if ranks.size > 1 and seconds and ended_well and not assembly.parallel.waits_in_forward:
        part: dict[str, Any] = {"device": assembly.device, "rank": ranks.rank, "world_size": ranks.size}
        batch = next(iter(assembly.task.data.train_batches(0, config.recipe.batch_size, **part)))
        share = measure_allreduce_share(session.loop, batch, ranks, max(seconds))
    return ProcessFacts(
        world_size=ranks.size,
        nodes=world.node_count,
        global_batch_size=config.samples_per_update,
        backend=dist.get_backend(),
        wrapper=f"{wrapper.__module__}.{wrapper.__qualname__}",
        launcher=world.launcher,
        start_seconds=max((started for *_, started in by_rank if started is not None), default=None),
        allreduce_share=share,
        step_seconds_by_rank=seconds,
        step_seconds_slowest=max(seconds, default=None),
        step_seconds_median=statistics.median(seconds) if seconds else None,
        peak_bytes_by_rank=[peak for _, peak, _ in by_rank if peak is not None],
        weights=weights,
    )


def device_facts(device: torch.device, config: RunConfig) -> dict[str, Any]:
    """Return name, versions and switches of a device; a value that torch cannot return is replaced by its error.

    Call it before training: some of these calls raise, which must not end a run.
    """
    facts: dict[str, Any] = {
        "device": str(device),
        "threads": config.threads,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
        "cores": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "NVIDIA_TF32_OVERRIDE": os.environ.get("NVIDIA_TF32_OVERRIDE"),
    }
    if device.type not in ("cpu", "cuda"):
        kind = getattr(torch, device.type)
        facts["device_name"] = _value_or_error(lambda: kind.get_device_name(device))  # torch.mps has none
        return facts
    if device.type != "cuda":
        return {**facts, "cpu_capability": torch.backends.cpu.get_cpu_capability()}
    return facts | {
        "device_name": _value_or_error(lambda: torch.cuda.get_device_name(device)),
        "capability": _value_or_error(lambda: list(torch.cuda.get_device_capability(device))),
        "memory_bytes": _value_or_error(lambda: torch.cuda.get_device_properties(device).total_memory),
        "cuda": torch.version.cuda,
        "cudnn": _value_or_error(torch.backends.cudnn.version),  # raises on a GPU too old for it
        "tf32_matmul": Tf32Switches.read().products == "tf32",
        "tf32_convolution": Tf32Switches.read().convolutions == "tf32",
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
    }


def _value_or_error(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:  # versions of torch differ in what they raise
        return f"unknown: {first_line_of_text(error, type(error).__name__)}"


class _ResumePoint(NamedTuple):
    """The checkpoint that a cell resumes from, its content, made to fit the configuration, and facts for the record."""

    path: Path
    state: dict[str, Any]
    resumption: Resumption


def _find_resume_point(
    config: RunConfig, folder: Path, ranks: Communicator, attempt: int
) -> _ResumePoint | None:
    """Return the checkpoint that a cell resumes from, the same on every rank; None for a start from step 0.

    A cell that was restarted after a failure resumes from its own last checkpoint, whatever it first started from.
    """

    def read() -> tuple[str, dict[str, Any], dict[str, Any]] | None:
        checkpoints, resume = folder / CellFile.CHECKPOINTS, config.saving.resume
        checkpoint = find_checkpoint(AUTO, checkpoints) if attempt else None
        if checkpoint is None and resume is not None:
            checkpoint = find_checkpoint(resume, checkpoints)
        if checkpoint is None:
            return None
        state, resumption = state_to_resume_and_resumption(checkpoint, config, ranks.size)
        return str(checkpoint.path), state, resumption.model_dump()

    # Ranks receive plain data only: nothing that arrives from another process is unpickled as a class.
    received = ranks.broadcast_from_rank0(read)
    if received is None:
        return None
    path, state, resumption = received
    return _ResumePoint(Path(path), state, Resumption.model_validate(resumption))


def _keep_files_up_to_resume_point(folder: Path, point: _ResumePoint | None, attempt: int) -> None:
    """Keep in the folder of a cell only what belongs to the steps up to its resume point, and archive the rest."""
    checkpoints = folder / CellFile.CHECKPOINTS
    is_own = point is not None and checkpoints.resolve() in point.path.resolve().parents
    if not attempt and not is_own:
        move_checkpoints_to_previous(folder)
    # earlier ones are in the checkpoint, and written from there
    write_atomically(folder / CellFile.EPOCHS, "")
    if point is None:
        write_atomically(folder / CellFile.STEPS, "")
        return
    step = point.resumption.step
    if not copy_first_steps(folder, [point.path.parent.parent / CellFile.STEPS], step):
        point.resumption.notes.append(f"{CellFile.STEPS} begins with step {step}")


def record_of_failure(config: RunConfig, error: Exception, process: str = "") -> RunRecord:
    """Return the record of a cell that an exception ended, with the exit code of the command."""
    exit_code = ARM_FAILED
    error = own_missing_torch_name_error(error) or error
    if isinstance(error, AmpCompareError):  # these errors carry their own exit code
        text, exit_code = str(error), error.exit_code
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        file = "" if error.filename is None else f" for {error.filename}"
        text = f"no space is left on the disk{file}; free some or choose another --output-dir"
        exit_code = EnvironmentUnfit.exit_code
    else:
        kind = "out of memory" if _is_out_of_memory(error) else type(error).__name__
        text = ": ".join(filter(None, [process, kind, first_line_of_text(error)]))
    record = record_of_failed_cell(config, text, **environment_fingerprint(), exit_code=exit_code)
    return record.model_copy(update={"host": host_name()})


def _is_out_of_memory(error: Exception) -> bool:
    """Return whether memory ran out. torch raises its own class for GPUs, and a plain RuntimeError for CPUs."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)
