"""Apex's DistributedDataParallel on gloo: options, order, accumulation, unused parameters, and what breaks it."""

from __future__ import annotations

import copy
import io
import itertools
import os
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ampcompare.apex import DeprecatedFeatureWarning
from ampcompare.apex.parallel import DistributedDataParallel as DDP
from ampcompare.errors import AmpCompareError, PreparationError

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
    {"num_allreduce_streams": 3, "message_size": 1},
    {"prof": True},
    {"gradient_average_split_factor": 2.0},
]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


class Net(nn.Module):
    """Two linear layers, of which each can be left out of a forward pass."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3, dtype=dtype)
        self.second = nn.Linear(4, 3, dtype=dtype)

    def forward(self, x: Tensor, use: str = "both") -> Tensor:
        out = x.new_zeros(x.size(0), 3)
        if use in ("both", "first"):
            out = out + self.first(x)
        if use in ("both", "second"):
            out = out + self.second(x)
        return out


def batch(step: int, rank: int | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + (dist.get_rank() if rank is None else rank))
    return torch.randn(2, 4, generator=generator, dtype=torch.float64).to(dtype)


def local_grads(module: nn.Module, x: Tensor, **arguments: Any) -> list[Tensor | None]:
    """Return the gradients that `module` has on its own."""
    twin = copy.deepcopy(module)
    twin.zero_grad()
    twin(x, **arguments).square().sum().backward()
    return [param.grad for param in twin.parameters()]


def grads(module: nn.Module) -> list[Tensor | None]:
    return [None if param.grad is None else param.grad.clone() for param in module.parameters()]


def assert_grads(module: nn.Module, expected: list[Any], rtol: float = 1e-6) -> None:
    for param, grad in zip(module.parameters(), expected, strict=True):
        if grad is None:
            assert param.grad is None
        else:
            assert param.grad is not None
            torch.testing.assert_close(param.grad, grad.to(param.dtype), rtol=rtol, atol=rtol)


def mean_over_ranks(module: nn.Module, step: int, uses: list[str] | None = None) -> list[Tensor | None]:
    """Return the average of all ranks' own gradients, those that a rank lacks counting as zero."""
    world = dist.get_world_size()
    per_rank = [
        local_grads(module, batch(step, rank, next(module.parameters()).dtype), use=uses[rank] if uses else "both")
        for rank in range(world)
    ]
    result: list[Tensor | None] = []
    for column in zip(*per_rank, strict=True):
        there = [grad.double() for grad in column if grad is not None]
        result.append(sum(there) / world if there else None)  # type: ignore[arg-type]
    return result


def reduces_with_every_option() -> None:
    for dtype, options in itertools.product(DTYPES, OPTIONS):
        model = DDP(Net(dtype), **options)
        factor = 1.0
        if not options.get("gradient_average", True):
            factor = dist.get_world_size() / options.get("gradient_predivide_factor", 1.0)
        for step in range(3):
            expected = [grad * factor for grad in mean_over_ranks(model.module, step)]  # type: ignore[operator]
            model.zero_grad()
            model(batch(step, dtype=dtype)).square().sum().backward()
            assert_grads(model.module, expected, rtol={torch.float16: 2e-2, torch.bfloat16: 1e-1}.get(dtype, 1e-6))
            if options.get("retain_allreduce_buffers"):
                buffers = [buffer for buffer in model.allreduce_buffers if buffer is not None]
                assert sum(buffer.numel() for buffer in buffers) == sum(p.numel() for p in model.parameters())
                storages = {buffer.untyped_storage().data_ptr() for buffer in buffers}
                assert {p.grad.untyped_storage().data_ptr() for p in model.parameters()} == storages  # type: ignore[union-attr]
                assert all(buffer.dtype is dtype for buffer in buffers)
            else:
                assert model.allreduce_buffers == []


def broadcasts_state() -> list[Any]:
    values = []
    for strict in ("0", "1"):
        os.environ["AMPCOMPARE_APEX_STRICT"] = strict
        torch.manual_seed(dist.get_rank())
        norm = nn.BatchNorm1d(3)
        norm.register_buffer("flags", torch.tensor([dist.get_rank() == 0]))
        with torch.no_grad():
            norm.weight.normal_()
            norm.running_mean.fill_(dist.get_rank())  # type: ignore[union-attr]
        model = DDP(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, dtype=torch.bfloat16), norm))
        assert next(iter(model.state_dict())) == "module.0.weight"
        values.append({name: value.clone() for name, value in model.state_dict().items()})
    return values


def records_arrival_order() -> dict[str, list[list[str]]]:
    result = {}
    layers = [nn.Linear(4, 4) for _ in range(3)]
    for name, options in {
        "small": {"message_size": 1},
        "pairs": {"message_size": 24},
        "trigger": {"allreduce_trigger_params": [layers[1].weight], "message_size": 1},
    }.items():
        model = DDP(nn.Sequential(*layers), **options)
        assert model.needs_refresh
        for _ in range(2):
            model(torch.randn(2, 4)).sum().backward()
        assert not model.needs_refresh
        names = {id(param): name for name, param in model.module.named_parameters()}
        buckets = model._synchronizer.buckets
        assert buckets is not None
        result[name] = [[names[id(param)] for param in bucket.params] for bucket in buckets]
    return result


def overlaps_on_the_host() -> list[int]:
    sizes = []
    for options, strict in (({}, "0"), ({}, "1"), ({"message_size": 100_000_000}, "0")):
        os.environ["AMPCOMPARE_APEX_STRICT"] = strict
        model = DDP(nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)), **options)
        model(torch.randn(2, 512)).sum().backward()
        assert model._synchronizer.buckets is not None
        sizes.append(len(model._synchronizer.buckets))
    return sizes


def follows_rank_0() -> list[list[int]]:
    """Let ranks use their layers in different order in the first pass."""
    left, right = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    order = [left, right] if dist.get_rank() == 0 else [right, left]

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = left, right

        def forward(self, x: Tensor) -> Tensor:
            for layer in order:
                x = layer(x)
            return x

    model = DDP(Chain(), message_size=1)
    for step in range(3):
        model.zero_grad()
        model(batch(step)).sum().backward()
    assert model._synchronizer.buckets is not None
    ids = [id(left.weight), id(right.weight)]
    return [[ids.index(id(param)) for param in bucket.params] for bucket in model._synchronizer.buckets]


def tolerates_unused() -> None:
    """Use layers in changing, rank-dependent sets, and none on all ranks."""
    for options in ({"message_size": 1}, {}, {"delay_allreduce": True}, {"retain_allreduce_buffers": True}):
        model = DDP(Net(), **options)
        sets = [["first", "first"], ["both", "second"], ["second", "second"], ["first", "second"], ["both", "both"]]
        for step, uses in enumerate(sets):
            expected = mean_over_ranks(model.module, step, uses)
            model.zero_grad()
            model(batch(step), use=uses[dist.get_rank()]).square().sum().backward()
            assert_grads(model.module, expected)


def accumulates() -> None:
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
                    for c in zip(*[local_grads(model.module, batch(10 * repeat + s)) for s in range(2)], strict=True)
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
            penalty = torch.autograd.grad(model(batch(step).requires_grad_()).sum(), model.module.first.weight)
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
                x = layer(x).tanh() if plain else checkpoint(lambda y, m=layer: m(y).tanh(), x, use_reentrant=True)
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
                    expected[i] = None if param.grad is None else expected[i] + param.grad / dist.get_world_size()
            model.zero_grad()
            model(batch(step))["logits"].square().sum().backward()
            assert_grads(model.module, expected)


def refreshes_when_parameters_change() -> None:
    model = DDP(Net(), message_size=1)
    for step in range(6):
        frozen = step in (2, 3)
        model.module.second.requires_grad_(not frozen)
        expected = mean_over_ranks(model.module, step)
        model.zero_grad()
        model(batch(step)).square().sum().backward()
        if frozen:
            expected = [*expected[:2], None, None]
        assert_grads(model.module, expected)
    model.double()
    model.zero_grad()
    expected = mean_over_ranks(model.module, 9)
    model(batch(9, dtype=torch.float64)).square().sum().backward()
    assert_grads(model.module, expected, rtol=1e-12)


def survives_exceptions() -> None:
    """Raise in the middle of a backward pass, then train on."""

    class Explode(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise ArithmeticError("in backward")

    lower, upper = nn.Linear(4, 4), nn.Linear(4, 4)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lower, self.upper = lower, upper

        def forward(self, x: Tensor, explode: bool = False) -> Tensor:
            x = self.lower(x)
            return self.upper(Explode.apply(x) if explode else x)

    model = DDP(Two(), message_size=1)
    for step in range(4):
        if step in (0, 2):
            with pytest.raises(ArithmeticError):
                model(batch(step), explode=True).sum().backward()
        expected = [
            sum(column) / 2
            for column in zip(*[local_grads(model.module, batch(step, rank)) for rank in range(2)], strict=True)
        ]
        model.zero_grad()
        model(batch(step)).square().sum().backward()
        assert_grads(model.module, expected)


def copies_and_pickles() -> None:
    model = DDP(Net(), message_size=1)
    model(batch(0)).square().sum().backward()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(ours, theirs)
            assert ours is not theirs
        for step in range(2):
            expected = mean_over_ranks(twin.module, step)
            twin.zero_grad()
            twin(batch(step)).square().sum().backward()
            assert_grads(twin.module, expected)
    group = dist.new_group([0, 1])
    with pytest.raises(PreparationError, match="Copy its module"):
        copy.deepcopy(DDP(Net(), process_group=group))
    # Without its wrapper a module is on its own again.
    module = model.module
    del model
    expected = local_grads(module, batch(7))
    module.zero_grad()
    module(batch(7)).square().sum().backward()
    assert_grads(module, expected)


def keeps_memory_formats() -> None:
    model = DDP(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), retain_allreduce_buffers=True)
    for _ in range(2):
        model.zero_grad()
        x = torch.full((1, 3, 5, 5), 1.0 + dist.get_rank()).to(memory_format=torch.channels_last)
        model(x).sum().backward()
        weight = model.module.weight
        assert weight.grad is not None
        assert weight.grad.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(weight.grad, torch.full_like(weight, 9 * 1.5))


def warns_of_torch_options() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        DDP(Net(), device_ids=[0], output_device=0, find_unused_parameters=True, delay_allreduce=True)
        DDP(Net(), [0])
    with pytest.raises(TypeError, match="no_such_option"):
        DDP(Net(), no_such_option=1)
    return [f"{warning.category.__name__}: {warning.message}" for warning in caught]


def refuses_other_models() -> None:
    with pytest.raises(PreparationError, match=r"Rank\(s\) \[1\] hold another model than rank 0"):
        DDP(nn.Linear(4, 3 + dist.get_rank()))
    sparse = DDP(nn.Embedding(4, 2, sparse=True))
    with pytest.raises(PreparationError, match="sparse=False"):
        sparse(torch.tensor([1])).sum().backward()


def keeps_apex_limits_on_request() -> None:
    os.environ["AMPCOMPARE_APEX_STRICT"] = "1"
    # Used in the first pass, not in the second; and the other way round.
    model = DDP(Net(), message_size=1)
    model(batch(0)).sum().backward()
    with pytest.raises(RuntimeError, match="of 4 buckets were reduced"):
        model(batch(1), use="first").sum().backward()
    model = DDP(Net())
    model(batch(0), use="first").sum().backward()
    with pytest.raises(KeyError, match="No bucket expects the gradient of parameter second"):
        model(batch(1), use="second").sum().backward()
    # A second backward pass for one forward pass; a backward pass without one.
    model = DDP(Net())
    loss = model(batch(0)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="A second backward pass"):
        loss.backward()
    model = DDP(Net())
    with pytest.raises(AttributeError, match="needs_refresh"):
        model.module(batch(0)).sum().backward()
    model = DDP(Net(torch.bfloat16))
    with pytest.raises(KeyError, match="bfloat16"):
        model(batch(0, dtype=torch.bfloat16)).sum().backward()
    # Delayed, bfloat16 stays local; a second backward pass too.
    model = DDP(Net(torch.bfloat16), delay_allreduce=True)
    expected = local_grads(model.module, batch(0, dtype=torch.bfloat16))
    model(batch(0, dtype=torch.bfloat16)).square().sum().backward()
    assert_grads(model.module, expected, rtol=0)
    model = DDP(Net(), delay_allreduce=True)
    once = mean_over_ranks(model.module, 0)
    own = local_grads(model.module, batch(0))
    loss = model(batch(0)).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert_grads(model.module, [a + b for a, b in zip(once, own, strict=True)])  # type: ignore[operator]


def uses_given_groups() -> None:
    """Reduce over given communicators, and within a group of some ranks."""
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    model = DDP(Net(), message_size=1, num_allreduce_streams=2, allreduce_communicators=(groups, [None, None]))
    for step in range(3):
        expected = mean_over_ranks(model.module, step)
        model.zero_grad()
        model(batch(step)).square().sum().backward()
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


def world_of_four() -> None:
    for options in ({"message_size": 1}, {"delay_allreduce": True}, {"gradient_predivide_factor": 4.0}):
        model = DDP(Net(), **options)
        uses = ["first", "both", "second", "both"]
        for step in range(3):
            expected = mean_over_ranks(model.module, step, uses)
            model.zero_grad()
            model(batch(step), use=uses[dist.get_rank()]).square().sum().backward()
            assert_grads(model.module, expected)


@pytest.mark.parametrize(
    "function",
    [
        reduces_with_every_option,
        tolerates_unused,
        accumulates,
        reduces_every_backward,
        supports_reentrant_checkpoints,
        refreshes_when_parameters_change,
        survives_exceptions,
        copies_and_pickles,
        keeps_memory_formats,
        refuses_other_models,
        keeps_apex_limits_on_request,
        uses_given_groups,
    ],
    ids=lambda function: function.__name__,
)
def test_two_ranks(ranks: Any, function: Any) -> None:
    """Gradients are the average of what both ranks have on their own, or the error is the one expected."""
    ranks(2, function)


def test_four_ranks(ranks: Any) -> None:
    """Four ranks with different used parameters agree on the average, and pairs work side by side."""
    ranks(4, world_of_four)
    values = ranks(4, works_in_pairs)
    assert [row[1:] for row in values] == [[0.5, 0.5], [0.5, 0.5], [2.5, 2.5], [2.5, 2.5]]
    assert values[0][0] == values[1][0] != values[2][0] == values[3][0]


def test_state_is_broadcast_at_construction(ranks: Any) -> None:
    """Parameters become rank 0's, buffers too unless Apex's defects are asked for."""
    first, second = ranks(2, broadcasts_state)
    for strict, (ours, theirs) in enumerate(zip(first, second, strict=True)):
        for name, value in ours.items():
            same = torch.equal(value, theirs[name])
            assert same == (not strict or name not in {"module.2.running_mean", "module.2.flags"}), name


def test_buckets_follow_arrival(ranks: Any) -> None:
    """The first pass orders buckets from the last layer back; size or trigger parameters close them."""
    first, second = ranks(2, records_arrival_order)
    assert first == second
    assert [set(bucket) for bucket in first["trigger"]] in (
        [{"2.weight", "2.bias", "1.weight", "1.bias"}, {"0.weight", "0.bias"}],
        [{"2.weight", "2.bias", "1.weight"}, {"1.bias", "0.weight", "0.bias"}],
    )
    assert sorted(itertools.chain(*first["small"])) == sorted(
        f"{i}.{kind}" for i in range(3) for kind in ("weight", "bias")
    )
    assert [bucket[0][0] for bucket in first["small"]] == ["2", "2", "1", "1", "0", "0"]
    assert [len(bucket) for bucket in first["small"]] == [1] * 6
    # 16 + 4 elements are under 24, and with the next parameter above or at it.
    assert len(first["pairs"]) < 6


def test_default_message_size_overlaps_on_the_host(ranks: Any) -> None:
    """Without a GPU the default size makes several buckets, an explicit one and Apex's own make one."""
    for several, legacy, explicit in ranks(2, overlaps_on_the_host):
        assert (several > 1, legacy, explicit) == (True, 1, 1)


def test_rank_0_decides_the_buckets(ranks: Any) -> None:
    """Ranks whose gradients arrive in different order reduce in rank 0's order."""
    assert ranks(2, follows_rank_0) == [[[1], [0]], [[1], [0]]]


def test_torch_options_are_accepted_with_one_warning(ranks: Any) -> None:
    """Arguments of torch's class warn once per wrapper, on rank 0 only; unknown ones are a TypeError."""
    first, second = ranks(2, warns_of_torch_options)
    ours = [text for text in first if text.startswith("UserWarning")]
    assert len(ours) == 2
    assert "device_ids, find_unused_parameters, output_device" in ours[0]
    assert sum(text.startswith("DeprecatedFeatureWarning") for text in first) == 2
    assert second == []


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"shared_param": True}, ValueError, "shared_param is no longer supported"),
        ({"delay_allreduce": True, "allreduce_trigger_params": []}, ValueError, "no meaning with it"),
        ({"delay_allreduce": True, "num_allreduce_streams": 2}, ValueError, "num_allreduce_streams=2"),
        ({"allreduce_communicators": ([], [])}, AssertionError, r"got lengths \[0, 0\]"),
        ({"allreduce_communicators": ([1], [1])}, AssertionError, "> 1"),
        (
            {"num_allreduce_streams": 2, "allreduce_communicators": ([1], [1])},
            AssertionError,
            "num_allreduce_streams=2",
        ),
        ({}, RuntimeError, "init_process_group"),
        ({}, ValueError, "init_process_group"),
    ],
)
def test_options_that_exclude_each_other(options: dict[str, Any], error: type[Exception], match: str) -> None:
    """Each illegal combination, and a missing process group, is an error of the type that Apex or torch raises."""
    with pytest.warns(DeprecatedFeatureWarning), pytest.raises(error, match=match) as caught:
        DDP(Net(), **options)
    assert isinstance(caught.value, AmpCompareError)


def refuses_host_parameters_under_nccl() -> None:
    with mock.patch.object(dist, "get_backend", return_value="nccl"):
        with pytest.raises(AssertionError, match=r"4 parameters are not on a GPU \(first: first.weight\)"):
            DDP(Net())


def test_nccl_wants_parameters_on_a_gpu(ranks: Any) -> None:
    """Under NCCL a model on the host is refused, with the name of its first parameter."""
    ranks(2, refuses_host_parameters_under_nccl)
