"""Which checkpoint a run goes on from, and whether it is one of this very run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from ampcompare.config import Recipe, RunConfig
from ampcompare.environment import fingerprint
from ampcompare.errors import CheckpointError
from ampcompare.record import Resumption
from ampcompare.training.checkpoint import CONVERTED

__all__ = ["AUTO", "Found", "find_checkpoint", "fitted"]

AUTO = "auto"
NEEDED = ("model", "optimizer", "progress", "parts", "rng", "arm", "recipe")
FOLLOW_TOTAL_BATCH = ("batch_size", "global_batch_size", "grad_accum_steps")
MOST_NAMED = 3


class Found(NamedTuple):
    """A checkpoint that was read.

    Attributes:
        path: of its file.
        state: what it holds.
        notes: newer ones that were passed over, and why.
    """

    path: Path
    state: dict[str, Any]
    notes: list[str]


def find_checkpoint(resume: str, own: Path) -> Found | None:
    """Read the checkpoint to go on from.

    Args:
        resume: a file, a folder of checkpoints, the folder of a cell that has one, a run directory where one cell has
            one, or "auto".
        own: folder of the run's own checkpoints, which "auto" means.

    Returns:
        None where "auto" finds no checkpoint: the run starts at its first step.

    Raises:
        CheckpointError: it is not there, or cannot be read.
    """
    from ampcompare.checkpoint.file import read_checkpoint
    from ampcompare.checkpoint.folder import CheckpointFolder

    if resume == AUTO:
        found = CheckpointFolder(own).newest()
        return None if found is None else Found(*found)
    path = Path(resume)
    if not path.is_dir():
        return Found(path, read_checkpoint(path), [])
    saved = sorted({file.parent for file in path.glob(f"cells/*/{own.name}/step-*.pt")})
    if len(saved) > 1:
        shown = ", ".join(map(str, saved[:MOST_NAMED])) + (", ..." if len(saved) > MOST_NAMED else "")
        raise CheckpointError(f"{path} holds checkpoints of {len(saved)} cells; name one of {shown}")
    for folder in (path, path / own.name, *saved):
        found = CheckpointFolder(folder).newest()
        if found is not None:
            return Found(*found)
    raise CheckpointError(
        f"{path} holds no checkpoint (step-*.pt); name a file, a folder of "
        "checkpoints, or the folder of a run that has saved"
    )


def fitted(found: Found, config: RunConfig, world_size: int) -> tuple[dict[str, Any], Resumption]:
    """Return the state that a run goes on from, converted if that is asked for, and what its record will say of it.

    Raises:
        CheckpointError: it is of another arm, another recipe or another total batch, or no state of a run at all.
    """
    path, state, notes = found
    missing = [name for name in NEEDED if name not in state]
    if missing:
        raise CheckpointError(
            f"{path} has no {', '.join(missing)}, so that no run can go on from it; take a step-*.pt that a run wrote"
        )
    arm = state["arm"]
    if arm != config.arm and not config.saving.resume_into_other_arm:
        raise CheckpointError(
            f"{path} was written by {arm}, and the arm is {config.arm}; resume with --arm {arm}, or add "
            "--resume-into-other-arm to convert it"
        )
    size, total = state["progress"]["world_size"], state["progress"]["total_batch_size"]
    if total != config.recipe.batch_size * world_size:
        raise CheckpointError(
            f"{path} was written with {total} samples in an update, {total // size} on each of {size} processes, and "
            f"this run has {config.recipe.batch_size} on each of {world_size}; resume with --global-batch-size {total}"
        )
    _require_recipe(path, state["recipe"], config.recipe, same_size=size == world_size)
    notes = [*notes, *_changes(state.get("versions") or {}, fingerprint())]
    if size != world_size:
        notes.append(f"{size} processes then, {world_size} now: random generators of all ranks are derived anew")
    if arm != config.arm:
        from ampcompare.checkpoint.arms import into_arm

        conversion = into_arm(state, config.arm)
        state = {**conversion.state, CONVERTED: True}
        notes += [
            f"converted from {arm}",
            *conversion.changed,
            *(f"not carried over: {item}" for item in conversion.lost),
        ]
    return state, Resumption(step=state["progress"]["step"], processes=size, arm=arm, notes=notes)


def _require_recipe(path: Path, saved: Mapping[str, Any], recipe: Recipe, *, same_size: bool) -> None:
    try:
        there = dict(_places(Recipe.model_validate(saved).model_dump(mode="json")))
    except ValidationError:
        there = dict(_places(saved))
    here = dict(_places(recipe.model_dump(mode="json")))
    apart = [place for place in {**there, **here} if there.get(place) != here.get(place)]
    if not same_size:  # the total is the same, and a process has another share of it
        apart = [place for place in apart if place not in FOLLOW_TOTAL_BATCH]
    if apart:
        named = "; ".join(
            f"{place} is {there.get(place)} there and {here.get(place)} here" for place in apart[:MOST_NAMED]
        )
        more = f"; and {len(apart) - MOST_NAMED} more" if len(apart) > MOST_NAMED else ""
        raise CheckpointError(
            f"{path} is of another recipe: {named}{more}; resume with the settings that it was made by"
        )


def _places(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict) and name != "args":
            yield from _places(value, f"{above}{name}.")
        else:
            yield above + name, value


def _changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [f"{name} {then[name]} then, {value} now" for name, value in now.items() if then.get(name, value) != value]
