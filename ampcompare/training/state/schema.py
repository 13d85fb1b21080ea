"""The plain values of a checkpoint that a resumed run relies on, and their types."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ampcompare.base.errors import CheckpointError

__all__ = ["NO_VALUE", "Saved", "require_plain_parts", "require_position"]

NO_VALUE = -1.0  # what older checkpoints hold as the best value before the first evaluation

Count = Annotated[int, Field(ge=0)]


class _Strict(BaseModel):
    """Values of exactly these types; unknown keys are ignored, because newer versions may write them."""

    model_config = ConfigDict(strict=True, frozen=True)


class Progress(_Strict):
    """How far the run was, and with how many processes."""

    step: Count
    epoch: Count
    batch: Count
    train_seconds: float
    skipped: Count
    world_size: Annotated[int, Field(ge=1)]
    total_batch_size: Annotated[int, Field(ge=1)]


class Saved(_Strict):
    """The plain values of a checkpoint; `parts` has states by name, those of policies that the run had."""

    arm: str
    trainer: str | None = None
    recipe: dict[str, Any]
    progress: Progress
    parts: dict[str, Any]
    rng: list[Any]
    buffers: list[dict[str, Any]]


def require_plain_parts(state: Mapping[str, Any]) -> Saved:
    """Return the plain values of a checkpoint after checking their types.

    Raises:
        CheckpointError: names the first wrong entry.
    """
    try:
        saved = Saved.model_validate(dict(state))
    except ValidationError as error:
        fault = error.errors()[0]
        path = ".".join(str(part) for part in fault["loc"]) or "an entry"
        raise CheckpointError(f"{path} of the checkpoint is not what a run writes: {fault['msg'][:200]}") from None
    size = saved.progress.world_size
    for name, entries in (("rng", saved.rng), ("buffers", saved.buffers)):
        if len(entries) != size:
            raise CheckpointError(f"{name} of the checkpoint is of {len(entries)} ranks, and {size} wrote it")
    return saved


def require_position(progress: Mapping[str, Any], steps_per_epoch: int, total_steps: int) -> None:
    """Check that a checked position is one that a run of this length can have.

    Raises:
        CheckpointError: steps, epochs and batches do not add up.
    """
    step, epoch, batch = progress["step"], progress["epoch"], progress["batch"]
    # A run that was stopped after the last update of an epoch still lacks its evaluation.
    inside = step == epoch * steps_per_epoch + batch and batch <= steps_per_epoch
    cut_short = step == total_steps and batch == 0 and epoch == math.ceil(total_steps / steps_per_epoch)
    if step > total_steps or not (inside or cut_short):
        raise CheckpointError(
            f"progress of the checkpoint is {step} steps, {epoch} epochs and {batch} batches, and an epoch of this run "
            f"has {steps_per_epoch} of {total_steps} steps; use the checkpoint before it"
        )
