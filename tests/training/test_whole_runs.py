"""What a whole run does when losses are not finite, scales fall, or it is good enough."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ampcompare.results.records.evaluation import EpochResult
from ampcompare.results.records.step import StepRecord
from ampcompare.settings.config import RunConfig
from ampcompare.training.session import TrainingSession
from tests.training.sessions import make_session, play, split

Change = Callable[[int, torch.Tensor], torch.Tensor]


def config(arm: str = "fp32", **options: Any) -> RunConfig:
    """Two epochs of six updates."""
    recipe = {"data": {"train_size": 192, "val_size": 64}, "model": {"arch": "mlp", "args": {"width": 16}}}
    recipe |= {"epochs": 2, "batch_size": 32, **options.pop("recipe", {})}
    return RunConfig.model_validate({"arm": arm, "recipe": recipe, "drain_every": 2, **options})


def spoil_batches(session: TrainingSession, change: Change) -> TrainingSession:
    """Let `change` see the images of each batch, by its number."""
    run, numbers = session.loop.run, itertools.count()

    def spoiled(batches: Any, **where: Any) -> Iterator[list[StepRecord]]:
        return run(((change(next(numbers), images), labels) for images, labels in batches), **where)

    session.loop.run = spoiled  # type: ignore[assignment, method-assign]
    return session


def play_spoiled(
    settings: RunConfig, change: Change
) -> tuple[list[StepRecord], list[EpochResult], TrainingSession]:
    session = spoil_batches(make_session(settings), change)
    return *split(session.train_and_yield_events()), session


def nan_at(*numbers: int) -> Change:
    """Make all images of these batches NaN."""
    return lambda number, images: images * float("nan") if number in numbers else images


def test_skip_goes_through_bad_batches() -> None:
    """fp32, which no scaler protects, trains on after single NaN batches, and stops where they do not end."""
    stop = play_spoiled(config(), nan_at(3, 7))
    assert (stop[2].divergence.reason, len(stop[0])) == ("non-finite weights", 4)
    steps, epochs, made = play_spoiled(config(on_nan="skip"), nan_at(3, 7))
    assert [step.step for step in steps if not all(step.applied)] == [3, 7]
    assert made.divergence.diverged_step is None
    assert made.divergence.first_nonfinite_loss_step == 3
    assert len(epochs) == 2
    steps, _, made = play_spoiled(config(on_nan="skip", nan_patience=3), nan_at(*range(3, 99)))
    assert (made.divergence.diverged_step, made.divergence.reason) == (3, "3 non-finite losses in a row")
    assert len(steps) == 6


@pytest.mark.parametrize("arm", ["fp32", "apex:O2,engine=compat", "native:fp16", "half"])
def test_rollback_goes_back_and_on(arm: str) -> None:
    """NaN in the weights brings back the last state that was kept; the run ends well and says where it went back."""

    def break_weights(number: int, images: torch.Tensor) -> torch.Tensor:
        if number == 4:
            with torch.no_grad():
                next(made.assembly.replicas[0].parameters()).fill_(float("nan"))
        return images

    made = spoil_batches(make_session(config(arm, on_nan="rollback", rollback_every=2)), break_weights)
    _, epochs = split(made.train_and_yield_events())
    assert made.steps_at_rollbacks == [6]
    assert made.divergence.diverged_step is None
    assert len(epochs) == 2
    assert all(param.isfinite().all() for param in made.assembly.replicas[0].parameters())


def test_a_falling_scale_ends_the_run() -> None:
    """Overflow after overflow lowers the scale below its floor, which ends the run as diverged, with both numbers."""
    for options, reason in (
        ({"stop_loss_scale": 8192}, "loss scale 4096 is below --fail-below-loss-scale 8192"),
        ({"max_skipped": 3}, "4 skipped steps in a row, more than --max-consecutive-skips 3"),
    ):
        settings = config("native:fp16", on_nan="continue", **options)
        steps, epochs, made = play_spoiled(settings, nan_at(*range(99)))
        assert (made.divergence.diverged_step, made.divergence.reason) == (3, reason)
        assert (len(steps), epochs) == (4, [])


def test_training_ends_when_it_is_good_enough_or_gets_no_better() -> None:
    """A target that the first epoch reaches, and patience without progress, end a run that is completed."""
    _, epochs, made = play(config(recipe={"target": 1.0, "epochs": 5}))
    assert len(epochs) == 1
    assert made.why_ended_early is not None
    assert made.why_ended_early.startswith("top-1 of ")
    still = {"optimizer": {"lr": 1e-30}, "early_stop": 2, "epochs": 9}
    _, epochs, made = play(config(recipe=still))
    assert len(epochs) == 3
    assert made.why_ended_early == "no better top-1 for 2 epochs, after epoch 2"
    assert made.divergence.diverged_step is None
    assert list(made.train_and_yield_events()) == []
