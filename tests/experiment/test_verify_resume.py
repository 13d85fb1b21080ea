"""Whether a run that was resumed equals the unbroken one: what is compared, and what is said of a difference."""

from collections.abc import Callable
from pathlib import Path

import pytest

from ampcompare.base.errors import ConfigError, LaunchError
from ampcompare.experiment.launch.contract import Launcher, Progress
from ampcompare.experiment.launch.worker.cell import train_cell_and_write_record
from ampcompare.experiment.single_run import verify_resume
from ampcompare.results.records.run import RunRecord
from ampcompare.settings.config import RunConfig

pytestmark = pytest.mark.integration

TINY = {
    "data": {"name": "synthetic", "train_size": 64, "val_size": 32, "image_size": 8},
    "model": {"arch": "mlp"},
    "batch_size": 16,
    "epochs": 2,
}


class Inline(Launcher):
    """Trains in this process, and may touch the files of a cell before it."""

    def __init__(self, before: Callable[[RunConfig, Path], None] = lambda config, folder: None) -> None:
        self.before = before

    def launch(
        self, config: RunConfig, folder: Path, on_progress: Callable[[Progress], None] | None = None
    ) -> RunRecord:
        folder.mkdir(parents=True, exist_ok=True)
        self.before(config, folder)
        return train_cell_and_write_record(config, folder, on_progress)


def test_a_resumed_run_equals_the_unbroken_one(tmp_path: Path) -> None:
    """The stop is between the first step and the last, and nothing differs."""
    found = verify_resume(RunConfig.model_validate({"recipe": TINY}), tmp_path, Inline())
    assert found.difference == ""
    assert 1 <= found.step < found.steps == 8


def test_a_difference_is_named(tmp_path: Path) -> None:
    """A checkpoint that lost the momentum of one weight shows in the step after next."""
    import torch

    from ampcompare.checkpoints.store.folder import CheckpointFolder

    def spoil(config: RunConfig, folder: Path) -> None:
        if config.saving.resume:
            files = CheckpointFolder(folder / "checkpoints")
            found = files.read_newest_path_state_and_notes()
            assert found is not None
            state = found[1]
            state["optimizer"]["state"][0]["momentum_buffer"] = torch.zeros_like(
                state["optimizer"]["state"][0]["momentum_buffer"]
            )
            files.save(state, step=state["progress"]["step"])

    found = verify_resume(RunConfig.model_validate({"recipe": TINY}), tmp_path, Inline(spoil))
    assert found.difference.startswith((f"step {found.step + 1}: loss is", "epoch", "model."))


def test_what_cannot_be_verified_is_said(tmp_path: Path) -> None:
    """A run of one update has no step to stop after, and one that fails has nothing to compare."""
    config = RunConfig.model_validate({"recipe": {**TINY, "max_steps": 1}})
    with pytest.raises(ConfigError, match="1 updates, but --verify-resume needs at least 2"):
        verify_resume(config, tmp_path / "short", Inline())
    config = RunConfig.model_validate({"recipe": {**TINY, "model": {"arch": "nowhere:none"}}})
    with pytest.raises(LaunchError, match="fp32 failed"):
        verify_resume(config, tmp_path / "failed", Inline())
