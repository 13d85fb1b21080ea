"""How an optimizer moves the state that divides its steps, and what rounding that state does to a step's size."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RMSprop

from ampcompare.diagnosis.state_rounding import OptimizerStateRule, OptimizerStateWatch, mean_step_errors

MEAN = OptimizerStateRule("mean", 0.999)


class LiteralAdam(Optimizer):
    """Adam without a bias correction, whose state and settings have names of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3, "keep": (0.9, 0.99)})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                for name in ("direction", "size"):
                    state.setdefault(name, torch.zeros_like(param))
                first, second = group["keep"]
                state["direction"].lerp_(param.grad, 1 - first)
                state["size"].mul_(second).addcmul_(param.grad, param.grad, value=1 - second)
                param.addcdiv_(state["direction"], state["size"].sqrt() + 1e-8, value=-group["lr"])


class Belief(LiteralAdam):
    """The same with a second moment of another kind."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        super().step()
        for param in self.param_groups[0]["params"]:
            self.state[param]["size"].add_((param.grad - self.state[param]["direction"]).square())


def step_error(rule: Any, state: Any, gradients: Any, dtype: torch.dtype, steps: int) -> tuple[float, float]:
    (error,) = mean_step_errors(rule, state, gradients, [dtype], steps)
    return error


def _probe_of(make: Callable[[Any], Optimizer]) -> OptimizerStateWatch:
    param = torch.nn.Parameter(torch.randn(400, generator=torch.Generator().manual_seed(0)))
    optimizer, probe = make([param]), OptimizerStateWatch()
    generator = torch.Generator().manual_seed(1)
    for step in range(8):
        param.grad = torch.randn(400, generator=generator)
        if step >= 2:
            probe.sample_state_before_step(optimizer)
        optimizer.step()
        if step >= 2:
            probe.note_state_moves_after_step(optimizer)
    return probe


@pytest.mark.parametrize(
    ("make", "decay"),
    [
        (lambda p: Adam(p), 0.999),
        (lambda p: Adam(p, weight_decay=0.1), 0.999),
        (lambda p: AdamW(p, betas=(0.9, 0.95), weight_decay=0.1), 0.95),
        (lambda p: NAdam(p), 0.999),
        (lambda p: Adamax(p), 0.999),
        (lambda p: RMSprop(p, alpha=0.98), 0.98),
        (lambda p: Adagrad(p), 1.0),
        (LiteralAdam, 0.99),
    ],
)
def test_a_rule_is_recognized_by_its_values(make: Callable[[Any], Optimizer], decay: float) -> None:
    """Neither the class of the optimizer nor the name of its state counts, and fp32 has no error."""
    probe = _probe_of(make)
    assert not probe.has_unknown
    for dtype in (torch.bfloat16, torch.float32):
        error = probe.largest_step_errors([dtype], 100)[0]
        assert error is not None
        assert error.decay == decay
        assert (error.largest_error == 0) == (dtype is torch.float32)


def test_what_is_not_recognized() -> None:
    """A state that is nowhere negative may divide steps; a momentum does not."""
    assert _probe_of(Belief).has_unknown
    probe = _probe_of(lambda p: SGD(p, 0.1, momentum=0.9))
    assert (probe.has_unknown, probe.largest_step_errors([torch.bfloat16], 100)[0]) == (False, None)


@pytest.mark.parametrize("steps", [100, 600, 3000])
def test_a_mean_that_cannot_fall(steps: int) -> None:
    """A decay of 0.1 % is below half an ulp of bf16: the logarithm of the step is half of 0.001 away for each step."""
    state = torch.linspace(1.0, 2.0, 50)
    _, falling = step_error(MEAN, state, [state.sqrt()], torch.bfloat16, steps)
    exact = 0.0005 * steps / 2
    # the mean approaches its floor
    assert falling == pytest.approx(exact, rel=0.15 if steps < 3000 else 0.35)
    assert step_error(MEAN, state, [state.sqrt()], torch.float16, steps)[1] < exact / 4


def test_a_mean_that_forgets_faster_falls() -> None:
    """A decay of 5 % is far above half an ulp."""
    state = torch.linspace(1.0, 2.0, 50)
    steady, falling = step_error(
        OptimizerStateRule("mean", 0.95), state, [state.sqrt()], torch.bfloat16, 2000
    )
    assert max(steady, falling) < 0.04  # it stops where a twentieth of what is left is half an ulp


def test_a_sum_stops_to_grow() -> None:
    """256 + 1 is 256 in bf16: steps are too large from there on."""
    steps = 2000
    steady, falling = step_error(
        OptimizerStateRule("sum", 1.0), torch.full((3,), 256.0), [torch.ones(3)], torch.bfloat16, steps
    )
    exact = sum(0.5 * math.log((257 + step) / 256) for step in range(steps)) / steps
    assert steady == pytest.approx(exact, rel=0.05)
    assert falling == 0


def test_nothing_ahead_has_no_error() -> None:
    assert step_error(MEAN, torch.ones(3), [torch.ones(3)], torch.bfloat16, 0) == (0.0, 0.0)
    assert step_error(MEAN, torch.zeros(3), [torch.zeros(3)], torch.bfloat16, 100) == (0.0, 0.0)


def test_types_of_one_call_have_the_errors_of_their_own() -> None:
    """The path without rounding is shared; each type keeps a state of its own."""
    state = torch.rand(64, generator=torch.Generator().manual_seed(0)) * 1e-4
    dtypes = [torch.bfloat16, torch.float16]
    assert mean_step_errors(MEAN, state, [state.sqrt()], dtypes, 300) == [
        step_error(MEAN, state, [state.sqrt()], dtype, 300) for dtype in dtypes
    ]
