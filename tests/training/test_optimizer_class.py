"""From the name of an optimizer to its class."""

import sys
import types

import pytest
import torch

from ampcompare.apex.optimizers import FusedAdam
from ampcompare.base.errors import BackendUnavailable, ConfigError
from ampcompare.training.assemble import load_optimizer


def test_apex_is_genuine_where_its_engine_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Genuine(torch.optim.SGD):
        """Stands for the class of the real Apex."""

    module = types.ModuleType("apex.optimizers")
    module.FusedAdam = Genuine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "apex", types.ModuleType("apex"))
    monkeypatch.setitem(sys.modules, "apex.optimizers", module)
    assert load_optimizer("fused_adam", "nvidia") is Genuine
    assert load_optimizer("fused_adam", "compat") is FusedAdam
    assert load_optimizer("fused_adam") is FusedAdam


def test_a_class_that_torch_lacks_is_named_with_the_nearest() -> None:
    """torch.optim is searched for optimizers only."""
    with pytest.raises(ConfigError, match=r"torch .* has no optimizer torch.optim.RMSProp; did you mean 'RMSprop'"):
        load_optimizer("torch.optim:RMSProp")
    with pytest.raises(ConfigError, match=r"has no optimizer torch\.optim\.Optimizer"):
        load_optimizer("torch.optim:Optimizer")


def test_a_package_that_cannot_be_imported_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package built for another torch ends in exit code 4 with its own reason."""
    monkeypatch.setattr("ampcompare.training.assemble.require_optimizer", lambda name: None)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(BackendUnavailable, match=r"importing bitsandbytes.optim failed: ModuleNotFoundError"):
        load_optimizer("bitsandbytes.optim:AdamW8bit")
