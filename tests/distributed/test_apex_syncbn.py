"""SyncBatchNorm on gloo against batch norm over the whole batch in fp64, and the conversion of models."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ampcompare.apex import DeprecatedFeatureWarning
from ampcompare.apex.parallel import SyncBatchNorm, convert_syncbn_model, create_syncbn_process_group

CHANNELS = 5
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}


def whole(shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64) * 3 + 2


def prepare(layer: Any) -> Any:
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(0.5, 1.5, CHANNELS))
        layer.bias.copy_(torch.linspace(-1, 1, CHANNELS))
    return layer


def close(ours: Tensor | None, reference: Tensor | None, dtype: torch.dtype) -> None:
    assert ours is not None
    assert reference is not None
    limit = TOLERANCE[dtype]
    difference = (ours.double() - reference).abs().max()
    assert difference <= limit * max(1.0, reference.abs().max().item()), (difference, dtype)


def compare(
    sizes: list[int],
    rest: tuple[int, ...],
    dtype: torch.dtype,
    layer_dtype: torch.dtype,
    *,
    channel_last: bool = False,
    relu: bool = False,
    with_z: bool = False,
    momentum: float | None = 0.3,
    ranks: list[int] | None = None,
    group: Any = None,
) -> None:
    """Compare this rank's part with batch norm over the batches of all `ranks`, in fp64, over two steps."""
    ranks = list(range(dist.get_world_size())) if ranks is None else ranks
    layer = SyncBatchNorm(CHANNELS, 1e-5, momentum, True, True, group, channel_last, relu)
    ours = prepare(layer).to(layer_dtype)
    reference = prepare(nn.BatchNorm1d(CHANNELS, momentum=momentum).double())
    place = ranks.index(dist.get_rank())
    first = sum(sizes[:place])
    part = slice(first, first + sizes[place])
    for step in range(2):
        shape = (sum(sizes), *rest, CHANNELS) if channel_last else (sum(sizes), CHANNELS, *rest)
        x, z, dy = (whole(shape, 10 * step + k).to(dtype).double() for k in range(3))
        axis = -1 if channel_last else 1
        full = x.clone().requires_grad_()
        full_z = z.clone().requires_grad_()
        out = (
            reference(full.movedim(axis, -1).reshape(-1, CHANNELS))
            .view(full.movedim(axis, -1).shape)
            .movedim(-1, axis)
        )
        out = out + full_z if with_z else out
        # Where half rounding could flip the sign, let both agree.
        dy = torch.where(out.abs() < 0.05, torch.zeros_like(dy), dy) if relu else dy
        out = out.relu() if relu else out
        reference.zero_grad()
        out.backward(dy)

        own = x[part].to(dtype).requires_grad_()
        own_z = z[part].to(dtype).requires_grad_()
        ours.zero_grad()
        result = ours(own, own_z) if with_z else ours(own)
        result.backward(dy[part].to(dtype))
        assert result.dtype is dtype
        assert result.shape == own.shape
        close(result, out[part], dtype)
        assert full.grad is not None
        close(own.grad, full.grad[part], dtype)
        if with_z:
            assert full_z.grad is not None
            close(own_z.grad, full_z.grad[part], dtype)
        for param, expected in zip(ours.parameters(), reference.parameters(), strict=True):
            assert param.grad is not None
            assert param.grad.dtype is layer_dtype
            total = param.grad.double()
            dist.all_reduce(total, group=group)
            assert expected.grad is not None
            close(
                total,
                expected.grad,
                layer_dtype if dtype is torch.float64 else max((dtype, layer_dtype), key=TOLERANCE.get),
            )  # type: ignore[arg-type]
        close(ours.running_mean, reference.running_mean, layer_dtype)
        close(ours.running_var, reference.running_var, layer_dtype)
        assert ours.num_batches_tracked.item() == step + 1
    # Evaluation needs nobody else, in any layout.
    ours.eval()
    reference.eval()
    if dist.get_rank() == ranks[0]:
        out = (
            reference(x.movedim(axis, -1).reshape(-1, CHANNELS))
            .view(x.movedim(axis, -1).shape)
            .movedim(-1, axis)
        )
        out = out + z if with_z else out
        out = out.relu() if relu else out
        result = ours(x.to(dtype), z.to(dtype)) if with_z else ours(x.to(dtype))
        assert result.dtype is dtype
        close(result, out, max((dtype, layer_dtype), key=TOLERANCE.get))  # type: ignore[arg-type]


def matches_the_whole_batch() -> None:
    half, single, double, brain = torch.float16, torch.float32, torch.float64, torch.bfloat16
    for dtype, layer_dtype in [
        (single, single),
        (double, double),
        (half, single),
        (half, half),
        (brain, single),
        (brain, brain),
        (single, half),
    ]:
        compare([4, 4], (3, 2), dtype, layer_dtype)
        compare([6, 2], (), dtype, layer_dtype)
        compare([3, 5], (4,), dtype, layer_dtype, channel_last=True, relu=True, with_z=True)
    for channel_last, relu, with_z in itertools.product([False, True], repeat=3):
        compare([3, 2], (2, 3), single, single, channel_last=channel_last, relu=relu, with_z=with_z)
    compare([16, 8], (4, 4), single, single)
    # Two values cancel almost wholly in the gradient, beyond what fp32 can show.
    compare([1, 1], (), double, double)
    compare([4, 4], (2, 2, 2), single, single, momentum=None)
    compare([5, 2], (3,), half, single)


def allows_an_empty_rank() -> None:
    layer = prepare(SyncBatchNorm(CHANNELS))
    reference = prepare(nn.BatchNorm1d(CHANNELS))
    x = whole((6, CHANNELS), 1).float()
    own = (x if dist.get_rank() == 0 else x[:0]).clone().requires_grad_()
    full = x.clone().requires_grad_()
    layer(own).square().sum().backward()
    reference(full).square().sum().backward()
    assert full.grad is not None
    close(layer.running_var, reference.running_var.double(), torch.float32)
    if dist.get_rank() == 0:
        close(own.grad, full.grad.double(), torch.float32)
    else:
        assert own.grad is not None
        assert own.grad.shape == (0, CHANNELS)
        assert layer.weight.grad.abs().sum() == 0


def lacks_statistics() -> None:
    layer = SyncBatchNorm(CHANNELS, affine=False, track_running_stats=False)
    x = whole((8, CHANNELS, 2), 3).float()
    part = x[:4] if dist.get_rank() == 0 else x[4:]
    torch.testing.assert_close(
        layer(part),
        nn.functional.batch_norm(x, None, None, training=True)[:4]
        if dist.get_rank() == 0
        else nn.functional.batch_norm(x, None, None, training=True)[4:],
        atol=1e-5,
        rtol=1e-5,
    )
    layer.eval()
    if dist.get_rank() == 0:
        torch.testing.assert_close(
            layer(part), nn.functional.batch_norm(part, None, None, training=True), atol=1e-5, rtol=1e-5
        )


def synchronizes_in_groups() -> None:
    group = create_syncbn_process_group(2)
    pair = [0, 1] if dist.get_rank() < 2 else [2, 3]
    compare([4, 2], (3,), torch.float32, torch.float32, group=group, ranks=pair)
    assert create_syncbn_process_group(0) is None
    with pytest.raises(AssertionError, match="Groups of 3 ranks do not divide 4 ranks"):
        create_syncbn_process_group(3)
    with pytest.raises(AssertionError, match="Groups of 8"):
        create_syncbn_process_group(8)
    model = convert_syncbn_model(nn.Sequential(nn.BatchNorm1d(CHANNELS)), process_group=group)
    assert model[0].process_group is group


def test_matches_batch_norm_over_the_whole_batch(ranks: Any) -> None:
    """Outputs, all gradients and running statistics equal fp64 batch norm over the union, whatever dtype and layout."""
    ranks(2, matches_the_whole_batch)


def test_a_rank_may_have_nothing(ranks: Any) -> None:
    """A rank with an empty batch takes part, with empty and zero gradients."""
    ranks(2, allows_an_empty_rank)


def test_works_without_running_statistics(ranks: Any) -> None:
    """Without running statistics training uses all ranks' batches, evaluation the own batch."""
    ranks(2, lacks_statistics)


def test_groups(ranks: Any) -> None:
    """Within groups of two of four ranks, statistics are those of each group's batch."""
    ranks(4, synchronizes_in_groups)


def test_equals_batch_norm_on_one_process() -> None:
    """Without a process group it is BatchNorm1d, state dict included, and one value per channel is refused."""
    ours, reference = SyncBatchNorm(4), nn.BatchNorm1d(4)
    for _ in range(3):
        x = torch.randn(8, 4)
        left, right = x.clone().requires_grad_(), x.clone().requires_grad_()
        ours(left).square().sum().backward()
        reference(right).square().sum().backward()
        assert left.grad is not None
        torch.testing.assert_close(left.grad, right.grad, atol=1e-5, rtol=1e-4)
    loaded = nn.BatchNorm1d(4)
    loaded.load_state_dict(ours.state_dict())
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], value)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        ours(torch.randn(1, 4))
    with pytest.raises(ValueError, match="4 channels got an input of shape"):
        ours(torch.randn(2, 3))


class Operations(TorchDispatchMode):
    """Keeps the arguments of each call of an operation of torch by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.setdefault(func.overloadpacket.__name__, []).append(args)
        return func(*args, **(kwargs or {}))


def test_the_backward_kernel_gets_what_cuda_asks_for() -> None:
    """The CUDA kernel asserts that saved statistics are tensors, of any size, which a CPU does not ask."""
    layer = SyncBatchNorm(4)
    x = torch.randn(8, 4, 3, requires_grad=True)
    loss = layer(x).square().sum()
    with Operations() as mode:
        loss.backward()
    (args,) = mode.calls["native_batch_norm_backward"]
    assert all(isinstance(saved, Tensor) for saved in args[3:7])


def test_a_cumulative_average_waits_for_nothing() -> None:
    """With momentum None the weight of a batch is worked out on the device, to the bits of torch's batch norm."""
    ours, reference = SyncBatchNorm(4, momentum=None), nn.BatchNorm1d(4, momentum=None)
    for _ in range(5):
        x = torch.randn(8, 4)
        with Operations() as mode:
            ours(x)
        assert "_local_scalar_dense" not in mode.calls
        reference(x)
    torch.testing.assert_close(ours.running_mean, reference.running_mean)
    torch.testing.assert_close(ours.running_var, reference.running_var)


def test_gradients_are_those_of_finite_differences() -> None:
    """The autograd formula agrees with finite differences, with the added input and ReLU."""
    layer = SyncBatchNorm(3, fuse_relu=True, track_running_stats=False).double()
    x = torch.randn(4, 3, 2, dtype=torch.float64, requires_grad=True)
    z = torch.randn(4, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x, z, w, b: torch.func.functional_call(layer, {"weight": w, "bias": b}, (x, z)),
        (x, z, layer.weight, layer.bias),
    )


def build() -> nn.Sequential:
    shared = nn.BatchNorm2d(4, eps=1e-3, momentum=0.2)
    return nn.Sequential(
        shared,
        nn.Sequential(nn.BatchNorm1d(3, affine=False, track_running_stats=False)),
        nn.InstanceNorm2d(4),
        shared,
    )


def test_conversion_keeps_what_the_layers_were() -> None:
    """Parameters and buffers are shared, flags kept, instance norms left alone, and a shared layer stays shared."""
    model = build().eval()
    model[0].weight.requires_grad_(False)
    old = model[0]
    with pytest.warns(DeprecatedFeatureWarning) as caught:
        converted = convert_syncbn_model(model, channel_last=True)
    assert len(caught) == 1
    assert converted is model
    assert isinstance(model[0], SyncBatchNorm)
    assert model[0] is model[3]
    assert isinstance(model[2], nn.InstanceNorm2d)
    assert (model[0].eps, model[0].momentum, model[0].channel_last) == (1e-3, 0.2, True)
    for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
        assert getattr(model[0], name) is getattr(old, name)
    assert not model[0].training
    assert not model[0].weight.requires_grad
    inner = model[1][0]
    assert isinstance(inner, SyncBatchNorm)
    assert (inner.weight, inner.running_mean) == (None, None)
    with pytest.warns(DeprecatedFeatureWarning):
        root = convert_syncbn_model(old)
    assert isinstance(root, SyncBatchNorm)
