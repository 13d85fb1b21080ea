"""Norms that errors are computed from, against float64."""

from __future__ import annotations

import math

import pytest
import torch

from ampcompare.diagnosis.watch import CHUNK, errors_of


@pytest.mark.parametrize("size", [1.0, 1e25, 1e-25, 0.0])
@pytest.mark.parametrize("count", [5, CHUNK + 7])
def test_norms_are_those_of_float64(count: int, size: float) -> None:
    """Also of more elements than one part, and where squares leave the range of fp32."""
    generator = torch.Generator().manual_seed(2)
    exact, own = (size * torch.randn(count, generator=generator) for _ in range(2))
    result = exact.bfloat16()
    wide = result.double()
    expected = [torch.linalg.vector_norm(one) for one in (wide - exact.double(), exact.double(), wide - own, wide)]
    assert errors_of(result, exact, own) == pytest.approx([float(one) for one in expected], rel=1e-5, abs=1e-44)


def test_what_is_not_finite_has_no_norm() -> None:
    """A result that overflowed has a difference that is not finite, and the wide one a norm."""
    difference, wide, own, size = errors_of(torch.tensor([math.inf, 1.0]).half(), torch.tensor([7e4, 1.0]), None)
    assert not math.isfinite(difference + size)
    assert (wide, own) == (pytest.approx(7e4), 0.0)
