"""What the tests of the engine share."""

import pytest

from ampcompare.apex.amp._engine import device_skip


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a CPU be served like a device that makes the host wait."""
    monkeypatch.setattr(device_skip, "_DEVICE_TYPES", frozenset({"cpu", "cuda"}))
