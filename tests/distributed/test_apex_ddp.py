"""Gradients under Apex's DistributedDataParallel on gloo: every option, accumulation, unused parameters, groups."""

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ampcompare.apex.parallel import DistributedDataParallel as DDP
from tests.distributed.two_layers import Net, assert_grads, batch, local_grads, mean_over_ranks

OPTIONS: list[dict[str, Any]] = [
    {},
    {"message_size": 1},
    {"message_size": 20},
    {"delay_allreduce": True},
    {"gradient_average": False},
    {"gradient_predivide_factor": 2.0},
    {"gradient_predivide_factor": 4.0, "gradient_average": False, "delay_allreduce": True},
    {"allreduce_always_fp32": True, "message_size": 20},
    {"retain_allreduce_buffers": True, "message_size": 20},
    {"retain_allreduce_buffers": True, "allreduce_always_fp32": True, "delay_allreduce": True},
    {"num_allreduce_streams": 3, "prof": True, "gradient_average_split_factor": 2.0},
]


# Every option in fp32, and those that look at types in the others.
TYPED = [(torch.float32, options) for options in OPTIONS]
TYPED += itertools.product(
    (torch.float64, torch.bfloat16, torch.float16), [OPTIONS[index] for index in (0, 6, 7, 9)]
)


def reduces_with_every_option() -> None:
    for dtype, options in TYPED:
        model = DDP(Net(dtype), **options)
        factor = 1.0
        if not options.get("gradient_average", True):
            factor = dist.get_world_size() / options.get("gradient_predivide_factor", 1.0)
        for step in range(3):
            expected = [grad * factor for grad in mean_over_ranks(model.module, step)]  # type: ignore[operator]
            model.zero_grad()
            model(batch(step, dtype=dtype)).square().sum().backward()
            assert_grads(
                model.module, expected, rtol={torch.float16: 2e-2, torch.bfloat16: 1e-1}.get(dtype, 1e-6)
            )
            if options.get("retain_allreduce_buffers"):
                buffers = [buffer for buffer in model.allreduce_buffers if buffer is not None]
                assert sum(buffer.numel() for buffer in buffers) == sum(p.numel() for p in model.parameters())
                storages = {buffer.untyped_storage().data_ptr() for buffer in buffers}
                assert {p.grad.untyped_storage().data_ptr() for p in model.parameters()} == storages  # type: ignore[union-attr]
                assert all(buffer.dtype is dtype for buffer in buffers)
            else:
                assert model.allreduce_buffers == []


def tolerates_unused() -> None:
    """Use layers in changing, rank-dependent sets, and none on all ranks."""
    for options in ({"message_size": 1}, {}, {"delay_allreduce": True}, {"retain_allreduce_buffers": True}):
        model = DDP(Net(), **options)
        sets = [
            ["first", "first"],
            ["both", "second"],
            ["second", "second"],
            ["first", "second"],
            ["both", "both"],
        ]
        for step, uses in enumerate(sets):
            expected = mean_over_ranks(model.module, step, uses)
            model.zero_grad()
            model(batch(step), use=uses[dist.get_rank()]).square().sum().backward()
            assert_grads(model.module, expected)


def note_accumulation() -> None:
    for by_context in (False, True):
        model = DDP(Net(), message_size=1)
        for repeat in range(2):
            model.zero_grad()
            parts = [mean_over_ranks(model.module, 10 * repeat + step) for step in range(3)]
            expected = [sum(column) for column in zip(*parts, strict=True)]  # type: ignore[arg-type]
            if by_context:
                with model.no_sync():
                    for step in range(2):
                        model(batch(10 * repeat + step)).square().sum().backward()
            else:
                model.disable_allreduce()
                for step in range(2):
                    model(batch(10 * repeat + step)).square().sum().backward()
                model.enable_allreduce()
            assert_grads(
                model.module,
                [
                    sum(c)
                    for c in zip(
                        *[local_grads(model.module, batch(10 * repeat + s)) for s in range(2)], strict=True
                    )
                ],
            )
            model(batch(10 * repeat + 2)).square().sum().backward()
            assert_grads(model.module, expected)
        # With the reduction on, averages of averages are the same.
        model.zero_grad()
        for step in range(3):
            model(batch(step)).square().sum().backward()
        parts = [mean_over_ranks(model.module, step) for step in range(3)]
        assert_grads(model.module, [sum(column) for column in zip(*parts, strict=True)])  # type: ignore[arg-type]


def reduces_every_backward() -> None:
    """Go backward twice for one forward, through the inner module, and after two forwards."""
    for options in ({"message_size": 1}, {"delay_allreduce": True}):
        model = DDP(Net(), **options)
        for step in range(3):
            once = mean_over_ranks(model.module, step)
            model.zero_grad()
            loss = model(batch(step)).square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
            assert_grads(model.module, [2 * grad for grad in once])  # type: ignore[operator]
            model.zero_grad()
            model.module(batch(step)).square().sum().backward()
            assert_grads(model.module, once)
            model.zero_grad()
            (model(batch(step)).square().sum() + model(batch(step)).square().sum()).backward()
            assert_grads(model.module, [2 * grad for grad in once])  # type: ignore[operator]
            with torch.no_grad():
                model(batch(step))
            penalty = torch.autograd.grad(
                model(batch(step).requires_grad_()).sum(), model.module.first.weight
            )
            assert len(penalty) == 1
            assert_grads(model.module, [2 * grad for grad in once])  # type: ignore[operator]


def supports_reentrant_checkpoints() -> None:
    class Deep(nn.Module):
        def __init__(self, shared: bool) -> None:
            super().__init__()
            self.head = nn.Linear(4, 4)
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
            self.tail = nn.Linear(4, 2)
            self.shared = shared

        def forward(self, x: Tensor, plain: bool = False) -> dict[str, Tensor]:
            x = self.head(x)
            for block in self.blocks:
                layer = self.blocks[0] if self.shared else block
                x = (
                    layer(x).tanh()
                    if plain
                    else checkpoint(lambda y, m=layer: m(y).tanh(), x, use_reentrant=True)
                )
            return {"logits": self.tail(x)}

    for shared in (False, True):
        model = DDP(Deep(shared), message_size=1)
        for step in range(3):
            expected: list[Any] = [0.0] * len(list(model.parameters()))
            for rank in range(dist.get_world_size()):
                twin = copy.deepcopy(model.module)
                twin.zero_grad()
                twin(batch(step, rank), plain=True)["logits"].square().sum().backward()
                for i, param in enumerate(twin.parameters()):
                    expected[i] = (
                        None if param.grad is None else expected[i] + param.grad / dist.get_world_size()
                    )
            model.zero_grad()
            model(batch(step))["logits"].square().sum().backward()
            assert_grads(model.module, expected)


def works_in_pairs() -> list[float]:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    torch.manual_seed(dist.get_rank())
    model = DDP(nn.Linear(1, 1, bias=False), process_group=pairs[dist.get_rank() // 2])
    values = [model.module.weight.item()]
    for _ in range(2):
        model.zero_grad()
        model(torch.tensor([[float(dist.get_rank())]])).sum().backward()
        values.append(model.module.weight.grad.item())
    return values


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(reduces_with_every_option, marks=pytest.mark.slow),
        tolerates_unused,
        note_accumulation,
        reduces_every_backward,
        supports_reentrant_checkpoints,
    ],
    ids=lambda function: function.__name__,
)
def test_two_ranks(ranks: Any, function: Any) -> None:
    """Gradients are the average of what both ranks have on their own, or the error is the one expected."""
    ranks(2, function)


def test_pairs_of_four_ranks(ranks: Any) -> None:
    """Each pair averages its own gradients, from its own first rank's weights."""
    values = ranks(4, works_in_pairs)
    assert [row[1:] for row in values] == [[0.5, 0.5], [0.5, 0.5], [2.5, 2.5], [2.5, 2.5]]
    assert values[0][0] == values[1][0] != values[2][0] == values[3][0]
