"""Back to the last good state: all of it, for every arm, a limited number of times."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ampcompare.precision.base import owned_params
from ampcompare.training.rollback import Rollback, Snapshot

ARMS = [
    "fp32",
    "apex:O0,engine=compat",
    "apex:O1,engine=compat",
    "apex:O2,engine=compat",
    "apex:O3,loss_scale=dynamic,engine=compat",
    "native:fp16,growth_interval=2",
    "native:bf16",
    "half",
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
    """Keep the state that the run is in."""
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


def test_it_goes_back_so_often_and_no_more(averaged_run: Any) -> None:
    """A run that diverges again and again ends; states between two that are kept are not."""
    run = averaged_run("fp32")
    back = Rollback([run.model], [run.optimizer], run.precision, every=2, most=2)
    back.keep(0)
    weights = []
    for step in range(1, 4):
        run.step()
        back.keep(step)
        weights.append(run.model[0].weight.tolist())
    assert back.go_back(3)
    assert run.model[0].weight.tolist() == weights[1]
    assert back.go_back(7)
    assert not back.go_back(9)
    assert back.steps == [3, 7]
    again = Rollback([run.model], [run.optimizer], run.precision, every=2, most=2)
    again.load_state_dict(back.state_dict())
    again.keep(9)
    assert not again.go_back(9)


def test_without_a_good_state_there_is_no_way_back(averaged_run: Any) -> None:
    """Before the first state is kept, going back is refused."""
    run = averaged_run("fp32")
    assert not Rollback([run.model], [run.optimizer], run.precision, every=2, most=2).go_back(1)
