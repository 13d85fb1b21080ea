"""`holds` passes on healthy modules, losses and steps, and names module, operation and line of a broken one."""

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampcompare.base.errors import ConfigError
from ampcompare.testing import DoesNotHold, holds
from tests.diagnosis.loops import loop_of

ARMS = ("bf16", "fp16", "O1", "O2")
X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


class Norms(nn.Module):
    """Residual blocks with norms."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + torch.relu(layer(norm(x)))
        return x


class Then(nn.Module):
    """A layer, and what is given of its result."""

    def __init__(self, after: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.after = after

    def forward(self, x: Tensor) -> Any:
        return self.after(self.layer(x))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def _convolutions() -> nn.Module:
    # the gradient of the bias is what cancellation leaves
    first = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU()]
    return nn.Sequential(*first, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (Norms, (X,)),
        (_convolutions, (X.reshape(2, 1, 8, 8),)),
        (lambda: nn.Sequential(nn.Linear(16, 8), nn.Softmax(-1)), (X,)),
        (lambda: Then(lambda x: {"sum": x.sum(1), "class": x.argmax(1)}), {"x": X}),
    ],
    ids=["norms", "convolutions", "softmax", "dictionary"],
)
def test_healthy_modules_hold(make: Callable[[], nn.Module], inputs: Any) -> None:
    """Healthy modules hold with room under every arm, and their weights and torch are left as they were."""
    model, exp = make(), torch.exp
    before = [param.clone() for param in model.parameters()]
    held = holds(model, ARMS, inputs=inputs)
    assert [one.arm for one in held] == ["native:bf16", "native:fp16", "apex:O1,engine=compat", "apex:O2"]
    assert all(one.worst.error < 0.7 * one.worst.tolerance for one in held)
    assert all(one.worst.error > 0 for one in held)
    assert all(map(torch.equal, before, model.parameters()))
    assert torch.exp is exp


def _variance(x: Tensor) -> Tensor:
    shifted = x + 30.0
    return (shifted * shifted).mean(1) - shifted.mean(1) ** 2


def _rms_of_large(x: Tensor) -> Tensor:
    large = x * 3000.0
    return large * (large * large).mean(1, keepdim=True).rsqrt()


@pytest.mark.parametrize(
    ("after", "arm", "words"),
    [
        (lambda x: (y := x * 90.0) * y * y * 1e-5, "fp16", ["overflow", "mul of Then", "in fp32 cures it"]),
        (lambda x: (x.abs() * 9000.0).repeat(1, 16).sum(1), "O2", ["overflow", "sum of Then"]),
        (lambda x: (x - x) / ((x - x).abs() + 1e-8), "O2", ["div of Then", "1e-08 in add is zero in fp16"]),
        (lambda x: (x * 60).exp().sum(1).log(), "half", ["overflow", "exp of Then"]),
        (_variance, "bf16", ["rounding", "sub of Then"]),
        (
            _rms_of_large,
            "O2",
            ["overflow", "mul of Then is not finite, though the loss is", "in fp32 cures it"],
        ),
    ],
    ids=["cube", "sum", "eps", "exp", "cancellation", "an infinity that becomes 0"],
)
def test_broken_modules_do_not_hold(after: Callable[[Tensor], Tensor], arm: str, words: list[str]) -> None:
    """A module that a 16-bit type breaks fails with its operation, its line, and why; fp32 holds."""
    model = Then(after)
    holds(model, "O0", inputs=(X * 0.3,))
    with pytest.raises(DoesNotHold) as error:
        holds(model, arm, inputs=(X * 0.3,))
    assert all(word in str(error.value) for word in [*words, "test_holds.py:"]), str(error.value)
    assert error.value.diagnosis.faults[0].place.where.startswith("tests/diagnosis/test_holds.py:")


def test_the_module_of_a_fault_is_named() -> None:
    """A fault inside a named submodule is said to be there, with a tested cure."""
    model = nn.Sequential(OrderedDict(body=nn.Linear(16, 16), cube=Then(lambda x: (x * 90.0) ** 3 * 1e-5)))
    with pytest.raises(DoesNotHold, match=r"cube pow is the first result .* in fp32 cures it"):
        holds(model, "O2", inputs=(X,))


def test_inexact_results_are_found_where_diagnose_sees_no_fault() -> None:
    """Finite results that are further off than rounding explains fail and name the first place that is."""
    model = Then(lambda x: (x + 1000.0) - 1000.0)
    with pytest.raises(
        DoesNotHold, match=r"of its size away from fp32, and .* is allowed; .* sub of Then \(tests"
    ):
        holds(model, "bf16", inputs=(X * 20,))


def test_a_given_tolerance() -> None:
    """A number replaces what rounding explains, in both directions."""
    (held,) = holds(nn.Linear(16, 4), "bf16", inputs=(X,), rtol=0.05)
    assert {figure.tolerance for figure in held.figures} == {0.05}
    with pytest.raises(DoesNotHold, match="is allowed"):
        holds(nn.Linear(16, 4), "bf16", inputs=(X,), rtol=1e-5)


def test_a_step_that_raises_names_module_and_line() -> None:
    """A mix of types that torch refuses fails with the module that was running and the line."""
    model = nn.Sequential(OrderedDict(mixed=Then(lambda x: torch.mm(x, torch.ones(16, 2)))))
    with pytest.raises(
        DoesNotHold, match=r"apex:O2 does not hold: the step raises in mixed \(.*test_holds.py:\d+\): Run"
    ):
        holds(model, "O2", inputs=(X,))
    holds(model, "bf16", inputs=(X,))


def test_losses_hold() -> None:
    """A loss gets its floating inputs as a layer gives them, with gradients, and other inputs as they are."""
    target = torch.arange(8) % 4
    (held,) = holds(F.cross_entropy, "fp16", inputs=(X[:, :4], target))
    assert {figure.name: figure.dtype for figure in held.figures}["gradient of input_0"] == "float32"
    assert held.worst.error > 0

    def naive(logits: Tensor, target: Tensor) -> Tensor:
        return (
            -(logits.half().exp() / logits.half().exp().sum(1, keepdim=True)).log()[range(8), target].mean()
        )

    def narrow(logits: Tensor, target: Tensor) -> Tensor:
        return -(logits.exp() / logits.exp().sum(1, keepdim=True)).log()[range(8), target].mean()

    with pytest.raises(ConfigError, match="not finite in fp32 either"):
        holds(naive, "half", inputs=(X[:, :4] * 12, target))
    with pytest.raises(DoesNotHold, match="exp of narrow"):
        holds(narrow, "half", inputs={"logits": X[:, :4] * 12, "target": target})


def _two_layers() -> nn.Module:
    return nn.Sequential(OrderedDict(body=nn.Linear(16, 16), head=nn.Linear(16, 4)))


def _loss(model: Any, step: int = 0) -> Tensor:
    return F.cross_entropy(model(X), torch.arange(8) % 4)


def test_training_steps_hold() -> None:
    """A training loop is compared in loss, outputs and gradients of its first update."""
    (held,) = holds(loop_of(_two_layers, _loss), "O2", steps=2)
    names = ["output", "loss", "gradient of body.weight", "gradient of body.bias"]
    assert [figure.name for figure in held.figures][:4] == names
    assert not any(math.isinf(figure.error) for figure in held.figures)


def test_unusable_subjects_are_refused() -> None:
    """What cannot be compared says what to do: a loop without an update, one that differs, a module without inputs."""

    def differing(model: Any, step: int) -> Tensor:
        calls.append(0)
        return model(X + len(calls)).square().mean()

    calls: list[int] = []
    with pytest.raises(ConfigError, match="no update was applied in fp32"):
        holds(lambda precision: None, "bf16")
    with pytest.raises(ConfigError, match="differs between two runs in fp32"):
        holds(loop_of(lambda: nn.Linear(16, 4), differing, steps=1), "bf16")
    with pytest.raises(ConfigError, match="pass inputs"):
        holds(nn.Linear(2, 2), "bf16")
    with pytest.raises(ConfigError, match="bf61"):
        holds(nn.Linear(16, 2), "bf61", inputs=(X,))
    with pytest.raises(ConfigError, match="rtol must be"):
        holds(nn.Linear(16, 2), "bf16", inputs=(X,), rtol=0)


def test_a_module_without_weights_is_a_function() -> None:
    """Its floating inputs get gradients; without any there is nothing to compare."""
    (held,) = holds(nn.Softmax(-1), "bf16", inputs=(X,))
    assert "gradient of input_0" in {figure.name for figure in held.figures}
    with pytest.raises(ConfigError, match="neither a parameter nor a floating input"):
        holds(
            nn.Flatten(),
            "bf16",
            inputs=(torch.arange(6).reshape(2, 3),),
            loss=lambda output: output.float().sum(),
        )
