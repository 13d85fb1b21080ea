"""The type in which gradients are averaged over ranks, and gradients that add up in fp32, on two gloo ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

from ampcompare.training.parallel.replication import DDP
from ampcompare.training.precision.base import make_precision

# Slopes of one weight, per rank: bf16 holds each of them, and neither their mean, 129.5, nor twice that.
SLOPES = (256.0, 3.0)


def averaged(arm: str, micro_batches: int) -> list[float]:
    """The gradient that an arm steps with, on this rank, after some micro-batches, the last of them reduced."""
    torch.manual_seed(0)
    precision = make_precision(arm)
    layer = nn.Linear(1, 1, bias=False)
    (model,), (optimizer,) = precision.prepare([layer], [SGD(layer.parameters(), lr=0.1)])
    parallel = DDP(torch.device("cpu"))
    wrapped = parallel.wrap(model)
    x = torch.full((1, 1), SLOPES[dist.get_rank()])
    for _ in range(micro_batches - 1):
        with parallel.no_sync([wrapped]), precision.autocast():
            loss = wrapped(x).float().sum()
        with parallel.no_sync([wrapped]):
            precision.backward(loss, [optimizer], delay_unscale=True)
    with precision.autocast():
        loss = wrapped(x).float().sum()
    precision.backward(loss, [optimizer])
    (param,) = precision.unscale(optimizer)
    assert param.grad is not None
    return [param.grad.item(), float(param.dtype is torch.float32)]


def every_arm() -> dict[str, list[float]]:
    """The gradients of all arms that the test looks at, with the number of their micro-batches."""
    arms = {
        "native:bf16": 1,
        "native:bf16,reduce=bf16": 1,
        "half:bf16": 1,
        "half:bf16,reduce=fp32": 1,
        "half:bf16,masters=fp32": 2,
        "half:bf16,masters=fp32,grads=fp32": 2,
    }
    return {arm: averaged(arm, count) for arm, count in arms.items()}


def rounded_weights() -> list[float]:
    """The weights after a few steps with stochastic rounding, on ranks whose own generators have other seeds."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 1, bias=False)
    torch.manual_seed(100 + dist.get_rank())
    precision = make_precision("half:bf16,rounding=stochastic")
    (model,), (optimizer,) = precision.prepare([layer], [SGD(layer.parameters(), lr=1e-5)])
    wrapped = DDP(torch.device("cpu")).wrap(model)
    for _ in range(3):
        precision.backward(wrapped(torch.ones(1, 64)).sum(), [optimizer])
        precision.step(optimizer)
        optimizer.zero_grad()
    weights: list[float] = layer.weight.detach().flatten().tolist()
    return weights


def test_ranks_round_alike_at_random(ranks: Any) -> None:
    """Equal gradients leave equal weights on all ranks, though each was seeded by its number."""
    first, second = ranks(2, rounded_weights)
    assert first == second
    torch.manual_seed(0)
    start = nn.Linear(64, 1, bias=False).weight.detach().bfloat16().flatten().tolist()
    # by chance, some moved
    assert 0 < sum(one != other for one, other in zip(first, start, strict=True)) < 64


def test_gradients_are_averaged_in_the_type_that_is_asked_for(ranks: Any) -> None:
    """From 128 on bf16 has whole numbers only, from 256 on even ones: a mean of 129.5, and twice that, show the type.

    With `grads=fp32` the first micro-batch is averaged in fp32, and the last one by DDP in bf16.
    """
    first, second = ranks(2, every_arm)
    assert first == second  # ranks stay equal
    assert {arm: value for arm, (value, is_fp32) in first.items() if is_fp32}.keys() == {
        arm for arm in first if arm.partition(",")[0] != "half:bf16" or "masters" in arm
    }
    found = {arm: value for arm, (value, _) in first.items()}
    assert found["native:bf16"] == 129.5
    assert found["native:bf16,reduce=bf16"] in (129, 130)
    assert found["half:bf16"] in (129, 130)
    # its gradients are bf16: rounded once, after the mean
    assert found["half:bf16,reduce=fp32"] in (129, 130)
    assert found["half:bf16,masters=fp32"] in (258, 260)
    assert abs(found["half:bf16,masters=fp32,grads=fp32"] - 259) == 0.5
