"""Training on two ranks: opt levels under both wrappers, skips, equality with one process, and Apex's own scenarios."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ampcompare.apex import amp
from ampcompare.apex.parallel import DistributedDataParallel, Reducer, convert_syncbn_model
from ampcompare.apex.parallel.distributed import flat_dist_call
from ampcompare.base.errors import PreparationError
from tests.covering import covering

WRAPPERS: dict[str, Any] = {"apex": DistributedDataParallel, "torch": nn.parallel.DistributedDataParallel}


def network(norm: bool = True) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(6, 8), *([nn.BatchNorm1d(8)] if norm else []), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)
    )


def data(steps: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(steps, size, 6, generator=generator)
    return x, torch.randint(0, 3, (steps, size), generator=generator)


def everywhere(value: Tensor) -> list[Tensor]:
    values = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(values, value.contiguous())
    return values


def assert_equal_on_all_ranks(tensors: Any) -> None:
    for tensor in tensors:
        first, *others = everywhere(tensor.detach())
        assert all(torch.equal(first, other) for other in others)


def trains(level: str, wrapper: str, sync: bool) -> list[float]:
    """Train with dynamic scaling from 2^17, and return the losses."""
    torch.manual_seed(dist.get_rank())
    model = network() if wrapper == "torch" else nn.Sequential(network(), nn.Linear(3, 3))
    if sync:
        model = convert_syncbn_model(model)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale="dynamic")
    model = WRAPPERS[wrapper](model)
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(16, 6, generator=generator)
    y = torch.randint(0, 3, (16,), generator=generator)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x).float(), y)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
    assert_equal_on_all_ranks(model.parameters())
    assert_equal_on_all_ranks(amp.master_params(optimizer))
    scales = everywhere(torch.tensor(amp._amp_state.loss_scalers[0].loss_scale()))
    assert scales[0] == scales[1]
    if sync:
        assert_equal_on_all_ranks(buffer for name, buffer in model.named_buffers() if "running" in name)
    return losses


def skips_together(level: str) -> tuple[list[float], list[bool]]:
    """Overflow on rank 1 only, in the second of three steps."""
    model: Any = network(norm=False)
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
    x, y = data(1, 8)
    x, y = x[0].chunk(2)[dist.get_rank()], y[0].chunk(2)[dist.get_rank()]
    results = []
    for parts in (1, 2):
        model: Any = network(norm=False)
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
        results.append(torch.cat([param.detach().float().flatten() for param in amp.master_params(optimizer)]))
        amp._amp_state.close()
    return (results[0] - results[1]).abs().max().item()


def refuses_a_wrapped_model() -> None:
    model = DistributedDataParallel(network())
    with pytest.raises(PreparationError, match="AFTER"):
        amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2", verbosity=0)


def equals_one_process(norm: bool, options: dict[str, Any]) -> float:
    """Train ten updates on halves of the batch and on the whole; return the relative norm of the difference."""
    x, y = data(10, 16)
    whole = network(norm)
    ours: nn.Module = DistributedDataParallel(convert_syncbn_model(network(norm)), **options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4) for m in (whole, ours)]
    # Uneven halves need weights; a batch norm over uneven halves is tested for itself.
    for step in range(10):
        rank = dist.get_rank()
        for model, optimizer, part in (
            (whole, optimizers[0], slice(None)),
            (ours, optimizers[1], slice(8 * rank, 8 * rank + 8)),
        ):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[step, part]), y[step, part]).backward()
            optimizer.step()
    assert_equal_on_all_ranks(ours.parameters())
    expected, got = (torch.cat([v.detach().double().flatten() for v in m.state_dict().values()]) for m in (whole, ours))
    return ((expected - got).norm() / expected.norm()).item()


def averages_different_batches() -> None:
    """Train a conv net with SyncBN on 16 and 8 images under torch's wrapper; compare with all 24 on one rank."""
    torch.manual_seed(3)
    whole = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3))
    part = nn.parallel.DistributedDataParallel(convert_syncbn_model(copy.deepcopy(whole)))
    x = torch.randn(24, 3, 8, 8, generator=torch.Generator().manual_seed(5))
    own = x[:16] if dist.get_rank() == 0 else x[16:]
    expected = whole(x)
    expected.square().sum().backward()
    got = part(own)
    # torch's wrapper averages; the loss is a sum.
    (got.square().sum() * dist.get_world_size()).backward()
    torch.testing.assert_close(got, expected[:16] if dist.get_rank() == 0 else expected[16:], atol=1e-5, rtol=1e-4)
    for ours, reference in zip(part.parameters(), whole.parameters(), strict=True):
        assert reference.grad is not None
        scale = reference.grad.abs().max().item() + 1.0
        torch.testing.assert_close(ours.grad, reference.grad, atol=1e-5 * scale, rtol=1e-4)
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(getattr(part.module[1], name), getattr(whole[1], name), atol=1e-5, rtol=1e-5)


def races() -> None:
    """Reduce two large parameters in three streams with the smallest buckets; sums must be exact each time."""
    size = 1 << 18

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.full((size,), 1.0))
            self.b = nn.Parameter(torch.full((size,), 2.0))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.a) * self.b

    module = Pair()
    model = DistributedDataParallel(
        module, message_size=1, allreduce_trigger_params=[module.b], num_allreduce_streams=3
    )
    x = torch.empty(size)
    for step in range(10):
        model.zero_grad()
        model(x.fill_(float(step + dist.get_rank()))).sum().backward()
        mean = step + 0.5
        assert module.a.grad is not None
        assert module.b.grad is not None
        assert bool((module.a.grad == 2.0 * mean).all())
        assert bool((module.b.grad == mean).all())


def keeps_master_params_equal() -> None:
    """Train under O2 from rank-dependent seeds; weights and masters agree between ranks and with each other."""
    torch.manual_seed(100 + dist.get_rank())
    model: Any = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 8))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-2)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    model = DistributedDataParallel(model)
    x, y = torch.randn(16, 32), torch.randn(16, 8)
    for _ in range(60):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x).float(), y)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    masters = list(amp.master_params(optimizer))
    assert_equal_on_all_ranks(model.parameters())
    assert_equal_on_all_ranks(masters)
    for half, master in zip(model.parameters(), masters, strict=True):
        assert (half.dtype, master.dtype) == (torch.float16, torch.float32)
        assert torch.equal(half, master.half())


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
    tensors = [torch.full((2,), float(dist.get_rank())), [torch.full((3,), 4.0 * dist.get_rank(), dtype=torch.float64)]]
    Reducer(tensors).reduce()
    assert tensors[0].tolist() == [0.5, 0.5]  # type: ignore[attr-defined]
    assert tensors[1][0].tolist() == [2.0] * 3
    for call, arguments in ((dist.broadcast, (0,)), (dist.all_reduce, ())):
        flat_dist_call([tensors[0]], call, arguments)
        assert tensors[0].tolist() == [0.5, 0.5]  # type: ignore[attr-defined]


@covering({"level": ["O0", "O1", "O2", "O3"], "wrapper": ["apex", "torch"], "sync": [False, True]})
def test_every_level_trains_under_both_wrappers(ranks: Any, level: str, wrapper: str, sync: bool) -> None:
    """Losses fall, and weights, masters and loss scales are equal on all ranks at the end."""
    for losses in ranks(2, trains, level=level, wrapper=wrapper, sync=sync):
        assert losses[-1] < losses[0]


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


def test_wrapped_models_are_refused(ranks: Any) -> None:
    """`amp.initialize` refuses a model inside our wrapper, which has recorded its dtypes."""
    ranks(2, refuses_a_wrapped_model)


@pytest.mark.parametrize(
    ("norm", "options", "limit"),
    [
        (False, {}, 1e-6),
        (False, {"message_size": 1}, 1e-6),
        (False, {"delay_allreduce": True, "gradient_predivide_factor": 2.0}, 1e-6),
        (True, {}, 1e-5),
        (True, {"message_size": 1}, 1e-5),
    ],
)
def test_two_halves_equal_one_whole(ranks: Any, norm: bool, options: dict[str, Any], limit: float) -> None:
    """Ten updates of two ranks with half the batch equal those of one process with the whole batch."""
    for difference in ranks(2, equals_one_process, norm=norm, options=options):
        assert difference <= limit


@pytest.mark.parametrize(
    "function",
    [averages_different_batches, races, keeps_master_params_equal, reduces_on_demand],
    ids=lambda function: function.__name__,
)
def test_scenarios_of_apex(ranks: Any, function: Any) -> None:
    ranks(2, function)
