"""What a device can do, on accelerators that are made here."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ampcompare.training.process.device import (
    generator_state_of,
    has_float64,
    set_generator_state,
    synchronize_device,
)


@pytest.mark.parametrize(("kind", "given"), [("mps", 0), ("xpu", 1)])
def test_the_generator_of_an_accelerator_is_saved_and_set(
    monkeypatch: pytest.MonkeyPatch, kind: str, given: int
) -> None:
    """torch.mps has one device and takes none; torch.xpu is asked for the device."""
    calls: list[tuple[Any, ...]] = []

    def get(*device: torch.device) -> Tensor:
        calls.append(device)
        return torch.ones(16, dtype=torch.uint8)

    def put(state: Tensor, *device: torch.device) -> None:
        calls.append((state.numel(), *device))

    waits = SimpleNamespace(
        get_rng_state=get, set_rng_state=put, synchronize=lambda: calls.append(("waited",))
    )
    monkeypatch.setattr(torch, kind, waits)
    device = torch.device(kind, 0)
    set_generator_state(generator_state_of(device), device)
    synchronize_device(device)
    assert calls == [(device,) * given, (16, *(device,) * given), ("waited",)]
    assert [has_float64(torch.device(name)) for name in (kind, "cpu", "cuda")] == [False, True, True]
