"""Groups of parameters, and rates adapted layer by layer, for every arm."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from ampcompare.apex.parallel.LARC import LARC
from ampcompare.base.errors import ConfigError, UnsupportedCombination
from ampcompare.base.tensors.skippable_step import is_step_skippable
from ampcompare.settings.config import RunConfig
from ampcompare.settings.recipe import OptimizerConfig
from ampcompare.settings.validation import build_validated_model
from ampcompare.training.assemble import make_optimizer, make_param_groups
from ampcompare.training.precision.base import make_precision
from tests.covering import covering

X = torch.linspace(-1, 1, 24).reshape(6, 4)


def net() -> nn.Sequential:
    """Linear layers with biases around a norm with both."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def groups(**settings: Any) -> list[tuple[list[str], float, float]]:
    """Names, learning rate and weight decay of each group."""
    model = net()
    names = {id(param): name for name, param in model.named_parameters()}
    config = build_validated_model(OptimizerConfig, {"lr": 0.5, "weight_decay": 0.25, **settings})
    return [
        ([names[id(param)] for param in group["params"]], group["lr"], group["weight_decay"])
        for group in make_param_groups(config, model)
    ]


def test_no_decay_for_norms_and_biases() -> None:
    assert groups(norm_weight_decay=0, bias_weight_decay=0) == [
        (["0.weight", "2.weight"], 0.5, 0.25),
        (["0.bias", "1.weight", "1.bias", "2.bias"], 0.5, 0.0),
    ]
    assert groups(norm_weight_decay=0.125) == [
        (["0.weight", "0.bias", "2.weight", "2.bias"], 0.5, 0.25),
        (["1.weight", "1.bias"], 0.5, 0.125),
    ]


def test_patterns_give_rates_and_decays() -> None:
    settings = [{"match": "2.*", "lr_factor": 10}, {"match": "*.bias", "lr_factor": 2, "weight_decay": 0.5}]
    assert groups(groups=settings, bias_weight_decay=0) == [
        (["0.weight", "1.weight"], 0.5, 0.25),
        (["0.bias", "1.bias"], 1.0, 0.5),
        (["2.weight"], 5.0, 0.25),
        (["2.bias"], 5.0, 0.0),
    ]


def test_a_pattern_that_fits_nothing_is_an_error() -> None:
    """A mistyped name of a layer is told of, with names as they are."""
    with pytest.raises(
        ConfigError, match=r"groups\[1\] matches no parameter left to it: 'haed.*'; names look like 0"
    ):
        groups(groups=[{"match": "2.*"}, {"match": "haed.*"}])


ARMS = ["fp32", "apex:O1", "apex:O2", "apex:O3", "native:fp16", "native:bf16", "half:loss_scale=8"]
ARMS.append("half:masters=fp32,dynamic")


def trained(arm: str, make: Any, *, infinite: bool = False, model: Any = None) -> list[torch.Tensor]:
    """The weights after three updates in an arm."""
    model = model or net()
    precision = make_precision(arm)
    (model,), (optimizer,) = precision.prepare([model], [make(model)])  # type: ignore[assignment]
    for step in range(3):
        with precision.autocast():
            loss = model(X).float().square().mean() * (float("inf") if infinite and step == 1 else 1.0)
        precision.backward(loss, [optimizer])
        precision.step(optimizer)
        optimizer.zero_grad()
    return [param.detach().float().clone() for param in model.parameters()]


def adaptive(kind: str, trust: float = 0.02) -> Any:
    config = build_validated_model(
        OptimizerConfig, {"lr": 0.5, "weight_decay": 0.01, "layer_lr": kind, "trust_coefficient": trust}
    )
    return lambda model: make_optimizer(config, model)


@pytest.mark.parametrize("kind", ["larc", "lars"])
def test_in_fp32_the_weights_are_those_of_apex_larc(kind: str) -> None:
    """The hooks do what Apex's wrapper around the optimizer does, bit for bit."""
    model = net()
    optimizer = LARC(SGD(model.parameters(), lr=0.5, momentum=0.9, weight_decay=0.01), clip=kind == "larc")
    for _ in range(3):
        model(X).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    ours = trained("fp32", adaptive(kind))
    assert all(torch.equal(a, b) for a, b in zip(ours, model.parameters(), strict=True))


@pytest.mark.integration
@pytest.mark.parametrize("arm", ARMS[1:])
def test_every_arm_adapts_unscaled_gradients(arm: str) -> None:
    """Weights are those of fp32 up to rounding, whatever the loss scale, and far from those without adaption."""
    ours, reference, plain = (
        torch.cat([weight.flatten() for weight in trained(name, adaptive(how))])
        for name, how in ((arm, "larc"), ("fp32", "larc"), ("fp32", "none"))
    )
    assert (ours - reference).norm() < 0.1 * (plain - reference).norm()


@pytest.mark.parametrize("arm", ["apex:O1", "apex:O2", "native:fp16"])
def test_a_skipped_step_adapts_nothing(arm: str) -> None:
    """An overflow leaves weights, decays and the next steps as they are without adaption."""
    weights = trained(arm, adaptive("larc"), infinite=True)
    assert all(weight.isfinite().all() for weight in weights)


IMPLEMENTED = [*ARMS, "half:dynamic", "half:bn_fp32"]


@covering({"name": ["sgd", "adam", "adamw"], "implementation": ["foreach", "fused"], "arm": IMPLEMENTED})
def test_every_arm_trains_by_any_implementation(arm: str, implementation: str, name: str) -> None:
    """foreach and fused steps give the weights of torch's default up to rounding, an overflow among them.

    Adam over fp16 weights alone does not compare: its default computes in fp16, its fused kernel in fp32.
    """
    settings: dict[str, Any] = {"name": name, "lr": 0.01, **({} if name == "sgd" else {"eps": 1e-3})}

    def make(how: str) -> Any:
        config = build_validated_model(OptimizerConfig, {**settings, "implementation": how})
        return lambda model: make_optimizer(config, model)

    infinite = "dynamic" in arm or arm in ("apex:O1", "apex:O2", "native:fp16")
    given, default = (trained(arm, make(how), infinite=infinite) for how in (implementation, "default"))
    start = [param.detach() for param in net().parameters()]
    pure = name != "sgd" and arm in ("apex:O3", "half", "half:loss_scale=8", "half:dynamic", "half:bn_fp32")
    for ours, theirs, before in zip(given, default, start, strict=True):
        assert not torch.equal(ours, before)
        torch.testing.assert_close(ours, theirs, rtol=4e-3, atol=0.05 if pure else 1e-3)


def test_an_argument_that_an_optimizer_refuses_is_an_error_of_the_settings() -> None:
    config = build_validated_model(OptimizerConfig, {"name": "fused_adam", "args": {"amsgrad": True}})
    with pytest.raises(ConfigError, match=r"optimizer fused_adam cannot be built: RuntimeError: .*amsgrad"):
        make_optimizer(config, net())


def test_what_is_no_optimizer_is_refused() -> None:
    """A function may build the optimizer, and nothing else."""
    config = build_validated_model(
        OptimizerConfig, {"name": "tests.training.test_optimizers:not_an_optimizer"}
    )
    with pytest.raises(ConfigError, match=r"is a list; it must be a torch\.optim\.Optimizer"):
        make_optimizer(config, net())


def not_an_optimizer(params: Any, lr: float) -> list[Any]:
    return [params, lr]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"name": "torch.optim.Rprop", "layer_lr": "larc"},
            "applies the weight decay itself, but torch.optim:Rprop has none",
        ),
        ({"name": "fused_adam", "skip_on_device": True}, "cannot skip a step of FusedAdam on the device"),
    ],
)
def test_methods_that_an_optimizer_cannot_have_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedCombination, match=text):
        make_optimizer(build_validated_model(OptimizerConfig, settings), net())


@pytest.mark.parametrize("name", ["fused_adam", "fused_lamb", "fused_novograd", "fused_sgd", "fused_adagrad"])
@pytest.mark.parametrize("arm", ["apex:O2", "native:fp16", "half:loss_scale=8", "half:bf16"])
def test_every_arm_trains_by_the_optimizers_of_apex(arm: str, name: str) -> None:
    """No loss scale is left in a step: the weights are those of fp32, up to the rounding of the arm.

    The matrix has no bias: its gradient would be rounding noise, which these optimizers make as large as any other.
    """

    def trained_weights(arm: str) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Tanh(), nn.Linear(3, 2, bias=False))
        config = build_validated_model(OptimizerConfig, {"name": name, "lr": 0.02})
        return torch.cat(
            [
                weight.flatten()
                for weight in trained(arm, lambda model: make_optimizer(config, model), model=model)
            ]
        )

    if arm == "half:bf16" and name != "fused_adam":  # Apex's other optimizers know fp16 and fp32 only
        with pytest.raises(RuntimeError, match=r"got a parameter of torch\.bfloat16"):
            trained_weights(arm)
        return
    reference = trained_weights("fp32")  # before O1 patches torch
    torch.testing.assert_close(trained_weights(arm), reference, rtol=0.02, atol=0.004)


@pytest.mark.parametrize(
    ("name", "implementation"), [("sgd", "default"), ("adam", "foreach"), ("adamw", "fused")]
)
def test_skipping_on_the_device_is_asked_for(name: str, implementation: str) -> None:
    """`make_step_skippable` prepares the optimizer in any implementation, and without it nothing does."""
    settings = {"name": name, "implementation": implementation}
    assert is_step_skippable(
        make_optimizer(build_validated_model(OptimizerConfig, {**settings, "skip_on_device": True}), net())
    )
    assert not is_step_skippable(make_optimizer(build_validated_model(OptimizerConfig, settings), net()))


@pytest.mark.parametrize(
    ("kind", "settings", "text"),
    [
        (OptimizerConfig, {"implementation": "fused", "layer_lr": "larc"}, "adapts unscaled gradients"),
        (OptimizerConfig, {"skip_on_device": True, "layer_lr": "larc"}, "leave out skip_on_device"),
        (
            RunConfig,
            {"deterministic": True, "recipe": {"cudnn_benchmark": True}},
            "cudnn_benchmark may choose another",
        ),
    ],
)
def test_settings_that_exclude_each_other(kind: Any, settings: dict[str, Any], text: str) -> None:
    """Layer rates need unscaled gradients and steps that are taken; kernels chosen by their time may differ."""
    with pytest.raises(ConfigError, match=text):
        build_validated_model(kind, settings)
