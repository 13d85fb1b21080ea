"""When a run counts as diverged or good enough, and the way back to the last good state."""

import functools
import math
from typing import Any

import pytest
import torch
from torch import nn

from ampcompare.base.tensors.skippable_step import make_step_skippable
from ampcompare.results.records.evaluation import EpochResult
from ampcompare.results.records.metric import TOP1, Metric
from ampcompare.results.records.step import StepRecord
from ampcompare.training.policies import (
    DivergenceDetector,
    EarlyStop,
    Rollback,
    StepStateSnapshot,
    are_weights_finite,
)
from ampcompare.training.precision.base import make_precision, owned_params

NAN, INF = math.nan, math.inf


def steps(losses: list[float], applied: list[bool] | None = None, start: int = 0) -> list[StepRecord]:
    applied = applied or [True] * len(losses)
    return [
        StepRecord(start + place, 0, loss, (1.0,), (1.0,), (flag,), None, 0.1, 0.0)
        for place, (loss, flag) in enumerate(zip(losses, applied, strict=True))
    ]


def model(value: float = 1.0) -> nn.Module:
    """A layer whose first weight is `value`."""
    layer = nn.Linear(2, 2)
    with torch.no_grad():
        layer.weight[0, 0] = value
    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_large_finite_weights_are_finite(dtype: torch.dtype) -> None:
    """A norm that would overflow in fp16 is not taken for an infinity, and real ones are found."""
    layer = nn.Linear(64, 64).to(dtype)
    nn.init.constant_(layer.weight, 60000.0)
    assert are_weights_finite([layer])
    for bad in (INF, -INF, NAN):
        with torch.no_grad():
            layer.weight[3, 5] = bad
        assert not are_weights_finite([layer])


def detect(
    patience: int, *blocks: list[StepRecord], weight: float = 1.0, stops: bool = True
) -> DivergenceDetector:
    """A detector that has seen some blocks, with a model of this weight."""
    divergence = DivergenceDetector(patience, [model(weight)], stops=stops)
    for block in blocks:
        assert not divergence.apply_and_has_changed_weights(block[-1].step + 1, block)
    return divergence


def test_a_skipped_step_with_a_bad_loss_is_not_divergence() -> None:
    """Under dynamic scaling such a step left the weights alone; only its first occurrence is recorded."""
    divergence = detect(3, steps([1.0, INF, 0.9, NAN, NAN], [True, False, True, False, False]))
    assert not divergence.ends_run
    assert divergence.first_nonfinite_loss_step == 1
    assert divergence.diverged_step is None


def test_consecutive_bad_losses_diverge_at_the_first_of_them() -> None:
    """They may cross a drain, and the recorded step is their first."""
    blocks = steps([1.0, NAN, NAN]), steps([NAN, NAN, NAN], start=3)
    assert not detect(4, blocks[0]).ends_run
    divergence = detect(4, *blocks)
    assert divergence.ends_run
    assert (divergence.diverged_step, divergence.reason) == (1, "4 non-finite losses in a row")


def test_bad_weights_diverge_at_the_first_applied_bad_loss() -> None:
    """If a loss went bad in the block, that step is recorded rather than the end of the block."""
    divergence = detect(10, steps([1.0, 0.9, NAN, NAN]), weight=NAN)
    assert (divergence.diverged_step, divergence.reason) == (2, "non-finite weights")


def test_bad_weights_without_a_bad_loss_are_dated_to_the_last_step() -> None:
    assert detect(10, steps([1.0, 0.9, 0.8]), weight=INF).diverged_step == 2


def test_later_blocks_do_not_move_divergence() -> None:
    divergence = detect(1, steps([NAN]), steps([1.0], start=1))
    assert divergence.ends_run
    assert divergence.diverged_step == 0


def test_divergence_is_recorded_without_ending_the_run_if_it_continues() -> None:
    divergence = detect(1, steps([NAN]), stops=False)
    assert divergence.diverged_step == 0
    assert not divergence.ends_run
    divergence.end_run_as_diverged(3, "a limit")
    assert divergence.ends_run


def epoch(number: int, correct: int) -> EpochResult:
    """A result out of a hundred samples."""
    return EpochResult(
        epoch=number, samples=100, values={"top-1": correct / 100}, loss=1.0, train_seconds=1, eval_seconds=1
    )


def test_lower_may_be_better() -> None:
    bits = Metric(name="bits", better="lower")
    patient, aimed = EarlyStop(1, None, bits), EarlyStop(None, 0.5, bits)
    for number, value in enumerate([90, 70, 50, 60]):
        assert patient.end_reason is None
        assert aimed.end_reason is None or number > 2
        patient.apply_to_epoch(epoch(number, value))
        aimed.apply_to_epoch(epoch(number, value))
    assert patient.end_reason == "no better bits for 1 epochs, after epoch 3"
    assert aimed.end_reason is not None
    assert aimed.end_reason.startswith("bits of 0.50 reached 0.5")


@pytest.mark.parametrize(("correct", "ends"), [(89, False), (90, True), (91, True)])
def test_a_target_is_enough_when_it_is_reached(correct: int, ends: bool) -> None:
    stop = EarlyStop(None, 90.0, TOP1)
    stop.apply_to_epoch(epoch(0, correct))
    assert (stop.end_reason is not None) == ends


ARMS = [
    "fp32",
    "apex:O1,engine=compat",
    "apex:O2,engine=compat",
    "apex:O3,loss_scale=dynamic,engine=compat",
    "native:fp16,growth_interval=2",
    "half:bn_fp32",
    "half:masters=fp32,dynamic,growth_interval=2",
]


def everything(run: Any) -> list[Any]:
    """Return all that a snapshot holds, as plain values."""
    owned = owned_params(run.optimizer)
    momenta = [run.optimizer.state[param]["momentum_buffer"] for param in owned]
    tensors = (*run.stored(), *owned, *run.averaged().values(), *momenta)
    return [[tensor.tolist() for tensor in tensors], run.precision.state_dict()]


def snapshot(run: Any) -> StepStateSnapshot:
    return StepStateSnapshot([run.model], [run.optimizer], run.precision, run.average)


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
        kept.restore_state()
        assert everything(run) == before
        run.step()
        run.step()
        assert everything(run) == after


@pytest.mark.parametrize("late", ["taken", "restored"])
def test_a_skip_on_the_device_is_settled_before_a_snapshot(late: str) -> None:
    """Adam's counts in a snapshot, and after its return, are those of the steps that were taken."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    make_step_skippable(optimizer)
    precision = make_precision("native:fp16")

    def step(factor: float = 1.0) -> None:
        precision.backward(model(torch.ones(3, 2)).sum() * factor, [optimizer])
        precision.step(optimizer)
        optimizer.zero_grad()

    at_the_start = StepStateSnapshot([model], [optimizer], precision)
    step()
    if late == "taken":
        step(float("inf"))
    kept = StepStateSnapshot([model], [optimizer], precision)
    if late == "restored":
        at_the_start.restore_state()
        step(float("inf"))  # creates a state, which is not to be taken away from what is restored
    kept.restore_state()
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
    kept.restore_state()
    run.step()
    run.step()
    assert everything(run) == after


def rollback(run: Any, *, max_rollbacks: int = 2) -> tuple[Rollback, DivergenceDetector]:
    """The policy on a run, with a snapshot every two steps, and the divergence that it answers to."""
    divergence = DivergenceDetector(1, [run.model])
    take = functools.partial(StepStateSnapshot, [run.model], [run.optimizer], run.precision)
    policy = Rollback(take, divergence, every=2, max_rollbacks=max_rollbacks)
    return policy, divergence


def good(step: int) -> list[StepRecord]:
    """A block that ends with a finite loss."""
    return [StepRecord(step - 1, 0, 1.0, (), (), (True,), None, 0.1, 0.0)]


def diverge(policy: Rollback, divergence: DivergenceDetector, step: int) -> bool:
    """Let the run diverge after `step` updates; return whether it went back."""
    divergence.diverged_step, divergence.reason = step - 1, "non-finite weights"
    return policy.apply_and_has_changed_weights(step, good(step))


def test_it_goes_back_this_often_and_no_more(averaged_run: Any) -> None:
    """A run that diverges again and again ends; it goes back to snapshots, not to states between them."""
    run = averaged_run("fp32")
    policy, divergence = rollback(run)
    policy.begin(0)
    weights = []
    for step in range(1, 4):
        run.step()
        assert not policy.apply_and_has_changed_weights(step, good(step))
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
    divergence.end_run_as_diverged(4, "loss scale 0.5 is below --stop-loss-scale 1")
    assert not policy.apply_and_has_changed_weights(5, good(5))
    assert divergence.ends_run
