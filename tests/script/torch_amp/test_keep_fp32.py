"""`keep_fp32` where a script names no model."""

import re
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from ampcompare.base.errors import ConfigError
from ampcompare.base.patches import Layer, Subscriptions
from ampcompare.script.torch_amp.keep_fp32 import KeptFp32AtFirstCall, model_inside_wrappers
from ampcompare.training.precision.keep_fp32 import make_autocast_off_factory


@pytest.fixture
def events() -> Iterator[Subscriptions]:
    events = Subscriptions(Layer.STAND_IN)
    yield events
    events.end()


def test_modules_are_kept_at_the_first_call(events: Subscriptions) -> None:
    """The first forward pass already runs them without autocast, and the others with it."""
    KeptFp32AtFirstCall("1|2", make_autocast_off_factory("cpu"), lambda: True).install(events)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    types = []
    for layer in model:
        layer.register_forward_hook(lambda layer, given, output: types.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(2, 4))
    assert types == [torch.bfloat16, torch.float32, torch.float32, torch.bfloat16]


@pytest.mark.filterwarnings("ignore::ampcompare.apex.DeprecatedFeatureWarning")
def test_names_are_those_inside_of_what_casts_a_model() -> None:
    """Apex's `network_to_half` puts the model behind a layer that casts its input, `FP16Model` into one that does."""
    from ampcompare.apex.fp16_utils import FP16Model, network_to_half

    model = nn.Sequential(nn.Linear(4, 4))
    assert model_inside_wrappers(network_to_half(model)) is model
    assert model_inside_wrappers(nn.DataParallel(FP16Model(model))) is model
    assert model_inside_wrappers(nn.Sequential(nn.Identity(), model))[1] is model


def test_a_pattern_without_a_module(events: Subscriptions) -> None:
    """It is refused at the first step, when the models have been called."""
    KeptFp32AtFirstCall("nothing", make_autocast_off_factory("cpu"), lambda: True).install(events)
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(torch.zeros(1, 2)).sum().backward()
    with pytest.raises(ConfigError, match="keep_fp32=nothing matches no module"):
        optimizer.step()


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        (
            "Criterion",
            r"matches Criterion alone, which the script itself calls .* its inputs with \.float\(\)",
        ),
        ("Crit*", "matches Criterion alone"),
        ("Linear", "matches the whole model, Linear"),
        ("nothing", "matches no module that the script has called"),
    ],
)
def test_a_module_that_stands_in_no_model_is_named(events: Subscriptions, pattern: str, why: str) -> None:
    """It is not unknown: options keep what is inside of a model, and no loss beside it."""

    class Criterion(nn.Module):
        def forward(self, y: torch.Tensor) -> torch.Tensor:
            return y.float().square().mean()

    KeptFp32AtFirstCall(pattern, make_autocast_off_factory("cpu"), lambda: True).install(events)
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    Criterion()(layer(torch.ones(1, 2))).backward()
    with pytest.raises(ConfigError, match=rf"keep_fp32={re.escape(pattern)} {why}"):
        optimizer.step()
