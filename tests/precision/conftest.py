"""Arms to test, and the end of O1's patches after each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def closed_amp_session() -> Iterator[None]:
    """Take O1's patches off torch again, and leave no overflow or scale behind."""
    yield
    from ampcompare.apex.amp import _amp_state

    _amp_state.close()


@pytest.fixture
def device() -> torch.device:
    """The device to test on: CUDA where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
