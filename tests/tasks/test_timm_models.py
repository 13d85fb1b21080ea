"""Models of timm by name: what timm is asked for, shown by a stand-in for the package, which CI does not install."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ampcompare.base.errors import ConfigError
from ampcompare.tasks.models import build_model


@pytest.fixture
def timm(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """A timm with a network of any size and one of fixed size; returns the calls that it gets."""
    calls: list[tuple[str, dict[str, Any]]] = []

    def create_model(name: str, *, pretrained: bool, **options: Any) -> nn.Module:
        assert not pretrained
        calls.append((name, options))
        if "bad" in options:
            raise TypeError("unexpected keyword 'bad'")
        return nn.Sequential(nn.Conv2d(options["in_chans"], options["num_classes"], 3), nn.AdaptiveAvgPool2d(1))

    module: Any = ModuleType("timm")
    module.is_model = lambda name: name in ("resnet50", "vit_tiny")
    module.list_models = lambda: ["resnet50", "vit_tiny"]
    module.get_pretrained_cfg = lambda name: SimpleNamespace(fixed_input_size=name == "vit_tiny")
    module.create_model = create_model
    monkeypatch.setitem(sys.modules, "timm", module)
    return calls


def test_sizes_reach_the_model(timm: list[tuple[str, dict[str, Any]]]) -> None:
    """Classes and channels do, the size of the image where the model needs it, and the user's arguments."""
    for name in ("resnet50", "vit_tiny"):
        model = build_model(f"timm:{name}", num_classes=5, sample_shape=(2, 8, 9), model_args={"drop_rate": 0.1})
        assert model(torch.zeros(3, 2, 8, 9)).shape[:2] == (3, 5)
    shared = {"num_classes": 5, "in_chans": 2, "drop_rate": 0.1}
    assert timm == [("resnet50", shared), ("vit_tiny", {**shared, "img_size": (8, 9)})]


@pytest.mark.usefixtures("timm")
@pytest.mark.parametrize(
    ("arch", "shape", "arguments", "message"),
    [
        ("timm:resnet51", (3, 8, 8), {}, "did you mean 'resnet50'"),
        ("timm:resnet50", (8,), {}, "takes images"),
        ("timm:resnet50", (3, 8, 8), {"bad": 1}, "cannot be built .*unexpected keyword 'bad'"),
        pytest.param(
            "timm:resnet50",
            (3, 2, 2),
            {},
            "cannot process samples of shape",
            marks=pytest.mark.skipif(torch.__version__ < (2, 7), reason="its convolution on meta takes any image"),
        ),
    ],
)
def test_models_that_cannot_be(arch: str, shape: tuple[int, ...], arguments: dict[str, Any], message: str) -> None:
    """A wrong name, samples that do not fit and arguments that it refuses are one error each."""
    with pytest.raises(ConfigError, match=message):
        build_model(arch, num_classes=5, sample_shape=shape, model_args=arguments)
