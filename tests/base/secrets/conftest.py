"""What each test of secrets leaves behind."""

from collections.abc import Iterator

import pytest

from ampcompare.base.secrets import masking as secrets


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    """Let no test know the secrets of another."""
    yield
    for known in (secrets._names, secrets._values, secrets._placeholders):
        known.clear()
