"""Which checkpoint a run resumes from, and whether it belongs to this run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import PydanticSerializationError

from ampcompare.base.environment.fingerprint import environment_fingerprint, host_name
from ampcompare.base.errors import CheckpointError
from ampcompare.base.files.run_files import RunFile
from ampcompare.base.formatting import printable_line
from ampcompare.results.records.run import Resumption
from ampcompare.settings.config import RunConfig
from ampcompare.settings.recipe import Recipe
from ampcompare.settings.validation import paths_and_values

AUTO = "auto"
FOLLOW_TOTAL_BATCH = ("batch_size", "global_batch_size", "grad_accum_steps")
MACHINE = ("torch", "processor", "machine", "host")  # on which it depends how long a step takes
MAX_NAMED = 3
MAX_LENGTH = 80


class FoundCheckpoint(NamedTuple):
    """A checkpoint that was read, with a note for each newer one that was skipped."""

    path: Path
    state: dict[str, Any]
    notes: list[str]


def find_checkpoint(resume: str, own_folder: Path) -> FoundCheckpoint | None:
    """Read the checkpoint to resume from.

    Args:
        resume: a file, a folder of checkpoints or of a cell, or a run with one such cell; "auto" for `own_folder`.
        own_folder: the folder of the run's own checkpoints.

    Returns:
        The newest; None if "auto" finds none, so that the run starts at its first step.

    Raises:
        CheckpointError: the file cannot be read, the folder holds none, or the run has saved several cells.
    """
    from ampcompare.checkpoints.store.file import read_checkpoint
    from ampcompare.checkpoints.store.folder import CheckpointFolder

    if resume == AUTO:
        newest = CheckpointFolder(own_folder).read_newest_path_state_and_notes()
        return None if newest is None else FoundCheckpoint(*newest)
    path = Path(resume)
    if not path.is_dir():
        return FoundCheckpoint(path, read_checkpoint(path), [])
    saved = sorted({found.parent for found in path.glob(f"{RunFile.CELLS}/*/{own_folder.name}/step-*.pt")})
    if len(saved) > 1:
        shown = ", ".join(map(str, saved[:MAX_NAMED])) + (", ..." if len(saved) > MAX_NAMED else "")
        raise CheckpointError(f"{path} holds checkpoints of {len(saved)} cells; name one of {shown}")
    for folder in (path, path / own_folder.name, *saved):
        newest = CheckpointFolder(folder).read_newest_path_state_and_notes()
        if newest is not None:
            return FoundCheckpoint(*newest)
    raise CheckpointError(
        f"{path} holds no checkpoint (step-*.pt); name one, a folder of checkpoints, or the folder of a run that has "
        "saved"
    )


def state_to_resume_and_resumption(
    checkpoint: FoundCheckpoint, config: RunConfig, world_size: int
) -> tuple[dict[str, Any], Resumption]:
    """Return the state that a run resumes from, converted to another arm if asked for, and the entry for its record.

    Args:
        checkpoint: of `find_checkpoint`.
        config: of the run that resumes.
        world_size: its number of ranks.

    Raises:
        CheckpointError: the checkpoint is of another arm and no conversion is asked for, or of another recipe or number
            of samples in an update.
        ConversionError: its state cannot become that of the arm.
    """
    path, state, notes = checkpoint
    progress, arm = state["progress"], str(state["arm"])
    if arm != config.arm and not config.saving.resume_into_other_arm:
        raise CheckpointError(
            f"{path} was written by {arm}, and the arm is {config.arm}; resume with --arm {arm}, or add "
            "--convert-on-resume to convert it"
        )
    size, total = progress["world_size"], progress["total_batch_size"]
    if total != config.recipe.batch_size * world_size:
        raise CheckpointError(
            f"{path} was written with {total} samples in an update, {total // size} on each of {size} processes, and "
            f"this run has {config.recipe.batch_size} on each of {world_size}; resume with --global-batch-size {total}"
        )
    _require_equal_recipe(path, state["recipe"], config.recipe, same_size=size == world_size)
    changes = _machine_changes_by_name(
        state.get("versions") or {}, {**environment_fingerprint(), "host": host_name()}
    )
    notes = [*notes, *changes.values()]
    if size != world_size:
        notes.append(
            f"{size} processes then, {world_size} now: the random generators of all ranks are seeded again"
        )
    trainer = state.get("trainer") or arm
    if arm != config.arm:
        from ampcompare.checkpoints.convert.between_arms import convert_state_to_arm
        from ampcompare.checkpoints.reader.foreign import translate_parser_errors

        with translate_parser_errors(path):
            conversion = convert_state_to_arm(state, config.arm)
        state = conversion.state
        notes += [
            f"converted from {arm}",
            *conversion.changed,
            *(f"not carried over: {item}" for item in conversion.lost),
        ]
    moved = [change for name, change in changes.items() if name in MACHINE]
    return state, Resumption(step=progress["step"], processes=size, arm=trainer, notes=notes, machine=moved)


def _require_equal_recipe(path: Path, saved: Mapping[str, Any], recipe: Recipe, *, same_size: bool) -> None:
    try:
        # Validation fills in defaults of settings that are newer than the checkpoint.
        before = dict(paths_and_values(Recipe.model_validate(saved).model_dump(mode="json")))
    except (ValidationError, PydanticSerializationError, TypeError, ValueError):
        before = dict(paths_and_values(saved))
    now = dict(paths_and_values(recipe.model_dump(mode="json")))
    different = [key for key in {**before, **now} if repr(before.get(key)) != repr(now.get(key))]
    if not same_size:  # the total is the same, and the share of a process is another
        different = [key for key in different if key not in FOLLOW_TOTAL_BATCH]
    if different:
        named = "; ".join(
            f"{key} is {_value_as_short_text(before.get(key))} there and {_value_as_short_text(now.get(key))} here"
            for key in different[:MAX_NAMED]
        )
        more = f"; and {len(different) - MAX_NAMED} more" if len(different) > MAX_NAMED else ""
        raise CheckpointError(
            f"{path} is of another recipe: {named}{more}; resume with the settings that it was written with"
        )


def _value_as_short_text(value: Any) -> str:
    return printable_line(str(value), MAX_LENGTH)


def _machine_changes_by_name(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: f"{name} {_value_as_short_text(saved[name])} then, {value} now"
        for name, value in now.items()
        if name in saved and str(saved[name]) != str(value)
    }
