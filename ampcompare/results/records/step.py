"""The record of one update, and the file `steps.jsonl` that holds one in each line. Reading needs no torch."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ampcompare.base.errors import RecordError
from ampcompare.base.files.read import FileFault, parse_json, read_text
from ampcompare.results.records.document import parse_json_number

MAX_STEPS_BYTES = 2**31


class StepRecord(NamedTuple):
    """One update.

    Attributes:
        step: updates before this one.
        epoch: epochs before this one.
        loss: mean over the micro-batches, at the precision of the loss; not scaled. Several losses are summed.
        loss_scales_before: per loss scaler, the scale that multiplied this loss; empty where nothing is scaled.
        loss_scales: per loss scaler, after its update.
        applied: per optimizer; False means overflow, step skipped.
        grad_norm: norm of the unscaled gradients before clipping; None without clipping.
        seconds: from the start of the forward pass to the end of the optimizer step.
        data_seconds: wait for the batch before it; on a GPU, between two steps, the time without a step to compute.
        losses: each of several losses; empty where there is one.
        lr: learning rate of the first parameter group; None where it is not known, as in a user's own script.
    """

    step: int
    epoch: int
    loss: float
    loss_scales_before: tuple[float, ...]
    loss_scales: tuple[float, ...]
    applied: tuple[bool, ...]
    grad_norm: float | None
    seconds: float
    data_seconds: float
    losses: tuple[float, ...] = ()
    lr: float | None = None


def parse_step(line: str) -> StepRecord:
    """Return the step of a line of `steps.jsonl`.

    Raises:
        ValueError, KeyError, TypeError: it is none.
    """
    raw = parse_json(line)
    return StepRecord(
        step=raw["step"],
        epoch=raw["epoch"],
        loss=parse_json_number(raw["loss"]),
        loss_scales_before=tuple(parse_json_number(scale) for scale in raw["loss_scales_before"]),
        loss_scales=tuple(parse_json_number(scale) for scale in raw["loss_scales"]),
        applied=tuple(raw["applied"]),
        grad_norm=None if raw["grad_norm"] is None else parse_json_number(raw["grad_norm"]),
        seconds=raw["seconds"],
        data_seconds=raw["data_seconds"],
        losses=tuple(parse_json_number(loss) for loss in raw.get("losses", [])),
        lr=None if raw.get("lr") is None else parse_json_number(raw["lr"]),
    )


def iter_steps(path: Path) -> Iterator[StepRecord]:
    """Yield the steps of a `steps.jsonl`; a last line that was cut off ends the iteration.

    Raises:
        RecordError: the file cannot be read, or a line before the last is not a step.
    """
    try:
        lines = read_text(path, max_bytes=MAX_STEPS_BYTES).splitlines()
    except FileFault as fault:
        raise RecordError(f"cannot read steps {path}: {fault}") from None
    for number, line in enumerate(lines):
        try:
            yield parse_step(line)
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines) - 1:
                return
            raise RecordError(f"{path}, line {number + 1}, is not a step record: {error!r}") from None
