"""The last stage of a cell: the record of what it did."""

from __future__ import annotations

from typing import Literal

import torch

from ampcompare.base.environment.versions import fingerprint, host_name
from ampcompare.launch.distributed_env import DistributedEnv
from ampcompare.launch.worker.process_facts import gather_process_facts
from ampcompare.launch.worker.stages.build import Cell
from ampcompare.records.run import RunRecord
from ampcompare.settings.config import RunConfig
from ampcompare.training.metrics.hashes import parameters_sha256, weights_sha256
from ampcompare.training.other_precisions import evaluate_in_others
from ampcompare.training.session import Session

__all__ = ["record"]


def record(cell: Cell, world: DistributedEnv | None, *, start_seconds: float, seconds: float) -> RunRecord:
    """Return the record of a cell that has run. With several processes all of them call it: it gathers facts of each.

    Args:
        world: how the processes were started, if there are several.
        start_seconds: from the start of the process or launcher until training could begin.
        seconds: of building and training.
    """
    config, session, metrics = cell.config, cell.session, cell.metrics
    summary = metrics.summary(
        session.divergence, cell.memory.peak(), seconds, ended=session.ended, rollbacks=session.rollbacks
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
        results = evaluate_in_others(session, cell.compute)
        summary = summary.model_copy(update={"in_precisions": results})
    with cell.compute:  # it times further steps, which must compute as the others did
        processes = None if world is None else gather_process_facts(config, session, world, summary)
    steps_done = session.position.step
    return RunRecord(
        cell=config.digest(),
        arm=config.arm,
        status=_status(session),
        config=config,
        engine=cell.precision.engine,
        effective=cell.precision.effective,
        half=f"{cell.precision.emulated} emulated" if cell.precision.emulated else cell.fp16_mode,
        host=host_name(),
        environment={**fingerprint(), **cell.device_facts},
        metrics=list(session.assembly.task.metrics),
        unit=session.assembly.task.unit,
        summary=summary,
        trace=metrics.tracer.trace(metrics.seconds),
        readings=cell.monitor.readings(metrics.seconds, _units_of_a_gpu(cell)),
        processes=processes,
        resumed=session.resumed,
        notes=[*_settings_without_effect(config, cell.device), *cell.precision.notes],
        error=f"asked to stop after {steps_done} updates, and saved" if session.interrupted else None,
    )


def _units_of_a_gpu(cell: Cell) -> int | None:
    """Return the units that this process trains on in a step; None where several GPUs share them."""
    is_one = cell.config.parallel.kind != "dp"
    return cell.config.recipe.batch_size * cell.session.assembly.task.units_per_sample if is_one else None


def _status(session: Session) -> Literal["completed", "diverged", "interrupted"]:
    if session.interrupted:
        return "interrupted"
    return "completed" if session.divergence.diverged_step is None else "diverged"


def _settings_without_effect(config: RunConfig, device: torch.device) -> list[str]:
    """Return a line with the reason for each requested setting that changes nothing on this device."""
    if device.type == "cuda":
        return []
    purposes = {"--pin-memory": "copies to a GPU", "--prefetch": "copies to a GPU", "--cudnn-benchmark": "cuDNN"}
    values = [config.pin_memory, config.prefetch, config.recipe.cudnn_benchmark]
    return [
        f"{name} has no effect here: it is for {purpose}, but the device is {device}"
        for (name, purpose), value in zip(purposes.items(), values, strict=True)
        if value
    ]
