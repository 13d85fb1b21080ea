"""The moving average of the weights: its values for every arm, and that it leaves the training weights alone."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampcompare.base.errors import CheckpointError
from ampcompare.training.ema import ModelEma
from ampcompare.training.precision.base import owned_params
from tests.host_reads import HostReads

ARMS = [
    "fp32",
    "apex:O1,engine=compat",
    "apex:O2,engine=compat",
    "apex:O3,engine=compat",
    "native:fp16",
    "half:bn_fp32",
    "half:bf16",
    "half:masters=fp32,dynamic",
]


def updated(run: Any) -> list[Tensor]:
    """Return what the optimizer updates, in fp32: masters where there are."""
    return [param.detach().float().clone() for param in owned_params(run.optimizer)]


@pytest.mark.parametrize("arm", ARMS)
def test_the_average_is_that_of_what_the_optimizer_updates(averaged_run: Any, arm: str) -> None:
    """After three steps with decay 1/2 the average is w1/4 + w2/4 + w3/2, of fp32 masters where the arm has them."""
    run = averaged_run(arm)
    seen = []
    for _ in range(3):
        run.step()
        seen.append(updated(run))
    names = [name for name, _ in run.model.named_parameters()]
    for place, name in enumerate(names):
        first, second, third = (weights[place] for weights in seen)
        mean = run.averaged()[name]
        assert mean.dtype is torch.float32
        torch.testing.assert_close(mean, first / 4 + second / 4 + third / 2, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("arm", ["fp32", "apex:O2,engine=compat", "half:bn_fp32"])
def test_an_update_waits_for_nothing(averaged_run: Any, arm: str) -> None:
    """No update of the average reads a value, and counts of batches are those of the model when it is saved."""
    run = averaged_run(arm)
    run.step()
    with HostReads() as mode:
        run.average.update()
    assert mode.count == 0
    assert int(run.averaged()["1.num_batches_tracked"]) == int(run.model[1].num_batches_tracked) == 1


@pytest.mark.parametrize("arm", ["half", "half:bf16"])
def test_the_average_of_narrow_weights_moves_by_less_than_they_can(averaged_run: Any, arm: str) -> None:
    """With a decay of 0.9999 each move is below half a unit of the stored type, and the fp32 average still makes it."""
    run = averaged_run(arm, decay=0.9999)
    run.step()
    before = run.averaged()["0.weight"].clone()
    weights = run.model[0].weight
    with torch.no_grad():
        weights.mul_(1.5)
    run.average.update()
    after = run.averaged()["0.weight"]
    torch.testing.assert_close(after, before + 1e-4 * (weights.detach().float() - before))
    assert not torch.equal(after, before)
    assert torch.equal(after.to(weights.dtype), before.to(weights.dtype))


@pytest.mark.parametrize("arm", ARMS)
def test_applied_evaluates_the_average_and_puts_the_weights_back(averaged_run: Any, arm: str) -> None:
    """Inside, the model gives what a model with the averaged weights gives; afterwards every bit is as before."""
    run = averaged_run(arm)
    for _ in range(3):
        run.step()
    before = run.stored()
    run.model.eval()

    def answer() -> Tensor:
        with torch.no_grad(), run.precision.autocast():
            return run.model(run.X).float()

    raw = answer()
    reference = run.net().eval()
    reference.load_state_dict(run.averaged())
    with run.average.average_in_place(run.precision):
        inside = answer()
    torch.testing.assert_close(inside, reference(run.X).float(), rtol=0.02, atol=0.01)
    assert not torch.equal(inside, raw)
    assert all(torch.equal(a, b) for a, b in zip(run.stored(), before, strict=True))
    assert torch.equal(answer(), raw)


def test_the_average_of_another_model_is_refused(averaged_run: Any) -> None:
    """A saved average whose tensors have other shapes is told of in one line that says what to do."""
    run = averaged_run("fp32")
    state = ModelEma([nn.Linear(9, 9)], 0.5).state_dict()
    with pytest.raises(CheckpointError, match="is of another model"):
        run.average.load_state_dict(state)
