"""Activations that are computed again: the same numbers under every arm, in less memory."""

from typing import Any

import pytest
import torch
from torch import Tensor

from ampcompare.base.errors import UnsupportedCombination
from ampcompare.settings.config import RunConfig
from tests.training.sessions import CPU, make_session, play

ARMS = ["fp32", "apex:O1,engine=compat", "half:masters=fp32,dynamic"]


def config(arm: str = "fp32", *, checkpoint: bool, task: str = "lm", **recipe: Any) -> RunConfig:
    """Two updates of two micro-batches of a transformer with two blocks."""
    small = {"data": {"train_size": 16, "val_size": 8, "sequence_length": 8}}
    small["model"] = {"args": {"width": 8, "heads": 2, "depth": 2}}
    shared = {"batch_size": 8, "epochs": 1, "grad_accum_steps": 2, "optimizer": {"name": "sgd", "lr": 0.1}}
    values = {"task": task, **small, **shared, **recipe, "checkpoint_activations": checkpoint}
    return RunConfig.model_validate({"arm": arm, "recipe": values})


@pytest.mark.parametrize(
    "arm",
    ["fp32", *(pytest.param(arm, marks=[pytest.mark.integration, pytest.mark.slow]) for arm in ARMS[1:])],
)
def test_numbers_are_the_same(arm: str) -> None:
    """Losses, weights and metrics of an arm are equal to the last bit, with and without."""
    steps, epochs, made = play(config(arm, checkpoint=False))
    others, other_epochs, other = play(config(arm, checkpoint=True))
    assert len(steps) == 2
    assert [step.loss for step in steps] == [step.loss for step in others]
    assert [epoch.values for epoch in epochs] == [epoch.values for epoch in other_epochs]
    for a, b in zip(
        made.assembly.replicas[0].parameters(), other.assembly.replicas[0].parameters(), strict=True
    ):
        assert torch.equal(a, b)


def test_less_is_kept() -> None:
    """Between the passes a block keeps its input alone."""

    def kept(*, checkpoint: bool) -> int:
        made = make_session(config(checkpoint=checkpoint)).assembly
        sizes: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        batch = next(iter(made.task.data.train_batches(0, 8, device=CPU)))
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            made.task.loss(made.models, batch)
        own = {parameter.data_ptr() for parameter in made.models[0].parameters()}
        return sum(size for place, size in sizes.items() if place not in own)

    assert kept(checkpoint=True) < 0.6 * kept(checkpoint=False)


def test_a_task_without_blocks_is_refused() -> None:
    """A model that names no modules to compute again cannot be asked to."""
    with pytest.raises(UnsupportedCombination, match="no repeated blocks"):
        make_session(config(checkpoint=True, task="regression", data={}, model={}))
