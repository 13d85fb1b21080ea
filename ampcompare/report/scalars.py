"""The curves of a run as numbers with names, the same names in every export."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ampcompare.records.evaluation import EpochResult
from ampcompare.records.run import RunRecord, StepRecord
from ampcompare.records.step import iter_steps

__all__ = ["Point", "points_of"]

Point = tuple[float, int, dict[str, float]]


def points_of(record: RunRecord, steps: Path) -> Iterator[Point]:
    """Yield seconds of training so far, a step, and values by name; evaluations stand at the last step before them.

    Args:
        steps: the `steps.jsonl` of the record.

    Raises:
        RecordError: it cannot be read.
    """
    epochs = {epoch.epoch: epoch for epoch in record.summary.epochs}
    skipped, elapsed, last = 0, 0.0, None
    for step in iter_steps(steps):
        if last is not None and last.epoch != step.epoch and last.epoch in epochs:
            yield elapsed, last.step, _evaluated(epochs.pop(last.epoch), record)
        skipped += not all(step.applied)
        elapsed += step.seconds + step.data_seconds
        yield elapsed, step.step, _trained(step, skipped)
        last = step
    if last is not None and last.epoch in epochs:
        yield elapsed, last.step, _evaluated(epochs[last.epoch], record)


def _trained(step: StepRecord, skipped: int) -> dict[str, float]:
    scales = step.loss_scales or (1.0,)  # an unscaled loss is a loss times 1, and so has the name that all have
    values = {"train/loss": step.loss, "train/skipped": float(skipped), "time/step_seconds": step.seconds}
    values |= {f"train/loss_scale{f'_{index}' if index else ''}": scale for index, scale in enumerate(scales)}
    known = {"train/lr": step.lr, "train/grad_norm": step.grad_norm}
    return values | {name: value for name, value in known.items() if value is not None}


def _evaluated(epoch: EpochResult, record: RunRecord) -> dict[str, float]:
    values = {
        f"eval/{metric.tag}": epoch.values[metric.name] for metric in record.metrics if metric.name in epoch.values
    }
    return values if epoch.loss is None else {**values, "eval/loss": epoch.loss}
