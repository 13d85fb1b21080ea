"""A checkpoint that can be read but holds something unexpected: the error names the entry."""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from ampcompare.base.errors import ConversionError
from ampcompare.training.checkpoint.convert.convert import convert_file
from ampcompare.training.checkpoint.reader.placeholders import reading
from tests.training.checkpoint.convert.small_scripts import APEX, SCALER

WEIGHTS = {"weight": torch.ones(2, dtype=torch.float16)}


def _fused_adam(**group: Any) -> dict[str, Any]:
    return {"state": {}, "param_groups": [{"bias_correction": True, "step": 3, **group}]}


@pytest.mark.parametrize(
    ("entries", "to", "message"),
    [
        ({"amp": APEX, "optimizer": _fused_adam()}, "native", "entry optimizer.param_groups.0 .* it has no 'params'"),
        (
            {"amp": APEX, "optimizer": _fused_adam(params=[0], step="three")},
            "native",
            "entry optimizer.param_groups.0 .* 'three'",
        ),
        ({"scaler": {**SCALER, "growth_factor": "two"}}, "apex", "growth_factor is two"),
    ],
)
def test_the_entry_is_named(
    entries: dict[str, Any], to: Literal["native", "apex"], message: str, tmp_path: Path
) -> None:
    """An entry that lacks a key or has a value of another type is refused by its path in the checkpoint."""
    torch.save({"model": WEIGHTS, **entries}, tmp_path / "a.pt")
    with pytest.raises(ConversionError, match=message) as caught:
        convert_file(tmp_path / "a.pt", tmp_path / "b.pt", to)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "b.pt").exists()


def test_a_name_out_of_a_file_is_harmless() -> None:
    """A key that would steer a terminal, or fill it, is shown as one short line."""
    with pytest.raises(ConversionError) as caught, reading("model", "\x1b[31m" + "x" * 10_000):
        _ = {}["\x1b[2J" + "y" * 10_000]
    assert len(str(caught.value)) < 400
    assert str(caught.value).isprintable()
