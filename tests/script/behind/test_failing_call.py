"""Types that a failing call got, by its expression."""

import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

from ampcompare.script.behind.failing_call import GivenTypes, find_types_given_to_failing_call

HALF, FP32 = torch.float16, torch.float32
FRAME = """
    import torch

    def call(h, x, net):
        table = {"one": h}
        EXPRESSION
"""


def _given(folder: Path, expression: str) -> GivenTypes | None:
    source = textwrap.dedent(FRAME).replace("EXPRESSION", expression)
    file = folder / "train.py"
    file.write_text(source)
    names: dict[str, object] = {"__name__": "train"}
    exec(compile(source, str(file), "exec"), names)
    net = nn.Linear(2, 2)
    net.register_buffer("mean", torch.ones(2))
    with pytest.raises((RuntimeError, TypeError)) as raised:
        names["call"](torch.ones(2, dtype=HALF), torch.ones(2), net)  # type: ignore[operator]
    return find_types_given_to_failing_call(raised.value.__traceback__.tb_next)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("expression", "types"),
    [
        ("torch.quantile(h.abs(), 0.5)", {HALF}),
        ("torch.quantile((h * 2)[None], 0.5,\n                   dim=-1)", {HALF}),
        ("h.view(-1).quantile(\n            0.5)", {HALF}),
        ("(h\n         .quantile(0.5))", {HALF}),
        ("torch.quantile(table['one'], 0.5)", {HALF}),
        ("torch.dot(h, x)", {HALF, FP32}),
        ("torch.dot(h, net.mean)", {HALF, FP32}),
        ("torch.dot(h, h.float())", {HALF, FP32}),
        ("torch.dot(*(h, x))", {HALF, FP32}),
        ("h @ x", {HALF, FP32}),
        ("(h + x) @ h", {HALF, FP32}),
        ("h[[0, 1]] = 'a'", {HALF}),
        ("torch.dot(h, torch.ones(2))", None),
        ("torch.dot(h, h.to(torch.float32))", None),
        ("raise TypeError", None),
    ],
)
def test_types_are_those_of_the_operands(
    tmp_path: Path, expression: str, types: set[torch.dtype] | None
) -> None:
    """Of names, attributes and methods that keep or name a type; None where one is not known, or there is none."""
    given = _given(tmp_path, expression)
    assert (given.types if given and given.is_complete else None) == (types and frozenset(types))
