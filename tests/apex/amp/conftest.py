"""What the tests of `apex.amp` share."""

from __future__ import annotations

from typing import Any

import pytest

from ampcompare.apex import amp


@pytest.fixture
def handle() -> Any:
    """O1's patches, without models."""
    return amp.init()
