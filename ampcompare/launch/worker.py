"""What happens inside the process of a cell: train, and write steps and record beside each other.

`python -m ampcompare.launch.worker FOLDER` trains the configuration that lies in FOLDER.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
import torch.distributed as dist

from ampcompare.config import RunConfig
from ampcompare.environment import fingerprint
from ampcompare.errors import AmpCompareError, EnvironmentUnfit
from ampcompare.launch.base import Progress, read_config, write_config, write_record
from ampcompare.launch.continued import CHECKPOINTS, continue_steps, set_checkpoints_aside
from ampcompare.launch.group import group_of_one
from ampcompare.launch.guarded import guarded
from ampcompare.launch.machine import MachineWatch
from ampcompare.launch.world import World
from ampcompare.parallel.factory import make_parallel
from ampcompare.parallel.ranks import Alone, Ranks, weights_digest
from ampcompare.precision.cpu_half import cpu_half
from ampcompare.precision.factory import make_precision
from ampcompare.precision.tf32 import require_tf32, set_tf32
from ampcompare.record import EpochResult, ProcessFacts, Resumption, RunRecord, RunSummary, dump_json
from ampcompare.training.assemble import assemble, make_task
from ampcompare.training.checkpoint import restore_session
from ampcompare.training.compiling import cpu_half_of
from ampcompare.training.exchange import allreduce_share
from ampcompare.training.measure import make_memory_meter
from ampcompare.training.resume import AUTO, find_checkpoint, fitted
from ampcompare.training.saving import Saver
from ampcompare.training.session import Session
from ampcompare.training.stopping import StopRequest, stopped_by_sigterm
from ampcompare.training.summary import Tally

__all__ = ["failed_with", "resolve_device", "run_cell", "train_cell"]


def resolve_device(name: str) -> torch.device:
    """Return the device for "auto", "cpu", "cuda" or "cuda:INDEX".

    Raises:
        EnvironmentUnfit: CUDA was asked for and is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            built = "this torch is built without CUDA" if torch.version.cuda is None else "torch sees no GPU"
            raise EnvironmentUnfit(
                f"device {name} was asked for and {built}; use --device cpu, or install torch for CUDA"
            )
        if device.index is not None and device.index >= torch.cuda.device_count():
            raise EnvironmentUnfit(
                f"device {name} was asked for and there are {torch.cuda.device_count()} GPUs, from cuda:0"
            )
    return device


def run_cell(
    config: RunConfig,
    folder: Path,
    on_progress: Callable[[Progress], None] | None = None,
) -> RunRecord:
    """Train one cell in this process; write `config.json`, `steps.jsonl` and `record.json` to `folder`.

    Errors of the user's code, of torch and of this package end in a record with status "failed".
    """
    write_config(config, folder)
    needs_group = config.parallel.kind in ("ddp", "apex-ddp")
    try:
        with group_of_one() if needs_group else contextlib.nullcontext():
            record = train_cell(config, folder, on_progress)
    except Exception as error:  # whatever a user's model raises is the row of this arm, and the others go on
        traceback.print_exc()
        record = failed_with(config, error)
    write_record(record, folder)
    return record


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]


def _is_out_of_memory(error: Exception) -> bool:
    """Tell whether memory ran out: torch has a class of error for GPUs, and for CPUs only words."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)


def failed_with(config: RunConfig, error: Exception, who: str = "") -> RunRecord:
    """Return the record of a cell that an exception has ended.

    Args:
        who: the process in which it was raised, where there are several.
    """
    exit_code = 3
    if isinstance(error, AmpCompareError):  # which say themselves whose they are
        text, exit_code = str(error), error.exit_code
    else:
        kind = "out of memory" if _is_out_of_memory(error) else type(error).__name__
        text = ": ".join(filter(None, [who, kind, _first_line(error)]))
    environment = {**fingerprint(), "exit_code": exit_code}
    return RunRecord(
        cell=config.digest(), arm=config.arm, status="failed", config=config, error=text, environment=environment
    )


def train_cell(
    config: RunConfig,
    folder: Path,
    on_progress: Callable[[Progress], None] | None = None,
    *,
    ranks: Ranks | None = None,
    device: str | None = None,
    world: World | None = None,
    met: float | None = None,
) -> RunRecord:
    """Train one cell in this process, alone or as one of `ranks`; rank 0 writes `steps.jsonl`, and nobody the record.

    Args:
        device: of this process, where it is not the configuration's.
        world: how the processes were started, where there are several.
        met: seconds from the start of what starts the processes until they had met; None where this one is alone.
    """
    with guarded(config) as found:
        record = _train(config, folder, on_progress, ranks=ranks, device=device, world=world, met=met)
    return record.model_copy(update={"guards": found})


def _train(
    config: RunConfig,
    folder: Path,
    on_progress: Callable[[Progress], None] | None,
    *,
    ranks: Ranks | None,
    device: str | None,
    world: World | None,
    met: float | None,
) -> RunRecord:
    begin = time.perf_counter()
    started = time.time() - psutil.Process().create_time() if met is None else met
    ranks = ranks or Alone()
    place = resolve_device(device or config.device)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    torch.set_num_threads(config.threads)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    if config.tf32 == "on":
        require_tf32(place, "--tf32 on")
    if config.tf32 != "torch":
        set_tf32(config.tf32 == "on")
    sys.path.insert(0, os.getcwd())  # a user's `module:factory` lives beside them
    precision = make_precision(config.arm, device=str(place))
    task = make_task(config.recipe)
    meter = make_memory_meter(place)
    engine = precision.engine.name if precision.engine else None
    parallel = make_parallel(config.parallel, place, engine)
    attempt = 0 if world is None else world.attempt
    found = ranks.from_first(lambda: _resumed(config, folder, ranks.size, attempt))
    state, resumption = (None, None) if found is None else found
    assembly = assemble(
        config.recipe, task, precision, parallel, place, workers=config.workers, ranks=ranks, state=state
    )
    path = folder / "steps.jsonl" if ranks.is_first else Path(os.devnull)
    saver = Saver(folder / CHECKPOINTS, config.saving, _say, path)
    stop = StopRequest(config.saving.stop_at_step)
    session = Session(config, assembly, saver=saver, stop=stop)
    tally = Tally(config.warmup_steps, config.recipe.batch_size * ranks.size)
    session.parts["tally"] = tally
    if state is not None and resumption is not None:
        restore_session(session, state, resumption)
    del state, found
    how, context = cpu_half(cpu_half_of(config.cpu_half, config.recipe.compile), precision.half_dtype, place)
    machine = MachineWatch(place)
    with context, saver, path.open("a", encoding="utf-8") as steps, stopped_by_sigterm(stop):
        for event in session.events():
            if isinstance(event, EpochResult):
                tally.epochs.append(event)
                continue
            tally.add_steps(event)
            machine.look()
            steps.writelines(dump_json(record, indent=None) + "\n" for record in event)
            steps.flush()
            if on_progress is not None:
                on_progress(Progress(tally.num_steps, assembly.total_steps, event[-1].epoch))
    rollbacks = [] if session.rollback is None else session.rollback.steps
    seconds = time.perf_counter() - begin
    summary = tally.summary(session.watch, meter.peak(), seconds, ended=session.ended, rollbacks=rollbacks)
    summary = summary.model_copy(update={"start_seconds": max(0.0, started)})
    with context:  # the further steps that are timed compute as the others did
        processes = None if world is None else _process_facts(config, session, world, summary)
    return RunRecord(
        cell=config.digest(),
        arm=config.arm,
        status=_status(session),
        config=config,
        engine=precision.engine,
        effective=precision.effective,
        half=how,
        environment={**fingerprint(), **_device_facts(place, config)},
        summary=summary,
        trace=tally.tracer.trace(tally.seconds),
        readings=machine.readings(tally.seconds),
        processes=processes,
        resumed=session.resumed,
        notes=_idle_settings(config, place),
        error=f"told to end after {session.position.step} updates, and saved" if session.interrupted else None,
    )


def _idle_settings(config: RunConfig, device: torch.device) -> list[str]:
    """Return what was asked for and changes nothing here, with the reason."""
    if device.type == "cuda":
        return []
    asked = [*(["--pin-memory"] if config.pin_memory else []), *(["--prefetch"] if config.prefetch else [])]
    return [f"{name} does nothing here: it is for copies to a GPU, and the device is {device}" for name in asked]


def _status(session: Session) -> Literal["completed", "diverged", "interrupted"]:
    if session.interrupted:
        return "interrupted"
    return "completed" if session.watch.diverged_step is None else "diverged"


def _resumed(
    config: RunConfig, folder: Path, world_size: int, attempt: int
) -> tuple[dict[str, Any], Resumption] | None:
    """Return the checkpoint that a cell goes on from, with its files made ready; None where it starts anew.

    A cell that is started again after a failure goes on from its own last checkpoint, whatever it began with.

    Raises:
        CheckpointError: it cannot be read, or is of another run.
    """
    own, resume = folder / CHECKPOINTS, config.saving.resume
    found = find_checkpoint(AUTO, own) if attempt else None
    if found is None and resume is not None:
        found = find_checkpoint(resume, own)
    fit = None if found is None else fitted(found, config, world_size)
    if not attempt and (found is None or own.resolve() not in found.path.resolve().parents):
        set_checkpoints_aside(folder)
    if found is None or fit is None:
        (folder / "steps.jsonl").write_text("", encoding="utf-8")
        return None
    _, resumption = fit
    if not continue_steps(folder, [found.path.parent.parent / "steps.jsonl"], resumption.step):
        resumption.notes.append(f"steps.jsonl begins with step {resumption.step}")
    return fit


def _say(text: str) -> None:
    """Write a line to the log of the cell."""
    sys.stderr.write(f"{text}\n")


def _process_facts(config: RunConfig, session: Session, world: World, summary: RunSummary) -> ProcessFacts:
    """Gather what differs between ranks; called by all of them, as the last that is done with their models."""
    assembly, ranks = session.assembly, session.assembly.ranks
    everybody = ranks.gather((summary.step_seconds_median, summary.peak_bytes, summary.start_seconds))
    seconds = [took for took, _, _ in everybody if took is not None]
    wrapper = type(assembly.models[0])
    weights = weights_digest(assembly.replicas)
    share = None
    if ranks.size > 1 and seconds and summary.diverged_step is None and not session.interrupted:
        place: dict[str, Any] = {"device": assembly.device, "rank": ranks.rank, "world_size": ranks.size}
        batch = next(iter(assembly.task.data.train_batches(0, config.recipe.batch_size, **place)))
        share = allreduce_share(session.loop, batch, ranks, max(seconds))
    return ProcessFacts(
        world_size=ranks.size,
        nodes=world.nodes,
        global_batch_size=config.total_batch_size,
        backend=dist.get_backend(),
        wrapper=f"{wrapper.__module__}.{wrapper.__qualname__}",
        launcher=world.launcher,
        start_seconds=max((started for *_, started in everybody if started is not None), default=None),
        allreduce_share=share,
        step_seconds_by_rank=seconds,
        step_seconds_slowest=max(seconds, default=None),
        step_seconds_median=statistics.median(seconds) if seconds else None,
        peak_bytes_by_rank=[peak for _, peak, _ in everybody if peak is not None],
        weights=weights,
    )


def _device_facts(device: torch.device, config: RunConfig) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "device": str(device),
        "threads": config.threads,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
        "NVIDIA_TF32_OVERRIDE": os.environ.get("NVIDIA_TF32_OVERRIDE"),
    }
    if device.type == "cuda":
        facts |= {
            "device_name": torch.cuda.get_device_name(device),
            "capability": list(torch.cuda.get_device_capability(device)),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "tf32_matmul": torch.backends.cuda.matmul.allow_tf32,
            "tf32_convolution": torch.backends.cudnn.allow_tf32,
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
        }
    else:
        facts["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
    return facts


def main(arguments: list[str]) -> int:
    """Train the cell whose `config.json` lies in the folder named; the exit code is 0 once a record is written."""
    folder = Path(arguments[0])
    run_cell(read_config(folder), folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
