"""From the name of an optimizer to its class, and settings against the arguments that it takes."""

import sys
import types
from typing import Any

import pytest
import torch

from ampcompare.apex.optimizers import FusedAdam, FusedSGD
from ampcompare.base.errors import BackendUnavailable, ConfigError, UnsupportedCombination
from ampcompare.settings.recipe import OptimizerConfig
from ampcompare.settings.validation import build_validated_model
from ampcompare.training.assemble import import_optimizer_factory, optimizer_arguments


def test_apex_is_genuine_where_its_engine_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Genuine(torch.optim.SGD):
        """Stands for the class of the real Apex."""

    module = types.ModuleType("apex.optimizers")
    module.FusedAdam = Genuine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "apex", types.ModuleType("apex"))
    monkeypatch.setitem(sys.modules, "apex.optimizers", module)
    assert import_optimizer_factory("fused_adam", "nvidia") is Genuine
    assert import_optimizer_factory("fused_adam", "compat") is FusedAdam
    assert import_optimizer_factory("fused_adam") is FusedAdam


def test_a_class_that_torch_lacks_is_named_with_the_nearest() -> None:
    """torch.optim is searched for optimizers only."""
    with pytest.raises(
        ConfigError, match=r"torch .* has no optimizer torch.optim.RMSProp; did you mean 'RMSprop'"
    ):
        import_optimizer_factory("torch.optim:RMSProp")
    with pytest.raises(ConfigError, match=r"has no optimizer torch\.optim\.Optimizer"):
        import_optimizer_factory("torch.optim:Optimizer")


def test_a_package_that_cannot_be_imported_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package built for another torch ends in exit code 4 with its own reason."""
    monkeypatch.setattr("ampcompare.training.assemble.require_optimizer", lambda name: None)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(BackendUnavailable, match=r"importing bitsandbytes.optim failed: ModuleNotFoundError"):
        import_optimizer_factory("bitsandbytes.optim:AdamW8bit")


def arguments(factory: Any, **settings: Any) -> dict[str, Any]:
    return optimizer_arguments(
        build_validated_model(OptimizerConfig, {"name": "mine:make", "lr": 0.5, **settings}), factory
    )


def test_settings_go_where_they_are_taken() -> None:
    """At their defaults, settings that an optimizer does not take are left out, and the others are passed."""
    assert arguments(torch.optim.SGD) == {"lr": 0.5, "momentum": 0.9, "nesterov": False, "weight_decay": 1e-4}
    assert arguments(torch.optim.Adam) == {
        "lr": 0.5,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 1e-4,
    }
    assert arguments(torch.optim.Rprop) == {"lr": 0.5}


def test_a_class_is_read_by_its_constructor() -> None:
    """FusedAdam's `__new__` takes anything, and would hide what the constructor takes."""
    assert arguments(FusedAdam) == {"lr": 0.5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-4}


def test_a_setting_of_another_kind_is_not_passed() -> None:
    """Adafactor's eps is a pair: the number that other optimizers call eps is not it."""
    assert arguments(torch.optim.Adafactor) == {"lr": 0.5, "weight_decay": 1e-4}
    assert arguments(torch.optim.Adafactor, args={"eps": [None, 1e-2]})["eps"] == [None, 1e-2]


@pytest.mark.parametrize(
    ("factory", "settings", "text"),
    [
        (
            torch.optim.SGD,
            {"eps": 1e-3},
            "recipe.optimizer.eps is 0.001, but optimizer mine:make does not take it",
        ),
        (torch.optim.Adam, {"momentum": 0.5}, "momentum is 0.5.*it takes betas, eps, weight_decay"),
        (torch.optim.Rprop, {"weight_decay": 0.1}, "weight_decay is 0.1.*it takes none of them"),
        (torch.optim.Rprop, {"norm_weight_decay": 0.1}, "norm_weight_decay is 0.1"),
        (torch.optim.Rprop, {"groups": [{"match": "*", "weight_decay": 1.0}]}, "groups.weight_decay is set"),
        (torch.optim.SGD, {"args": {"dampning": 0.1}}, "no argument 'dampning'; did you mean 'dampening'?"),
        (
            torch.optim.SGD,
            {"momentum": 0.5, "args": {"momentum": 0.6}},
            "momentum and args.momentum are the same",
        ),
        (lambda params: None, {}, "takes no lr"),
    ],
)
def test_what_is_given_and_not_taken_is_an_error(factory: Any, settings: dict[str, Any], text: str) -> None:
    """Nothing that a user asked for is dropped in silence."""
    with pytest.raises(ConfigError, match=text):
        arguments(factory, **settings)


def test_arguments_are_passed() -> None:
    """Also to a function with open keywords; an argument replaces a setting at its default."""
    assert arguments(FusedSGD, args={"wd_after_momentum": True})["wd_after_momentum"] is True
    assert arguments(torch.optim.SGD, args={"momentum": 0.6})["momentum"] == 0.6
    assert arguments(lambda params, lr, **more: None, args={"any": 1}) == {"lr": 0.5, "any": 1}


def test_an_implementation_that_is_not_there_is_refused() -> None:
    assert arguments(torch.optim.RMSprop, implementation="foreach")["foreach"] is True
    with pytest.raises(UnsupportedCombination, match="has no implementation foreach"):
        arguments(FusedAdam, implementation="foreach")
