"""The tables that explanations are made from, held against the engine and against torch."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ampcompare.apex.amp.frontend import Properties, opt_levels
from ampcompare.apex.amp.lists import functional_overrides, tensor_overrides, torch_overrides
from ampcompare.backends.apex_levels import (
    LEVELS,
    O1_TO_FP16,
    O1_TO_FP32,
    O1_WIDEST,
)


def _names(table: dict[str, tuple[str, ...]]) -> list[str]:
    return [name for names in table.values() for name in names]


@pytest.mark.parametrize("name", LEVELS)
def test_levels_are_those_of_the_engine(name: str) -> None:
    """Each option of each level is what `amp.initialize` settles."""
    level = LEVELS[name]
    for option, value in opt_levels[name].options.items():
        ours: Any = getattr(level, option)
        if option == "cast_model_type" and ours is not None:
            ours = getattr(torch, ours)
        assert ours == value, option
    settled = Properties()
    opt_levels[name](settled)
    assert getattr(torch, level.half_dtype) is settled.half_dtype


@pytest.mark.parametrize(
    ("table", "lists"),
    [
        (O1_TO_FP16, ("FP16_FUNCS",)),
        (O1_TO_FP32, ("FP32_FUNCS",)),
        (O1_WIDEST, ("CASTS", "SEQUENCE_CASTS")),
    ],
)
def test_casts_are_those_of_the_engine(table: dict[str, tuple[str, ...]], lists: tuple[str, ...]) -> None:
    """Every name that O1 casts is in the table, once, and no other."""
    modules = (functional_overrides, torch_overrides, tensor_overrides)
    real = {name for module in modules for which in lists for name in getattr(module, which, ())}
    optional = {"__div__", "__idiv__", "__rdiv__"}  # names of Python 2, which torch may still define
    assert set(_names(table)) - optional == real - optional
    assert len(_names(table)) == len(set(_names(table)))


def test_what_autocast_does_otherwise() -> None:
    """torch's own lists for CUDA, as its header has them, agree with the differences that are told."""
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    if not header.is_file():
        pytest.skip("this torch comes without its headers")
    text = header.read_text()
    lists = {
        name: set(re.findall(r"_\(\s*(\w+)", body))
        for name, body in re.findall(r"#define (AT_FORALL_\w+)\(_\)((?:.*\\\n)*.*\n)", text)
    }
    fp32 = lists["AT_FORALL_FP32"] | lists["AT_FORALL_FP32_SET_OPT_DTYPE"]
    everything = set.union(*(names for name, names in lists.items() if "LOWER_PRECISION" in name or "FP32" in name))
    assert {"log1p", "logsumexp", "cdist", "softmax"} <= fp32
    assert not {"gelu", "std", "var"} & everything
    assert not {"log1p", "logsumexp", "cdist"} & set(_names(O1_TO_FP32))
    assert {"gelu", "std", "var", "cpu"} <= set(_names(O1_TO_FP32))
