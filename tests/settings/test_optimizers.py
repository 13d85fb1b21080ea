"""Names of optimizers, read without torch."""

from typing import Any

import pytest

from ampcompare.base.errors import BackendUnavailable, ConfigError
from ampcompare.settings.config import RunConfig
from ampcompare.settings.optimizers import (
    BUILT_IN,
    canonical_name,
    list_optimizers,
    require_optimizer,
)
from ampcompare.settings.recipe import OptimizerConfig
from ampcompare.settings.validation import validate


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("SGD", "sgd"),
        ("fused-adam", "fused_adam"),
        ("torch.optim.AdamW", "adamw"),
        ("torch.optim:SGD", "sgd"),
        ("apex.optimizers.FusedLAMB", "fused_lamb"),
        ("ampcompare.apex.optimizers.FusedSGD", "fused_sgd"),
        ("torch.optim.RMSprop", "torch.optim:RMSprop"),
        ("mine:make", "mine:make"),
    ],
)
def test_one_optimizer_has_one_name(text: str, name: str) -> None:
    """Whatever way it is written, its cell has one digest."""
    assert canonical_name(text) == name
    assert OptimizerConfig(name=text).name == name


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ({"lr": 1}, "lr is a setting of its own; give it as recipe.optimizer.lr"),
        ({"fused": True}, "give it as recipe.optimizer.implementation"),
        ({"params": []}, "give it as recipe.optimizer.groups"),
    ],
)
def test_arguments_that_are_settings_are_refused(args: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        validate(OptimizerConfig, {"args": args})


def test_rates_by_layer_are_not_adapted_twice() -> None:
    with pytest.raises(ConfigError, match="fused_lamb already does"):
        validate(OptimizerConfig, {"name": "fused_lamb", "layer_lr": "larc"})


def test_gradients_that_stay_scaled_are_not_clipped() -> None:
    """FusedSGD without master gradients leaves nothing to clip at its size."""
    optimizer = {"name": "fused_sgd", "args": {"materialize_master_grads": False}}
    with pytest.raises(ConfigError, match="clip_grad reads unscaled gradients"):
        validate(RunConfig, {"recipe": {"optimizer": optimizer, "clip_grad": 1.0}})
    validate(RunConfig, {"recipe": {"optimizer": optimizer}})


def test_what_is_not_installed_is_refused_with_the_line_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """A known package asks to be installed; an unknown module does not exist."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    with pytest.raises(BackendUnavailable, match="bitsandbytes is not installed: pip install bitsandbytes"):
        require_optimizer("bitsandbytes.optim:AdamW8bit")
    with pytest.raises(ConfigError, match="there is no module 'nowhere_to_be_found'"):
        require_optimizer("nowhere_to_be_found:Class")
    rows = {name: (available, reason) for name, available, reason in list_optimizers()}
    assert rows["torchao.optim.AdamW8bit"] == (False, "not installed: pip install 'ampcompare[fp8]'")
    assert set(BUILT_IN) < set(rows)
