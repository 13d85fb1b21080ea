"""Lines that run in fp32."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from ampcompare.diagnosis.sites import HIDDEN, PACKAGE, calling_line
from ampcompare.diagnosis.step_watch import lines_in_fp32


def test_a_kept_line_casts_nothing_to_16_bits() -> None:
    x = torch.full((2,), 300.0)
    called: set[str] = set()
    file, _, number = calling_line(sys._getframe()).rpartition(":")
    with lines_in_fp32([f"{file}:{int(number) + 2}"], called):
        kept = x.half() * x.to(torch.float16)
        cast = x.half() * x.to(torch.float16)
    assert (kept.dtype, cast.dtype) == (torch.float32, torch.float16)
    assert torch.isfinite(kept).all()
    assert torch.isinf(cast).all()
    assert called == {"torch.Tensor.mul"}


def test_what_is_hidden_is_there() -> None:
    """The rooms and files of the package whose lines are never shown exist under their names."""
    own = [Path(path) for path in HIDDEN if path.startswith(PACKAGE)]
    assert own
    assert all(path.exists() for path in own)
