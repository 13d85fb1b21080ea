"""Amp on two ranks under Apex's wrapper: skips and accumulation; and `Reducer`."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ampcompare.apex import amp
from ampcompare.apex.parallel import DistributedDataParallel, Reducer
from ampcompare.apex.parallel.distributed import flat_dist_call


def network() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def everywhere(value: Tensor) -> list[Tensor]:
    values = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(values, value.contiguous())
    return values


def assert_equal_on_all_ranks(tensors: Any) -> None:
    for tensor in tensors:
        first, *others = everywhere(tensor.detach())
        assert all(torch.equal(first, other) for other in others)


def skips_together(level: str) -> tuple[list[float], list[bool]]:
    """Overflow on rank 1 only, in the second of three steps."""
    model: Any = network()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale="dynamic")
    model = DistributedDataParallel(model, message_size=1)
    scales, moved = [], []
    for step in range(3):
        before = [param.detach().clone() for param in model.parameters()]
        optimizer.zero_grad()
        loss = model(torch.full((4, 6), 0.1)).float().square().mean()
        if step == 1 and dist.get_rank() == 1:
            loss = loss * float("inf")
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        scales.append(amp._amp_state.loss_scalers[0].loss_scale())
        moved.append(any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)))
    assert_equal_on_all_ranks(model.parameters())
    return scales, moved


def accumulates_with_delay(level: str) -> float:
    """Return the largest difference between accumulated halves and one whole batch, of the updates."""
    generator = torch.Generator().manual_seed(11 + dist.get_rank())
    x, y = torch.randn(4, 6, generator=generator), torch.randint(0, 3, (4,), generator=generator)
    results = []
    for parts in (1, 2):
        model: Any = network()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=128.0)
        model = DistributedDataParallel(model)
        optimizer.zero_grad()
        for i, (inputs, targets) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True)):
            last = i == parts - 1
            (model.enable_allreduce if last else model.disable_allreduce)()
            loss = nn.functional.cross_entropy(model(inputs).float(), targets) / parts
            with amp.scale_loss(loss, optimizer, delay_unscale=not last) as scaled:
                scaled.backward()
        optimizer.step()
        assert_equal_on_all_ranks(model.parameters())
        results.append(
            torch.cat([param.detach().float().flatten() for param in amp.master_params(optimizer)])
        )
        amp._amp_state.close()
    return (results[0] - results[1]).abs().max().item()


def reduces_on_demand() -> None:
    torch.manual_seed(dist.get_rank())
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.bfloat16), nn.Linear(2, 2))
    reducer = Reducer(module)
    assert_equal_on_all_ranks(module.parameters())
    for i, param in enumerate(list(module.parameters())[:4]):
        # The last parameter of the four has a gradient on one rank only.
        if i < 3 or dist.get_rank() == 1:
            param.grad = torch.full_like(param, float(i + dist.get_rank()))
    reducer.reduce()
    found = [None if p.grad is None else p.grad.unique().tolist() for p in module.parameters()]
    assert found == [[0.5], [1.5], [2.5], [2.0], None, None]
    tensors = [
        torch.full((2,), float(dist.get_rank())),
        [torch.full((3,), 4.0 * dist.get_rank(), dtype=torch.float64)],
    ]
    Reducer(tensors).reduce()
    assert tensors[0].tolist() == [0.5, 0.5]  # type: ignore[attr-defined]
    assert tensors[1][0].tolist() == [2.0] * 3
    for call, arguments in ((dist.broadcast, (0,)), (dist.all_reduce, ())):
        flat_dist_call([tensors[0]], call, arguments)
        assert tensors[0].tolist() == [0.5, 0.5]  # type: ignore[attr-defined]


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_all_ranks_skip_together(ranks: Any, level: str) -> None:
    first, second = ranks(2, skips_together, level=level)
    assert first == second
    scales, moved = first
    assert moved == [True, False, True]
    assert scales[1] == scales[0] / 2 == scales[2]


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_accumulation_equals_one_batch(ranks: Any, level: str) -> None:
    """Two micro-batches with the reduction and the unscaling on the last only update as one batch does."""
    for difference in ranks(2, accumulates_with_delay, level=level):
        assert difference <= (1e-7 if level == "O0" else 2e-4)


def test_reducer(ranks: Any) -> None:
    ranks(2, reduces_on_demand)
