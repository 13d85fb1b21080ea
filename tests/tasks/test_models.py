"""Models by name, and those of timm, shown by a stand-in for the package, which CI does not install."""

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ampcompare.base.errors import ConfigError
from ampcompare.tasks.models import build_model

Write = Callable[[str, str], None]
IMAGE_SHAPES = [(1, 8, 8), (2, 5, 11), (1, 1, 1)]


@pytest.mark.parametrize("arch", ["convnet", "mlp", "transformer"])
@pytest.mark.parametrize("shape", IMAGE_SHAPES)
def test_built_in_models_fit_any_image(arch: str, shape: tuple[int, int, int]) -> None:
    """Forward and backward give logits of the right shape and a gradient for every parameter."""
    torch.manual_seed(0)
    model = build_model(arch, num_classes=7, sample_shape=shape)
    logits = model(torch.randn(4, *shape))
    assert logits.shape == (4, 7)
    F.cross_entropy(logits, torch.tensor([0, 1, 2, 6])).backward()
    for parameter in model.parameters():
        assert parameter.dtype == torch.float32
        assert parameter.grad is not None
        assert torch.isfinite(parameter.grad).all()


def test_rows_of_a_matrix_are_tokens() -> None:
    """The transformer takes samples without channels, and the mlp takes any shape."""
    assert build_model("transformer", num_classes=3, sample_shape=(6, 5))(torch.rand(2, 6, 5)).shape == (2, 3)
    assert build_model("mlp", num_classes=3, sample_shape=(9,))(torch.rand(2, 9)).shape == (2, 3)
    for arch, shape in (("convnet", (6, 5)), ("transformer", (9,))):
        with pytest.raises(ConfigError, match="use mlp"):
            build_model(arch, num_classes=3, sample_shape=shape)


def test_patches_keep_every_pixel() -> None:
    """Patches hold the image row by row, filled up with zeros where its sides are no multiples."""
    model = build_model("transformer", num_classes=2, sample_shape=(2, 3, 5), model_args={"patch_size": 2})
    image = torch.arange(1.0, 31.0).reshape(1, 2, 3, 5)
    patches = model._cut_into_patches(image)
    assert patches.shape == (1, 6, 8)
    assert patches[0, 0].tolist() == [1, 2, 6, 7, 16, 17, 21, 22]
    assert patches[0, 5].tolist() == [15, 0, 0, 0, 30, 0, 0, 0]


def test_attention_is_that_of_torch() -> None:
    torch.manual_seed(0)
    block = build_model("transformer", num_classes=2, sample_shape=(1, 8, 8)).blocks[0]
    hidden = torch.randn(2, 16, 64)
    query, key, value = block.qkv(hidden).reshape(2, 16, 3, 4, 16).permute(2, 0, 3, 1, 4).unbind(0)
    expected = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(2, 16, 64)
    torch.testing.assert_close(block._attention(hidden), block.project(expected))


@pytest.mark.parametrize(
    "arch, arguments, told",
    [
        ("convnet", {"widht": 8}, "did you mean 'width"),
        ("mlp", {"depth": 1.5}, r"depth is 1\.5"),
        ("transformer", {"width": 10, "heads": 4}, "multiple of the heads"),
        ("resnet18", {"nonsense": 1}, "nonsense"),
    ],
)
def test_wrong_arguments_are_told(arch: str, arguments: dict[str, object], told: str) -> None:
    """An argument that the model does not take, or cannot use, is an error of the user's."""
    with pytest.raises(ConfigError, match=told):
        build_model(arch, num_classes=10, sample_shape=(3, 8, 8), model_args=arguments)


@pytest.mark.parametrize(
    ("arch", "size"), [("resnet18", 32), pytest.param("googlenet", 96, marks=pytest.mark.slow)]
)
@pytest.mark.integration
def test_torchvision_classifiers_are_built_for_the_samples(arch: str, size: int) -> None:
    """They have the data's classes, and one output in training mode too: auxiliary heads are off."""
    model = build_model(arch, num_classes=5, sample_shape=(3, size, size))
    assert model.training
    assert model(torch.randn(2, 3, size, size)).shape == (2, 5)


@pytest.mark.parametrize(
    "arch, shape, told",
    [
        ("alexnet", (3, 8, 8), r"cannot process samples of shape \(3, 8, 8\)"),
        ("vit_b_16", (3, 8, 8), "indivisible"),
        ("vit_b_16", (3, 32, 64), "square"),
        ("maxvit_t", (3, 32, 32), "cannot be built"),
        ("resnet18", (1, 32, 32), "takes color images"),
    ],
)
def test_samples_that_do_not_fit_are_told_at_once(arch: str, shape: tuple[int, ...], told: str) -> None:
    """A torchvision model that cannot process the samples is refused when it is built, in one line."""
    with pytest.raises(ConfigError, match=told) as caught:
        build_model(arch, num_classes=4, sample_shape=shape)
    assert "\n" not in str(caught.value)


FACTORIES = """
from torch import nn

def plain(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(48, num_classes))

def named(in_channels, sample_shape, *, num_classes, width=2):
    model = nn.Linear(in_channels, num_classes)
    model.seen = in_channels, sample_shape, width
    return model

def anything(**options):
    model = nn.Identity()
    model.seen = options
    return model

class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.layer = nn.Linear(3, num_classes)

def fixed():
    return nn.Identity()

def wrong(num_classes):
    return "a model"

def raising(num_classes):
    raise ValueError("no weights")
"""


def build_own(name: str, **arguments: object) -> nn.Module:
    return build_model(f"own_models:{name}", num_classes=5, sample_shape=(3, 4, 4), model_args=arguments)


def test_users_factories_get_what_they_name(user_module: Write) -> None:
    """A factory is called with the parameters that it names, all of them for **kwargs, and the model's arguments."""
    user_module("own_models", FACTORIES)
    assert build_own("plain")(torch.rand(2, 3, 4, 4)).shape == (2, 5)
    assert build_own("named", width=9).seen == (3, (3, 4, 4), 9)
    assert build_own("anything", x=1).seen == {
        "num_classes": 5,
        "sample_shape": (3, 4, 4),
        "in_channels": 3,
        "x": 1,
    }
    assert build_own("anything", num_classes=8).seen["num_classes"] == 8
    assert build_own("Net").layer.out_features == 5
    assert isinstance(build_own("fixed"), nn.Identity)


@pytest.mark.parametrize(
    "name, arguments, told, cause",
    [
        ("wrong", {}, "returned a str; it must return a torch.nn.Module", None),
        ("raising", {}, "calling it raised ValueError: no weights", ValueError),
        ("plain", {"width": 3}, "TypeError", TypeError),
    ],
)
def test_users_factories_that_fail_are_told(
    user_module: Write, name: str, arguments: dict[str, object], told: str, cause: type | None
) -> None:
    user_module("own_models", FACTORIES)
    with pytest.raises(ConfigError, match=told) as caught:
        build_own(name, **arguments)
    assert f"own_models:{name}" in str(caught.value)
    assert cause is None or isinstance(caught.value.__cause__, cause)


@pytest.fixture
def timm(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """A timm with a network of any size and one of fixed size; returns the calls that it gets."""
    calls: list[tuple[str, dict[str, Any]]] = []

    def create_model(name: str, *, pretrained: bool, **options: Any) -> nn.Module:
        assert not pretrained
        calls.append((name, options))
        if "bad" in options:
            raise TypeError("unexpected keyword 'bad'")
        return nn.Sequential(
            nn.Conv2d(options["in_chans"], options["num_classes"], 3), nn.AdaptiveAvgPool2d(1)
        )

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
        model = build_model(
            f"timm:{name}", num_classes=5, sample_shape=(2, 8, 9), model_args={"drop_rate": 0.1}
        )
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
            marks=pytest.mark.skipif(
                torch.__version__ < (2, 7), reason="its convolution on meta takes any image"
            ),
        ),
    ],
)
def test_models_that_cannot_be(
    arch: str, shape: tuple[int, ...], arguments: dict[str, Any], message: str
) -> None:
    """A wrong name, samples that do not fit and arguments that it refuses are one error each."""
    with pytest.raises(ConfigError, match=message):
        build_model(arch, num_classes=5, sample_shape=shape, model_args=arguments)
