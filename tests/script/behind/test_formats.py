"""Formats of products in scripts: their numbers are those of ampcompare's own loop, whatever the script calls."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ampcompare.base.errors import ConfigError, UnsupportedCombination
from ampcompare.training.precision.base import make_precision
from tests.script.behind.test_stand_in import RecordedSteps
from tests.script.small_script import batch

ARMS = [
    "gemm:mxfp8",
    "gemm:nvfp4,sr,rht,tiles",
    "gemm:mxfp8,over=half:bf16+masters=fp32",
    "gemm:bf16,wgrad=mxfp4",
]


class Net(nn.Module):
    """A network that makes its head first; called with a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.body = nn.Linear(40, 3), nn.Linear(6, 40)

    def forward(self, *, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.body(x).relu())
        return result


def network() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def by_hand(arm: str) -> list[Tensor]:
    """Train as ampcompare's own loop does."""
    precision = make_precision(arm)
    model, optimizer = network()
    (model,), (optimizer,) = precision.prepare([model], [optimizer])
    for step in range(3):
        x, y = batch(step)
        with precision.autocast():
            loss = cross_entropy(model(x=x).float(), y)
        optimizer.zero_grad()
        precision.backward(loss, [optimizer])
        precision.step(optimizer)
    return [param.detach().float() for param in model.parameters()]


def plain() -> nn.Module:
    model, optimizer = network()
    for step in range(3):
        x, y = batch(step)
        loss = cross_entropy(model(x=x).float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def with_autocast() -> nn.Module:
    model, optimizer = network()
    scaler = torch.amp.GradScaler("cpu")
    for step in range(3):
        x, y = batch(step)
        with torch.autocast("cpu"):
            loss = cross_entropy(model(x=x).float(), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return model


def with_apex() -> nn.Module:
    from apex import amp

    model, optimizer = network()
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    for step in range(3):
        x, y = batch(step)
        loss = cross_entropy(model(x=x).float(), y)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    return model


@pytest.mark.filterwarnings("ignore::ampcompare.apex.DeprecatedFeatureWarning")
@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("script", [plain, with_autocast, with_apex])
def test_a_script_trains_as_the_own_loop_does(behind: Any, arm: str, script: Any) -> None:
    """To the last bit, random bits too; and the record names the layer that stays in bf16."""
    expected = by_hand(arm)
    rows = RecordedSteps()
    behind(arm, rows)
    model = script()
    assert all(
        torch.equal(mine.detach().float(), other)
        for mine, other in zip(model.parameters(), expected, strict=True)
    )
    assert "kept in bf16: head, which runs last" in rows.notes


def test_a_reference_without_autocast_stays_as_it_is(behind: Any) -> None:
    """A teacher that the arm does not cast has no formats either."""
    torch.manual_seed(0)
    teacher, x = Net().requires_grad_(False), batch(0)[0]
    expected = teacher(x=x)
    behind("gemm:nvfp4")
    model, optimizer = network()
    (model(x=x).float() - teacher(x=x)).square().mean().backward()
    optimizer.step()
    assert torch.equal(teacher(x=x), expected)


def test_a_script_whose_products_are_not_of_linear_layers_is_refused(behind: Any) -> None:
    """At its first step: a bf16 run must not be called one in a format."""
    behind("gemm:nvfp4")
    model = nn.Sequential(nn.Conv1d(1, 2, 3), nn.Flatten())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batch(0)[0][:, None]).float().square().mean().backward()
    with pytest.raises(
        UnsupportedCombination, match=r"test_formats\.py:\d+: no linear layer .* compare native:bf16"
    ):
        optimizer.step()


def test_a_pattern_without_a_module_is_an_error_with_the_line(behind: Any) -> None:
    behind("gemm:nvfp4,keep=haed")
    model, _ = network()
    with pytest.raises(ConfigError, match=r"test_formats\.py:\d+: keep=haed matches no module"):
        model(x=batch(0)[0])
