"""Back to the last good state: all of it, for every arm, a limited number of times."""

import functools
from typing import Any

import pytest
import torch

from ampcompare.base.tensors.skippable_step import skip_on_device
from ampcompare.results.records.run import StepRecord
from ampcompare.training.policies import DivergenceDetector, Rollback, Snapshot
from ampcompare.training.precision.base import make_precision, owned_params

ARMS = [
    "fp32",
    "apex:O1,engine=compat",
    "apex:O2,engine=compat",
    "apex:O3,loss_scale=dynamic,engine=compat",
    "native:fp16,growth_interval=2",
    "half:bn_fp32",
    "half:master_weights,dynamic,growth_interval=2",
]


def everything(run: Any) -> list[Any]:
    """Return all that a snapshot holds, as plain values."""
    owned = owned_params(run.optimizer)
    momenta = [run.optimizer.state[param]["momentum_buffer"] for param in owned]
    tensors = (*run.stored(), *owned, *run.averaged().values(), *momenta)
    return [[tensor.tolist() for tensor in tensors], run.precision.state_dict()]


def snapshot(run: Any) -> Snapshot:
    return Snapshot([run.model], [run.optimizer], run.precision, run.average)


@pytest.mark.parametrize("arm", ARMS)
def test_everything_comes_back_and_goes_on_alike(averaged_run: Any, arm: str) -> None:
    """After NaN and overflow a restored run is where it was, twice, and its next steps have the same bits."""
    run = averaged_run(arm)
    run.step()
    run.step()
    before = everything(run)
    kept = snapshot(run)
    run.step()
    run.step()
    after = everything(run)
    assert after != before
    for _ in range(2):
        run.step(run.X * float("inf"))
        with torch.no_grad():
            for param in (*run.model.parameters(), *owned_params(run.optimizer)):
                param.fill_(float("nan"))
        kept.restore()
        assert everything(run) == before
        run.step()
        run.step()
        assert everything(run) == after


@pytest.mark.parametrize("late", ["taken", "restored"])
def test_a_skip_on_the_device_is_settled_before_a_snapshot(late: str) -> None:
    """Adam's counts in a snapshot, and after its return, are those of the steps that were taken."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    skip_on_device(optimizer)
    precision = make_precision("native:fp16")

    def step(factor: float = 1.0) -> None:
        precision.backward(model(torch.ones(3, 2)).sum() * factor, [optimizer])
        precision.step(optimizer)
        optimizer.zero_grad()

    at_the_start = Snapshot([model], [optimizer], precision)
    step()
    if late == "taken":
        step(float("inf"))
    kept = Snapshot([model], [optimizer], precision)
    if late == "restored":
        at_the_start.restore()
        step(float("inf"))  # creates a state, which is not to be taken away from what is restored
    kept.restore()
    step()
    assert {state["step"].item() for state in optimizer.state_dict()["state"].values()} == {2.0}


@pytest.mark.parametrize("arm", ARMS)
def test_a_snapshot_from_before_the_first_step_starts_anew(averaged_run: Any, arm: str) -> None:
    """Apex makes masters in the first backward pass; a snapshot from before it gives the first two steps again."""
    run = averaged_run(arm)
    kept = snapshot(run)
    run.step()
    run.step()
    after = everything(run)
    run.step(run.X * float("nan"))
    kept.restore()
    run.step()
    run.step()
    assert everything(run) == after


def rollback(run: Any, *, max_rollbacks: int = 2) -> tuple[Rollback, DivergenceDetector]:
    """The policy on a run, with a snapshot every two steps, and the divergence that it answers to."""
    divergence = DivergenceDetector(1, [run.model])
    take = functools.partial(Snapshot, [run.model], [run.optimizer], run.precision)
    policy = Rollback(take, divergence, every=2, max_rollbacks=max_rollbacks)
    return policy, divergence


def good(step: int) -> list[StepRecord]:
    """A block that ends with a finite loss."""
    return [StepRecord(step - 1, 0, 1.0, (), (), (True,), None, 0.1, 0.0)]


def diverge(policy: Rollback, divergence: DivergenceDetector, step: int) -> bool:
    """Let the run diverge after `step` updates; return whether it went back."""
    divergence.diverged_step, divergence.reason = step - 1, "non-finite weights"
    return policy.after_steps(step, good(step))


def test_it_goes_back_this_often_and_no_more(averaged_run: Any) -> None:
    """A run that diverges again and again ends; it goes back to snapshots, not to states between them."""
    run = averaged_run("fp32")
    policy, divergence = rollback(run)
    policy.begin(0)
    weights = []
    for step in range(1, 4):
        run.step()
        assert not policy.after_steps(step, good(step))
        weights.append(run.model[0].weight.tolist())
    assert diverge(policy, divergence, 3)
    assert run.model[0].weight.tolist() == weights[1]
    assert not divergence.ends_run
    assert diverge(policy, divergence, 7)
    assert not diverge(policy, divergence, 9)
    assert divergence.ends_run
    assert policy.steps == [3, 7]
    resumed, divergence = rollback(run)
    resumed.load_state_dict(policy.state_dict())
    resumed.begin(9)
    assert not diverge(resumed, divergence, 9)


def test_a_limit_is_not_rolled_back(averaged_run: Any) -> None:
    """A run that a limit has ended stays ended, although a snapshot could be restored."""
    policy, divergence = rollback(averaged_run("fp32"))
    policy.begin(0)
    divergence.end(4, "loss scale 0.5 is below --stop-loss-scale 1")
    assert not policy.after_steps(5, good(5))
    assert divergence.ends_run
