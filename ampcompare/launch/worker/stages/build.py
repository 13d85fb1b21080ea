"""The second stage of a cell: everything that it needs, built from its configuration or restored from a checkpoint."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ampcompare.launch.cell_files import CHECKPOINTS
from ampcompare.launch.worker.device_facts import device_facts
from ampcompare.launch.worker.monitor import SystemMonitor
from ampcompare.launch.worker.resume import find_resume_point, prepare_files
from ampcompare.parallel.ranks import Communicator
from ampcompare.precision.base import Precision
from ampcompare.precision.cpu_half import cpu_half
from ampcompare.precision.factory import make_precision
from ampcompare.settings.config import RunConfig
from ampcompare.tasks.registry import make_task
from ampcompare.training.assemble import assemble, make_parallel
from ampcompare.training.compile import cpu_half_of
from ampcompare.training.metrics.hashes import parameters_sha256
from ampcompare.training.metrics.memory import MemoryMeter, make_memory_meter
from ampcompare.training.metrics.run_summary import RunMetrics
from ampcompare.training.session import Session
from ampcompare.training.state.saver import Saver
from ampcompare.training.stop_request import StopRequest

__all__ = ["Cell", "build"]


@dataclass(frozen=True)
class Cell:
    """A cell that is ready to train.

    Attributes:
        fp16_mode: how 16-bit arithmetic is computed on this device; None for fp32.
        compute: the context of every step, which emulates fp16 if `fp16_mode` says so.
        steps_path, epochs_path: `steps.jsonl` and `epochs.jsonl` on rank 0, the null device on the others.
        device_facts: name, versions and switches of the device.
    """

    config: RunConfig
    device: torch.device
    precision: Precision
    session: Session
    saver: Saver
    stop: StopRequest
    metrics: RunMetrics
    memory: MemoryMeter
    fp16_mode: str | None
    compute: contextlib.AbstractContextManager[Any]
    steps_path: Path
    epochs_path: Path
    device_facts: dict[str, Any]
    monitor: SystemMonitor


def build(config: RunConfig, folder: Path, device: torch.device, ranks: Communicator, attempt: int = 0) -> Cell:
    """Build everything that a cell needs, and restore the checkpoint that it resumes from, if any.

    Args:
        attempt: restarts before this one.

    Raises:
        AmpCompareError: a setting, a checkpoint or the device does not fit; the files of the cell are unchanged.
    """
    precision = make_precision(config.arm, device=str(device))
    task = make_task(config.recipe)
    memory = make_memory_meter(device)  # before the models: its peak counts from here
    engine = precision.engine.name if precision.engine else None
    parallel = make_parallel(config.parallel, device, engine)
    point = find_resume_point(config, folder, ranks, attempt)
    state = None if point is None else point.state
    assembly = assemble(
        config.recipe, task, precision, parallel, device, workers=config.workers, ranks=ranks, state=state
    )
    # Only now: a checkpoint that does not fit changes no file.
    ranks.broadcast_from_rank0(lambda: prepare_files(folder, point, attempt))
    steps_path, epochs_path = (
        folder / name if ranks.is_first else Path(os.devnull) for name in ("steps.jsonl", "epochs.jsonl")
    )
    saver = Saver(folder / CHECKPOINTS, config.saving, _log, steps_path, ranks)
    stop = StopRequest(config.saving.stop_at_step)
    session = Session(config, assembly, saver=saver, stop=stop)
    units = config.recipe.batch_size * ranks.size * task.units_per_sample
    metrics = RunMetrics(config.warmup_steps, units, task.metrics[0])
    session.stateful["tally"] = metrics  # saved and restored with the session
    if point is None:
        metrics.initial_parameters = parameters_sha256(assembly.replicas)
    else:
        session.load_state_dict(point.state, point.resumption)
    mode = cpu_half_of(config.cpu_half, config.recipe.compile)
    fp16_mode, compute = cpu_half(mode, precision.half_dtype, device)
    return Cell(
        config=config,
        device=device,
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


def _log(text: str) -> None:
    """Write a line to the log of the cell, unless the disk is full."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{text}\n")
