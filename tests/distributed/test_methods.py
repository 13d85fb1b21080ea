"""Methods of training over two ranks: both do the same at the same step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ampcompare.results.records.evaluation import EpochResult
from ampcompare.settings.config import RunConfig
from ampcompare.training.session import TrainingSession
from tests.distributed.sessions import make_session

Run = Callable[..., list[Any]]
FOUR_UPDATES = {"name": "synthetic", "train_size": 64, "val_size": 33, "image_size": 8}


def configuration(
    arm: str, *, processes: int = 1, recipe: dict[str, Any] | None = None, **options: Any
) -> RunConfig:
    """Ten updates of 16 samples in one epoch, with 33 samples for evaluation."""
    values = {
        "data": {"name": "synthetic", "train_size": 160, "val_size": 33, "image_size": 8},
        "model": {"arch": "mlp"},
        "global_batch_size": 16,
        "epochs": 1,
        **(recipe or {}),
    }
    return RunConfig.model_validate(
        {"recipe": values, "arm": arm, "processes": processes, "drain_every": 2, **options}
    )


def averaged(session: TrainingSession) -> tuple[list[EpochResult], Tensor]:
    """Train to the end; return the results and all averaged tensors."""
    epochs = [event for event in session.train_and_yield_events() if isinstance(event, EpochResult)]
    assert session.assembly.average is not None
    (state,) = session.assembly.average.state_dict()["models"]
    return epochs, torch.cat([value.flatten().double() for value in state.values()])


def average_on_ranks(arm: str, kind: str, arch: str) -> tuple[list[EpochResult], Tensor]:
    recipe = {"ema_decay": 0.7, "model": {"arch": arch, "args": {"width": 8}}, "data": FOUR_UPDATES}
    return averaged(make_session(configuration(arm, processes=2, parallel={"kind": kind}, recipe=recipe)))


@pytest.mark.parametrize(("arm", "kind"), [("fp32", "ddp"), ("apex:O2", "apex-ddp"), ("native:bf16", "ddp")])
def test_the_average_is_one_over_all_ranks(ranks: Run, arm: str, kind: str) -> None:
    """Both ranks hold the same average, statistics of batch norm included, and count the same right answers."""
    (epochs, mean), (other_epochs, other_mean) = ranks(
        2, average_on_ranks, arm=arm, kind=kind, arch="convnet"
    )
    assert torch.equal(mean, other_mean)
    assert epochs[0].ema_counts == other_epochs[0].ema_counts != {}
    assert epochs[0].ema_loss == other_epochs[0].ema_loss != epochs[0].loss


def test_the_average_of_two_halves_is_that_of_the_whole(ranks: Run) -> None:
    recipe = {"ema_decay": 0.7, "model": {"arch": "mlp", "args": {"width": 8}}, "data": FOUR_UPDATES}
    epochs, mean = averaged(make_session(configuration("fp32", recipe=recipe)))
    both, theirs = ranks(2, average_on_ranks, arm="fp32", kind="ddp", arch="mlp")[0]
    torch.testing.assert_close(theirs, mean, rtol=1e-5, atol=1e-6)
    assert both[0].ema_counts == epochs[0].ema_counts


def broken_on_one(on_nan: str) -> tuple[Any, ...]:
    """Give rank 1 alone a bad batch, or bad weights; return what each rank saw and where it ended."""
    session = make_session(
        configuration("fp32", processes=2, on_nan=on_nan, rollback_every=2, parallel={"kind": "ddp"})
    )
    data = session.assembly.task.data
    whole = data.train_batches

    def spoiled(*args: Any, **options: Any) -> Any:
        for number, (images, labels) in enumerate(whole(*args, **options)):
            bad = number == 5 and dist.get_rank() == 1
            yield images * float("nan") if bad else images, labels

    object.__setattr__(data, "train_batches", spoiled)
    events = list(session.train_and_yield_events())
    steps = [step for event in events if not isinstance(event, EpochResult) for step in event]
    weights = torch.cat([param.detach().flatten() for param in session.assembly.replicas[0].parameters()])
    returns = session.steps_at_rollbacks
    skipped = [step.step for step in steps if not all(step.applied)]
    return len(steps), skipped, returns, session.divergence.diverged_step, weights


@pytest.mark.parametrize(("on_nan", "skipped", "returns"), [("skip", [5], []), ("rollback", [], [6])])
def test_a_bad_batch_on_one_rank(ranks: Run, on_nan: str, skipped: list[int], returns: list[int]) -> None:
    """Both ranks drop the update, or go back, at the same step, and end with equal finite weights."""
    one, other = ranks(2, broken_on_one, on_nan=on_nan)
    assert one[:4] == other[:4] == (10, skipped, returns, None)
    assert torch.equal(one[4], other[4])
    assert one[4].isfinite().all()


def compiled_on_ranks(arm: str, kind: str, arch: str, backend: str) -> tuple[list[float], Tensor]:
    """Train with two micro-batches in a compiled model with channels last."""
    recipe = {"compile": backend, "channels_last": True, "grad_accum_steps": 2, "model": {"arch": arch}}
    recipe["data"] = {**FOUR_UPDATES, "train_size": 32}
    config = configuration(arm, processes=2, parallel={"kind": kind}, recipe=recipe)
    session = make_session(config)
    losses = [
        step.loss
        for event in session.train_and_yield_events()
        if not isinstance(event, EpochResult)
        for step in event
    ]
    return losses, torch.cat(
        [param.detach().float().flatten() for param in session.assembly.replicas[0].parameters()]
    )


@pytest.mark.parametrize(
    ("arm", "kind", "arch"), [("native:bf16", "ddp", "convnet"), ("apex:O1", "apex-ddp", "mlp")]
)
def test_a_compiled_model_on_two_ranks(ranks: Run, arm: str, kind: str, arch: str) -> None:
    options = {"arm": arm, "kind": kind, "arch": arch}
    (losses, weights), (other_losses, other_weights) = ranks(2, compiled_on_ranks, backend="eager", **options)
    assert losses == other_losses
    assert torch.equal(weights, other_weights)
    plain, expected = ranks(2, compiled_on_ranks, backend="none", **options)[0]
    assert losses == pytest.approx(plain, rel=1e-3)
    torch.testing.assert_close(weights, expected, rtol=1e-2, atol=1e-3)
