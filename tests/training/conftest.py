"""The end of O1's patches after each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def closed_amp_session() -> Iterator[None]:
    """Take O1's patches off torch again."""
    yield
    from ampcompare.apex.amp import _amp_state

    _amp_state.close()
