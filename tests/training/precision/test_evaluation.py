"""Models in a precision that they are evaluated in."""

from __future__ import annotations

import torch
from torch import nn

from ampcompare.training.precision.base import Precision
from ampcompare.training.precision.evaluation import EvaluationPrecision

CPU = torch.device("cpu")


def test_a_cast_reaches_weights_inputs_and_outputs() -> None:
    """A model in float64 computes in it, buffers too, and hands on fp32."""
    other = EvaluationPrecision("float64", CPU, outside=Precision())
    seen: list[torch.dtype] = []
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()
    model[1].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    (cast,), _ = other.prepare([model], [])
    assert cast(torch.ones(3, 2)).dtype is torch.float32
    assert seen == [torch.float64]
    assert (other.mode, other.half_dtype) == (None, None)


def test_autocast_leaves_the_weights() -> None:
    """Under autocast the weights stay in fp32 and products come out in 16 bits; outside of it nothing is cast."""
    other = EvaluationPrecision("autocast:bf16", CPU, outside=Precision())
    (model,), _ = other.prepare([nn.Linear(2, 2)], [])
    with other.autocast():
        inside = model(torch.ones(1, 2)).dtype
    assert (model.weight.dtype, inside, model(torch.ones(1, 2)).dtype) == (torch.float32, torch.bfloat16, torch.float32)
    assert other.half_dtype is torch.bfloat16
