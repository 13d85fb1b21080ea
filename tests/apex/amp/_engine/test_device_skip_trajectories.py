"""Steps without host reads are those with them, bit for bit."""

import math
from typing import Any

import pytest

from ampcompare.apex import amp
from ampcompare.apex.amp.scaler import LossScaler
from tests.apex.amp._engine.fused_steps import (
    OPTIMIZERS,
    Make,
    Net,
    bits,
    loss_of,
    moments,
    passes_on_device,
    read_scale_and_good_steps,
    start,
    train_step,
)

pytestmark = pytest.mark.usefixtures("as_on_a_gpu")


def trajectory(level: str, make: Make, capsys: pytest.CaptureFixture[str], *, host: bool) -> Any:
    model, optimizer = start(level, make, host=host, verbosity=1)
    amp._amp_state.loss_scalers[0]._scale_seq_len = 8
    capsys.readouterr()
    steps = []
    with passes_on_device() as seen:
        for step in range(24):
            train_step(model, optimizer, math.inf if step in (0, 12, 13) else 1.0)
            steps.append((bits(amp.master_params(optimizer)), bits(model.parameters()), amp.state_dict()))
    assert len(seen) == (0 if host else 24)
    amp._amp_state.close()
    return steps, moments(optimizer), capsys.readouterr().out


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_steps_as_with_host_reads(level: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights, masters, moments, scales, skips and messages equal those of the host-reading path, bit for bit."""
    on_device = trajectory(level, OPTIMIZERS[name], capsys, host=False)
    on_host = trajectory(level, OPTIMIZERS[name], capsys, host=True)
    assert on_device[0] == on_host[0]
    assert on_device[1] == on_host[1]
    assert on_device[2] == on_host[2]
    assert on_device[2].count("Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to") == 3
    weights = [step[0] for step in on_device[0]]
    assert weights[12] == weights[11] != weights[15]


@pytest.mark.parametrize("level", ["O0", "O3"])
def test_a_dynamic_scale_at_other_levels(
    level: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Levels that do not replace `step` themselves skip in the kernel too."""
    monkeypatch.setattr(LossScaler, "warned_unscaling_non_fp32_grad", True)  # said once per process
    # Not SGD: torch 2.13 leaves a stray value in the momentum of half parameters, from run to run another one.
    make = OPTIMIZERS["adam"]
    assert trajectory(level, make, capsys, host=False) == trajectory(level, make, capsys, host=True)


def several(level: str, name: str, capsys: pytest.CaptureFixture[str], *, host: bool) -> Any:
    models = [Net(0), Net(1)]
    optimizers = [OPTIMIZERS[name](model.parameters()) for model in models]
    if host:
        for optimizer in optimizers:
            read_scale_and_good_steps(optimizer)
    amp.initialize(models, optimizers, opt_level=level, num_losses=3, verbosity=1)
    capsys.readouterr()
    steps = []
    overflows = {(0, 2), (3, 0), (7, 1), (7, 0), (11, 2), (11, 1), (20, 1)}
    with passes_on_device() as seen:
        for step in range(30):
            factor = {loss: math.inf if (step, loss) in overflows else 1.0 for loss in range(3)}
            # Both optimizers, accumulation over two losses, and one optimizer that steps every other time.
            with amp.scale_loss(loss_of(models[0], factor[0]), optimizers[0], loss_id=0) as scaled:
                scaled.backward()
            with amp.scale_loss(loss_of(models[1], factor[1]), [optimizers[1]], loss_id=1) as scaled:
                scaled.backward()
            both = loss_of(models[0], factor[2]) + loss_of(models[1])
            with amp.scale_loss(both, optimizers, loss_id=2, delay_unscale=step % 5 == 4) as scaled:
                scaled.backward()
            optimizers[0].step()
            if step % 2:
                optimizers[1].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            weights = [bits(amp.master_params(optimizer)) for optimizer in optimizers]
            steps.append((weights, amp.state_dict(), capsys.readouterr().out))
    assert len(seen) == (0 if host else 84)  # 90 passes, 6 of them delayed
    amp._amp_state.close()
    return steps


@pytest.mark.parametrize("name", ["sgd-momentum", "adam"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_several_losses_and_optimizers(level: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Three scalers, shared and separate backward passes and late steps skip what Apex would skip, and nothing else."""
    on_device, on_host = several(level, name, capsys, host=False), several(level, name, capsys, host=True)
    assert on_device == on_host
    assert sum("Gradient overflow" in step[2] for step in on_host) >= 5
