"""For tests of checkpoints as files: a small state with all that a checkpoint may hold."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch


@pytest.fixture
def make_state() -> Callable[[float], dict[str, Any]]:
    """Build a state of our layout whose tensors hold one value."""

    def make(value: float = 1.0) -> dict[str, Any]:
        weight = torch.full((4, 3), value)
        return {
            "model": {"weight": weight.half(), "bias": torch.zeros(4)},
            "optimizer": {
                "state": {0: {"momentum_buffer": weight.clone(), "step": torch.tensor(3.0)}},
                "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0, 1], "foreach": None}],
            },
            "amp": {"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 7}},
            "masters": {"weight": weight + 1e-5},
            "progress": {"step": 12, "epoch": 2},
            "best": {"value": 0.5, "step": 6},
            "rng": [{"torch": torch.get_rng_state(), "python": (3, (1, 2), None)}],
            "arm": "apex:O2",
        }

    return make


@pytest.fixture
def amp() -> Iterator[Any]:
    """The engine's `apex.amp`, whose patches are taken back after the test."""
    from ampcompare.apex import amp

    yield amp
    amp._amp_state.close()
