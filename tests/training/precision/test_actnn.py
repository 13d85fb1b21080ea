"""Packed activations: what is packed and what is not, gradients right in the mean, and nothing else changed."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from ampcompare.training.precision.actnn import ActNN, PackedTensor, SavedTensorPacker, pack_tensor
from ampcompare.training.precision.base import Precision, make_precision


def net(seed: int = 0) -> nn.Sequential:
    """Two convolutions with batch norm."""
    torch.manual_seed(seed)
    layers = [
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 8, 3),
        nn.Flatten(),
    ]
    return nn.Sequential(*layers, nn.Linear(288, 5))


def images() -> Tensor:
    return torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def start(arm: str) -> tuple[Precision, nn.Module, SGD]:
    model = net()
    precision = make_precision(arm)
    (prepared,), (optimizer,) = precision.prepare([model], [SGD(model.parameters(), lr=0.1)])
    assert isinstance(optimizer, SGD)
    return precision, prepared, optimizer


def gradients(precision: Precision, model: nn.Module, optimizer: SGD) -> list[Tensor]:
    optimizer.zero_grad()
    with precision.autocast():
        loss = F.cross_entropy(model(images()).float(), torch.arange(16) % 5)
    precision.backward(loss, [optimizer])
    return [param.grad.clone() for param in precision.unscale(optimizer) if param.grad is not None]


class Watched:
    def __init__(self, precision: Precision) -> None:
        assert isinstance(precision, ActNN)
        assert precision.packer is not None
        self.pairs: list[tuple[Tensor, Any]] = []
        pack = precision.packer.pack

        def watched(tensor: Tensor) -> Any:
            kept = pack(tensor)
            self.pairs.append((tensor, kept))
            return kept

        precision.packer.pack = watched  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "arm", ["actnn:bits=2", "actnn:bits=2,over=native:bf16", "actnn:bits=2,over=half:bf16"]
)
def test_activations_are_packed_and_weights_are_not(arm: str) -> None:
    """Large activations are kept in few bits; weights, their 16-bit copies and what the loss saves stay as they are."""
    precision, model, optimizer = start(arm)
    seen = Watched(precision)
    gradients(precision, model, optimizer)
    packed = [tensor.shape for tensor, kept in seen.pairs if isinstance(kept, PackedTensor)]
    left = [tensor.shape for tensor, kept in seen.pairs if not isinstance(kept, PackedTensor)]
    assert torch.Size([16, 16, 8, 8]) in packed
    weights = {param.shape for param in model.parameters()} | {torch.Size([288, 5])}
    assert not weights & set(packed)
    assert torch.Size([8, 16, 3, 3]) in left  # a weight of more than 1024 elements
    assert torch.Size([16, 5]) not in [*packed, *left]  # log_softmax, outside of the model


def test_the_forward_pass_is_that_of_the_arm_underneath() -> None:
    """Outputs and losses are the same to the last bit, dropout included: no number is drawn from torch's generator."""
    outputs = []
    for arm in ("fp32", "actnn:bits=2"):
        model = nn.Sequential(net(), nn.Dropout(0.5))
        precision = make_precision(arm)
        (prepared,), _ = precision.prepare([model], [SGD(model.parameters(), lr=0.1)])
        torch.manual_seed(7)
        outputs.append([prepared(images()).detach() for _ in range(2)])
    assert all(torch.equal(here, there) for here, there in zip(*outputs, strict=True))


@pytest.mark.slow
def test_gradients_are_right_in_the_mean() -> None:
    """Over 60 backward passes 2-bit gradients average to those of fp32; one alone is far off."""
    exact = torch.cat([grad.flatten() for grad in gradients(*start("fp32"))])
    precision, model, optimizer = start("actnn:bits=2")
    drawn = torch.stack(
        [torch.cat([g.flatten() for g in gradients(precision, model, optimizer)]) for _ in range(60)]
    )
    one = (drawn[0] - exact).norm() / exact.norm()
    mean = (drawn.mean(0) - exact).norm() / exact.norm()
    assert one > 0.05
    assert mean < one / 4


def test_memory_that_is_used_again_is_packed_again() -> None:
    """Another tensor at the place of one that is gone is not taken for it, nor is one that was written to."""
    packer = SavedTensorPacker(8, 256, [], 0)
    packer.begin_forward_pass()
    first = torch.zeros(2048)
    zeros = packer.pack(first)
    first.add_(1)
    ones = packer.pack(first)
    del first
    others = [torch.full((2048,), 2.0) for _ in range(4)]
    twos = [packer.pack(other) for other in others]
    assert torch.equal(SavedTensorPacker.unpack(zeros), torch.zeros(2048))
    assert torch.equal(SavedTensorPacker.unpack(ones), torch.ones(2048))
    assert all(torch.equal(SavedTensorPacker.unpack(two), torch.full((2048,), 2.0)) for two in twos)


def test_state_brings_the_rounding_back() -> None:
    """After `load_state_dict` the next backward pass rounds as it would have; another seed rounds otherwise."""
    precision, model, optimizer = start("actnn:bits=2,over=native:fp16")
    optimizer.param_groups[0]["lr"] = 0.0
    gradients(precision, model, optimizer)
    precision.step(optimizer)
    state = precision.state_dict()
    second = gradients(precision, model, optimizer)
    again, model, optimizer = start("actnn:bits=2,over=native:fp16")
    again.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(gradients(again, model, optimizer), second, strict=True))
    assert again.key == "scaler"
    assert again.loss_scales() == precision.loss_scales() == (2.0**16,)


def test_an_evaluation_packs_nothing_and_an_error_leaves_no_hook() -> None:
    """Without gradients nothing is saved; a forward pass that raises ends the packing with it."""
    precision, model, _ = start("actnn:bits=2")
    seen = Watched(precision)
    with torch.no_grad():
        model(images())
    with pytest.raises(RuntimeError):
        model(torch.randn(16, 4, 8, 8))
    seen.pairs.clear()
    net()(images()).sum().backward()
    assert seen.pairs == []


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_value_is_off_by_less_than_a_step(bits: int) -> None:
    """Every value lies within one step of its group from where it was; bytes are bits and two fp32 a group."""
    values = torch.randn(4096, generator=generator(1)) * torch.linspace(0.01, 100, 4096)
    packed = pack_tensor(values, bits, 256, generator())
    groups = values.view(16, 256)
    steps = (groups.amax(1) - groups.amin(1)) / (2**bits - 1)
    off = (packed.unpack_tensor().view(16, 256) - groups).abs()
    assert (off <= steps[:, None] * 1.0001).all()
    assert off.max() > 0
    assert packed.nbytes == 4096 * bits // 8 + 16 * 8


@pytest.mark.parametrize("shape", [(1000,), (3, 5, 7), (1, 1), (257,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_shape_and_type_come_back(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = torch.rand(shape, generator=generator(1)).to(dtype)
    restored = pack_tensor(values, 8, 256, generator()).unpack_tensor()
    assert (restored.shape, restored.dtype) == (values.shape, dtype)
    assert (restored.float() - values.float()).abs().max() < 1 / 200


def test_order_of_memory_comes_back() -> None:
    """channels_last stays channels_last, with every value at its place."""
    images = torch.rand(4, 8, 5, 5, generator=generator(1)).to(memory_format=torch.channels_last)
    restored = pack_tensor(images, 8, 256, generator()).unpack_tensor()
    assert restored.is_contiguous(memory_format=torch.channels_last)
    assert (restored - images).abs().max() < 1 / 200


def test_equal_values_are_exact() -> None:
    """A group without spread comes back as it was, zeros among them."""
    for value in (0.0, -3.25, 1e-30):
        values = torch.full((512,), value)
        assert torch.equal(pack_tensor(values, 2, 256, generator()).unpack_tensor(), values)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_stays_not_finite(bad: float) -> None:
    """An overflow in a group cannot be lost: the group comes back as NaN, the others as they were."""
    values = torch.ones(512)
    values[3] = bad
    restored = pack_tensor(values, 2, 256, generator()).unpack_tensor()
    assert restored[:256].isnan().all()
    assert torch.equal(restored[256:], values[256:])
