"""The tables of `explain` as operations of torch."""

from __future__ import annotations

import torch

from ampcompare.diagnosis.diagnose import in_fp32, in_half


def test_products_are_in_half() -> None:
    """Every kind of product of the table is found by what torch runs for it."""
    assert {"mm", "addmm", "bmm", "convolution"} <= set(in_half("cpu"))


def test_functions_in_fp32_are_those_of_the_arm() -> None:
    """O1 casts exp and softmax to fp32, autocast on a CPU neither; operations of other functions are left out."""
    of_o1, of_autocast = in_fp32("cpu", None), in_fp32("cpu", torch.bfloat16)
    assert of_o1["_softmax"] == "softmax"
    assert {"exp", "cumsum", "mse_loss"} <= set(of_o1)
    assert "mse_loss" in of_autocast
    assert not {"exp", "_softmax"} & set(of_autocast)
    assert not {"mul", "pow"} & set(of_o1)
