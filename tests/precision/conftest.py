"""Arms to test, and the end of O1's patches after each test."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def closed_amp_session() -> Iterator[None]:
    """Take O1's patches off torch again, and leave no overflow or scale behind."""
    yield
    from ampcompare.apex.amp import _amp_state

    _amp_state.close()


@pytest.fixture(autouse=True)
def fresh_accelerator() -> Iterator[None]:
    """Let each test make an `Accelerator` of a precision of its own, as each run does in its own process."""
    yield
    if sys.modules.get("accelerate") is not None:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


@pytest.fixture
def device() -> torch.device:
    """The device to test on: CUDA where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
