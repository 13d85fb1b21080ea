"""Every task that ships under every arm: it trains, O0 is fp32, batches are equal, and it resumes exactly."""

import copy
import functools
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ampcompare.apex.amp import _amp_state
from ampcompare.base.errors import UnsupportedCombination
from ampcompare.results.records.evaluation import EpochResult
from ampcompare.results.records.run import Resumption
from ampcompare.results.records.step import StepRecord
from ampcompare.settings.config import RunConfig
from ampcompare.tasks.catalog import TASKS
from ampcompare.tasks.task import make_task
from tests.training.sessions import CPU, events_of, make_session, split

pytestmark = pytest.mark.integration  # every task is trained with every arm

LEVELS = ("fp32", *(f"apex:O{level},engine=compat" for level in range(4)))
ARMS = [*LEVELS, "native:fp16", "native:bf16", "half:bn_fp32", "half:bf16,kahan", "half:masters=fp32,dynamic"]
RESUMED = ("fp32", "apex:O1,engine=compat", "apex:O2,engine=compat", "native:fp16", "half:bn_fp32")
SMALL: dict[str, dict[str, Any]] = {
    "classification": {"data": {"train_size": 32, "val_size": 20}, "model": {"args": {"width": 4}}},
    "segmentation": {
        "data": {"train_size": 32, "val_size": 20, "image_size": 12},
        "model": {"args": {"width": 4}},
    },
    "detection": {
        "data": {"train_size": 32, "val_size": 20, "image_size": 12},
        "model": {"args": {"width": 4}},
    },
    "gan": {"data": {"train_size": 32, "val_size": 20}, "model": {"args": {"width": 8}}},
    "lm": {
        "data": {"train_size": 32, "val_size": 20, "sequence_length": 8},
        "model": {"args": {"width": 8, "heads": 2, "depth": 1}},
    },
    "regression": {"data": {"train_size": 32, "val_size": 20}, "model": {"args": {"width": 8}}},
}


def config(task: str, arm: str = "fp32", **recipe: Any) -> RunConfig:
    """An epoch of two steps, with accumulation and clipping; by SGD, as Adam's eps is 0 in fp16."""
    small = copy.deepcopy(SMALL[task])
    shared = {"task": task, "batch_size": 16, "epochs": 1, "grad_accum_steps": 2, "clip_grad": 1.0}
    shared["optimizer"] = {"name": "sgd", "lr": 0.05}
    return RunConfig.model_validate({"arm": arm, "drain_every": 1, "recipe": {**small, **shared, **recipe}})


@functools.cache
def reference(task: str) -> tuple[list[StepRecord], list[EpochResult]]:
    """Train a task in fp32, once for all arms that are compared with it."""
    return split(events_of(make_session(config(task))))


def test_every_task_is_tested() -> None:
    assert set(SMALL) == set(TASKS)


@pytest.mark.parametrize(
    ("task", "arm"),
    [
        pytest.param(
            task, arm, marks=() if task == "gan" or arm == "apex:O2,engine=compat" else pytest.mark.slow
        )
        for task in TASKS
        for arm in ARMS
    ],
)
def test_every_arm_trains_every_task_and_resumes_exactly(task: str, arm: str) -> None:
    """Losses are near those of fp32, and equal to them under O0; a run from the middle of its epoch is the rest.

    All optimizers step, and every metric has a value.
    """
    others, other_epochs = reference(task)  # before O1 patches torch for the rest of this test
    session, saved = make_session(config(task, arm)), None
    seen: list[Any] = []
    for event in events_of(session):
        seen.append(event)
        if arm in RESUMED and len(seen) == 1:
            saved = copy.deepcopy(session.state_dict())
    steps, epochs = split(seen)
    assert len(steps) == 2
    assert steps[0].loss == pytest.approx(others[0].loss, rel=0.02)
    assert all(math.isfinite(step.loss) for step in steps)
    made = session.assembly.task
    assert list(epochs[-1].values) == [metric.name for metric in made.metrics]
    assert epochs[-1].samples == made.data.num_val == 20
    phases = made.phases(len(steps[0].applied))
    assert len(steps[0].losses) == (len(phases) if len(phases) > 1 else 0)
    if steps[0].losses:
        assert steps[0].loss == pytest.approx(sum(steps[0].losses))
    if arm.startswith(("apex:O1", "apex:O2")):
        assert len(steps[0].loss_scales) == len(phases), "each loss has a scaler of its own"
    if arm.startswith("apex:O0"):
        assert [step.loss for step in steps] == [step.loss for step in others]
        assert [epoch.values for epoch in epochs] == [epoch.values for epoch in other_epochs]
    if saved is not None:
        _amp_state.close()
        resumed = make_session(session.config, saved)
        resumed.load_state_dict(saved, Resumption(step=1))
        assert list(map(_untimed, events_of(resumed))) == list(map(_untimed, seen[1:]))


def _untimed(event: list[StepRecord] | EpochResult) -> Any:
    if isinstance(event, EpochResult):
        return event.values, event.counts, event.loss
    return [step._replace(seconds=0.0, data_seconds=0.0) for step in event]


@pytest.mark.parametrize("task", ["classification", "segmentation", "detection", "gan"])
def test_measurements_do_not_depend_on_the_batches(task: str) -> None:
    session = make_session(config(task))
    made, models = session.assembly.task, session.assembly.replicas
    for model in models:
        model.eval()

    def values(batch_size: int) -> dict[str, float]:
        sums: dict[str, Tensor] = {}
        with torch.no_grad():
            for batch in made.data.val_batches(batch_size, device=CPU):
                for name, part in made.measure(made.predict(models, batch), batch).items():
                    sums[name] = sums.get(name, torch.zeros(())) + part.sum(0, dtype=torch.float64)
        return made.values({name: part.numpy() for name, part in sums.items()}, 20)

    assert values(7) == pytest.approx(values(20), rel=1e-5)


def test_an_update_in_phases_is_no_cuda_graph() -> None:
    """A task with several losses is refused where one recorded step was asked for."""
    settings = config("gan", clip_grad=None)
    recipe = settings.recipe.model_copy(update={"cuda_graph": True})
    with pytest.raises(UnsupportedCombination, match="captures one step, but this task makes 2"):
        make_session(settings.model_copy(update={"recipe": recipe}))


def test_channels_last_takes_images_by_their_rank() -> None:
    """Images (N, C, H, W) change their memory format, and targets of another rank stay."""
    task = make_task(config("segmentation").recipe)
    images, classes = task.channels_last(next(iter(task.data.train_batches(0, 4, device=CPU))))
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert classes.is_contiguous()


def test_micro_batches_cut_every_tensor() -> None:
    batch = {"tokens": torch.arange(12).reshape(6, 2), "more": (torch.arange(6), "text")}
    parts = make_task(config("gan").recipe).split(batch, 3)
    assert [part["more"][0].tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
    assert (
        list(itertools.chain.from_iterable(part["tokens"].tolist() for part in parts))
        == batch["tokens"].tolist()
    )
    assert {part["more"][1] for part in parts} == {"text"}
