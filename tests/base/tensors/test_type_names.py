"""Types of numbers by name, and which have 16 bits: one place says so."""

import re
from pathlib import Path

import pytest
import torch

from ampcompare.base.tensors import type_names
from ampcompare.base.tensors.products import HALF_DTYPES, dtype_name
from ampcompare.base.tensors.tree import widen_halves

PACKAGE = Path(type_names.__file__).parents[2]
HALVES = re.compile(r"""[({\[]\s*(?:"fp16",\s*"bf16"|torch\.float16,\s*torch\.bfloat16),?\s*[)}\]]""")


@pytest.mark.parametrize(
    ("names", "narrowest"), [({"fp32", "bf16"}, "bf16"), ({"bf16", "fp16", "fp8"}, "fp8"), ({"int8"}, "")]
)
def test_the_narrowest(names: set[str], narrowest: str) -> None:
    assert type_names.narrowest_of_type_names(names) == narrowest


def test_names_of_torch() -> None:
    assert [dtype_name(dtype) for dtype in HALF_DTYPES] == list(type_names.HALF_NAMES)
    assert dtype_name(torch.float64) == "fp64"


def test_halves_are_widened_and_others_are_the_same_objects() -> None:
    wide, whole = torch.ones(2), torch.ones(2, dtype=torch.int64)
    found = widen_halves({"a": [torch.ones(1).half(), wide], "b": (torch.ones(1).bfloat16(), whole)})
    assert found["a"][0].dtype is torch.float32
    assert found["b"][0].dtype is torch.float32
    assert found["a"][1] is wide
    assert found["b"][1] is whole


def test_no_other_file_lists_the_16_bit_types() -> None:
    """Apex's engine has a list of its own, and one step of a replay runs where no ampcompare is."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        own = path.relative_to(PACKAGE)
        if own.parts[0] == "apex" or own.parts[:2] == ("base", "tensors") or own.name == "one_step.py":
            continue
        found += [f"{own}: {text}" for text in HALVES.findall(path.read_text(encoding="utf-8"))]
    assert not found, "use HALF_NAMES or HALF_DTYPES"
