"""What Apex's DistributedDataParallel takes, warns of and refuses, and what it leaves of the model."""

import copy
import io
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ampcompare.apex import DeprecatedFeatureWarning
from ampcompare.apex.parallel import DistributedDataParallel as DDP
from ampcompare.base.errors import AmpCompareError, PreparationError
from tests.distributed.two_layers import Net, assert_grads, batch, local_grads, mean_over_ranks


def broadcasts_state() -> dict[str, Any]:
    torch.manual_seed(dist.get_rank())
    norm = nn.BatchNorm1d(3)
    norm.register_buffer("flags", torch.tensor([dist.get_rank() == 0]))
    with torch.no_grad():
        norm.weight.normal_()
        norm.running_mean.fill_(dist.get_rank())  # type: ignore[union-attr]
    model = DDP(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, dtype=torch.bfloat16), norm))
    assert next(iter(model.state_dict())) == "module.0.weight"
    return model.state_dict()


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
            for column in zip(
                *[local_grads(model.module, batch(step, rank)) for rank in range(2)], strict=True
            )
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


@pytest.mark.parametrize(
    "function",
    [survives_exceptions, copies_and_pickles, keeps_memory_formats, refuses_other_models],
    ids=lambda function: function.__name__,
)
def test_two_ranks(ranks: Any, function: Any) -> None:
    """The wrapper works after an exception and a copy, or refuses the model with the error that is expected."""
    ranks(2, function)


def test_state_is_broadcast_at_construction(ranks: Any) -> None:
    """Parameters and buffers become rank 0's."""
    first, second = ranks(2, broadcasts_state)
    assert all(torch.equal(value, second[name]) for name, value in first.items())


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
        ({}, RuntimeError, "init_process_group"),
        ({}, ValueError, "init_process_group"),
    ],
)
def test_what_is_refused(options: dict[str, Any], error: type[Exception], match: str) -> None:
    """A removed option, and a missing process group, is an error of the type that Apex or torch raises."""
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
