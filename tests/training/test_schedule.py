"""Learning rates as functions of the step."""

import pytest
import torch

from ampcompare.settings.recipe import ScheduleConfig
from ampcompare.training.assemble import make_schedule


@pytest.mark.parametrize("name", ["constant", "step", "cosine"])
def test_warm_up_is_linear(name: str) -> None:
    """The rate reaches its base at the end of the warm-up, and no step trains at rate 0."""
    config = ScheduleConfig(name=name, warmup_epochs=2, step_epochs=100)  # type: ignore[arg-type]
    factor = make_schedule(config, steps_per_epoch=5, total_steps=100)
    assert factor is not None
    assert [factor(step) for step in range(10)] == [(step + 1) / 10 for step in range(10)]
    assert factor(10) == 1.0


def test_constant_without_warm_up_needs_no_function() -> None:
    """Nothing is set at any step."""
    assert make_schedule(ScheduleConfig(name="constant", warmup_epochs=0), steps_per_epoch=5, total_steps=10) is None


def test_step_schedule_drops_by_epochs() -> None:
    config = ScheduleConfig(name="step", warmup_epochs=0, step_epochs=2, gamma=0.5)
    factor = make_schedule(config, steps_per_epoch=3, total_steps=100)
    assert factor is not None
    assert [factor(step) for step in (0, 5, 6, 11, 12)] == [1.0, 1.0, 0.5, 0.5, 0.25]


def test_cosine_matches_torch() -> None:
    config = ScheduleConfig(name="cosine", warmup_epochs=0)
    factor = make_schedule(config, steps_per_epoch=4, total_steps=20)
    assert factor is not None
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    for step in range(20):
        assert factor(step) == pytest.approx(scheduler.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        scheduler.step()
