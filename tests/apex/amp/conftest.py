"""What the tests of `apex.amp` share."""

from typing import Any

import pytest

from ampcompare.apex import amp


@pytest.fixture
def handle() -> Any:
    """O1's patches, without models."""
    return amp.init()
