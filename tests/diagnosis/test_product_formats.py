"""The layer that a format of products hurts most: found in one batch, and proven by training."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampcompare
from ampcompare.base.errors import ConfigError
from ampcompare.diagnosis.options import DiagnoseOptions
from ampcompare.results.report.terminal import Terminal
from ampcompare.settings.config import RunConfig


class Net(nn.Module):
    """Three layers; of one some inputs are larger and their weights smaller by a factor, so that the rest is lost."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 4)
        self.scale = torch.ones(32)
        self.scale[::2] = factor
        with torch.no_grad():
            self.second.weight.div_(self.scale)
            self.head.weight.mul_(8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.second(self.first(x).tanh() * self.scale).tanh())
        return result


def loop_of(factor: float) -> Callable[[Any], None]:
    """A loop that hardly trains: its labels are those of the network itself, which loses them in a format."""

    def loop(precision: Any) -> None:
        model: nn.Module = Net(factor)
        teacher = copy.deepcopy(model)
        (model,), (optimizer,) = precision.prepare([model], [torch.optim.SGD(model.parameters(), lr=1e-5)])
        generator = torch.Generator().manual_seed(3)
        while True:
            x = torch.randn(64, 32, generator=generator)
            with torch.no_grad():
                labels = teacher(x).argmax(1)
            with precision.autocast():
                loss = nn.functional.cross_entropy(model(x).float(), labels)
            precision.backward(loss, [optimizer])
            precision.step(optimizer)
            optimizer.zero_grad()

    return loop


def test_a_layer_that_stands_out_is_named_with_its_role_and_all_errors_are_kept() -> None:
    found = ampcompare.diagnose(loop_of(64.0), arm="gemm:mxfp4,keep=none", device="cpu", steps=4, cures=False)
    assert found.verdict.startswith("gemm:mxfp4,keep=none: format at step 3: second changes the gradient by ")
    assert found.faults[0].place.module == "second"
    errors = {(one.layer, one.role): one.error for one in found.formats}
    assert set(errors) == set(itertools.product(("first", "second", "head"), ("fprop", "dgrad", "wgrad")))
    role = found.faults[0].place.operation
    others = [error for (layer, _), error in errors.items() if layer != "second"]
    assert errors["second", role] >= 5 * max(others)
    assert errors["first", "dgrad"] == 0  # the batch needs no gradient
    assert "second" in Terminal(160).render(found)
    assert found.cure is None


def test_a_cure_is_proven_by_training_or_said_not_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the losses of the arm, of the cure, of bf16 and of a twin."""
    losses = {
        "gemm:mxfp4,keep=none": 1.4,
        "gemm:bf16,keep=none": 1.0,
        "twin": 1.01,
        "gemm:mxfp4,keep=second": 1.1,
    }

    def train(loop: Any, arm: Any, conditions: Any, *, is_twin: bool = False) -> float:
        return losses["twin" if is_twin else str(arm)]

    monkeypatch.setattr("ampcompare.diagnosis.product_formats._train_and_average_last_losses", train)
    found = ampcompare.diagnose(loop_of(64.0), arm="gemm:mxfp4,keep=none", device="cpu", steps=4)
    assert found.cure is not None
    assert found.cure.arm == "gemm:mxfp4,keep=second"
    assert found.verdict.endswith("; second in bf16 cures it")
    assert found.notes == [
        "loss over the last fifth of 4 steps: +0.4 from bf16, +0.1 with the cure, 0.01 a twin"
    ]
    losses["gemm:mxfp4,keep=second"] = 1.3
    found = ampcompare.diagnose(loop_of(64.0), arm="gemm:mxfp4,keep=none", device="cpu", steps=4)
    assert found.cure is None
    assert found.verdict.endswith(
        "keep=second is not proven to cure it: the loss is +0.3 from that of bf16, and was +0.4"
    )
    losses["twin"] = 0.5
    found = ampcompare.diagnose(loop_of(64.0), arm="gemm:mxfp4,keep=none", device="cpu", steps=4)
    assert found.verdict.endswith("and a twin's 0.5: more steps may show more")


def test_a_training_shows_that_the_layer_was_it() -> None:
    """What the loop trains with the proposed arm is nearer to bf16, and farther without it than a twin."""
    found = ampcompare.diagnose(loop_of(64.0), arm="gemm:mxfp4,keep=none", device="cpu", steps=5)
    assert found.faults[0].place.module == "second"
    assert found.cure is not None
    assert found.cure.arm == "gemm:mxfp4,keep=second"


def test_no_layer_is_named_where_none_stands_out() -> None:
    """And the layer that the arm keeps is not tried."""
    found = ampcompare.diagnose(loop_of(1.0), arm="gemm:mxfp8", device="cpu", steps=2)
    assert found.verdict == "gemm:mxfp8: no layer stands out at step 1, so none is to be kept"
    assert {one.layer for one in found.formats} == {"first", "second"}
    assert found.notes == ["kept in bf16 by the arm: head"]


def test_the_last_step_has_the_weights_of_a_training_in_bf16() -> None:
    """The loop is repeated without training up to there, so the same product gives the same error, however often."""
    one, again = (
        ampcompare.diagnose(
            loop_of(64.0), arm="gemm:bf16,wgrad=nvfp4,keep=none", device="cpu", steps=3, cures=False
        )
        for _ in range(2)
    )
    assert one.formats == again.formats
    assert {error.role for error in one.formats} == {"wgrad"}


def test_a_loop_without_so_many_steps_and_a_script_are_refused() -> None:
    def short(precision: Any) -> None:
        model: nn.Module = Net(1.0)
        precision.prepare([model], [torch.optim.SGD(model.parameters(), lr=0.1)])

    with pytest.raises(ConfigError, match="fewer than 2 steps"):
        ampcompare.diagnose(short, arm="gemm:mxfp8", device="cpu", steps=2)
    config = RunConfig.model_validate({"arm": "gemm:mxfp8", "script": {"name": "train.py", "arguments": []}})
    with pytest.raises(ConfigError, match="too long for a script; diagnose a recipe or a loop"):
        DiagnoseOptions(config).check()
