"""`fp16_utils`: conversions, master parameters by hand, the old scalers and `FP16_Optimizer`."""

import copy
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampcompare.apex.fp16_utils as fp16_utils
from ampcompare.apex import DeprecatedFeatureWarning
from ampcompare.apex.amp.scaler import LossScaler as AmpLossScaler
from ampcompare.apex.fp16_utils import (
    BN_convert_float,
    DynamicLossScaler,
    FP16_Optimizer,
    FP16Model,
    LossScaler,
    convert_network,
    master_params_to_model_params,
    model_grads_to_master_grads,
    network_to_half,
    prep_param_lists,
    to_python_float,
    tofp16,
)

# A first scale that keeps scaled fp16 gradients of a few units finite.
DYNAMIC: dict[str, Any] = {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 256.0}}


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.affine = nn.BatchNorm1d(2)
        self.bare = nn.BatchNorm1d(2, affine=False)
        self.register_buffer("table", torch.arange(3))
        self.register_buffer("extra", torch.ones(3))

    def forward(self, values: Tensor, shift: Tensor | None = None) -> Tensor:
        self.seen = values.dtype
        values = self.linear(values) + (0 if shift is None else shift)
        return self.bare(self.affine(values.float()).to(values.dtype))


def dtypes(network: nn.Module) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in network.state_dict().items()}


def test_star_import_gives_the_names_that_scripts_use() -> None:
    """`from apex.fp16_utils import *` gives to_python_float and all the rest."""
    names: dict[str, Any] = {}
    exec("from ampcompare.apex.fp16_utils import *", names)
    assert names["to_python_float"] is to_python_float
    assert set(fp16_utils.__all__) <= names.keys()
    assert len(fp16_utils.__all__) == 14


def test_convert_network_keeps_affine_batch_norm() -> None:
    """All floating values but those of affine batch norms are cast, integers are not, and parameters stay the same."""
    network = Mixed()
    network.linear(torch.ones(1, 2)).sum().backward()
    identities = [id(p) for p in network.parameters()]
    assert convert_network(network, torch.float16) is network
    half = {name for name, dtype in dtypes(network).items() if dtype is torch.float16}
    assert half == {"linear.weight", "linear.bias", "bare.running_mean", "bare.running_var", "extra"}
    assert network.table.dtype is torch.int64
    assert network.linear.weight.grad.dtype is torch.float16
    assert [id(p) for p in network.parameters()] == identities


def test_network_to_half() -> None:
    """The result casts its input, keeps affine batch norms fp32, and holds the network that was given."""
    network = Mixed()
    converted = network_to_half(network)
    assert isinstance(converted[0], tofp16)
    assert converted[1] is network
    assert network.linear.weight.dtype is torch.float16
    assert network.affine.weight.dtype is network.affine.running_mean.dtype is torch.float32
    assert network.bare.running_mean.dtype is torch.float16
    assert converted(torch.randn(3, 2)).dtype is torch.float16
    assert BN_convert_float(network) is network


def test_fp16_model() -> None:
    """FP16Model warns, converts the network, halves all inputs, and returns half."""
    with pytest.warns(DeprecatedFeatureWarning):
        model = FP16Model(Mixed())
    output = model(torch.randn(3, 2), torch.randn(3, 2))
    assert output.dtype is model.network.seen is torch.float16
    assert model.network.affine.weight.dtype is torch.float32


@pytest.mark.parametrize("flat", [False, True])
def test_masters_by_hand(flat: bool) -> None:
    """Trainable parameters get fp32 masters; gradients go there and values come back, flat or one by one."""
    network = nn.Sequential(nn.Linear(2, 2).half(), nn.Linear(2, 1))
    network[0].bias.requires_grad_(False)
    model, masters = prep_param_lists(network, flat_master=flat)
    assert [id(p) for p in model] == [id(network[0].weight), id(network[1].weight), id(network[1].bias)]
    assert len(masters) == (1 if flat else 3)
    assert all(m.dtype is torch.float32 and m.requires_grad and m.is_leaf for m in masters)
    assert flat is (masters[0].grad is not None)
    for number, param in enumerate(model):
        param.grad = torch.full_like(param, number + 1.0)
    model_grads_to_master_grads(model, masters, flat_master=flat)
    assert torch.cat([m.grad.flatten() for m in masters if m.grad is not None]).tolist() == [1.0] * 4 + [
        2.0
    ] * 2 + [3.0]
    with torch.no_grad():
        for master in masters:
            master.copy_(torch.arange(float(master.numel())).reshape(master.shape))
    master_params_to_model_params(model, masters, flat_master=flat)
    assert model[0].flatten().tolist() == [0.0, 1.0, 2.0, 3.0]
    assert model[2].tolist() == ([6.0] if flat else [0.0])
    assert model[0].dtype is torch.float16


def test_a_missing_gradient() -> None:
    """A parameter without gradient leaves its master without one, and zeros in a flat master."""
    network = nn.Linear(2, 1)
    model, masters = prep_param_lists(network)
    masters[1].grad = torch.ones(1)
    model[0].grad = torch.ones(1, 2)
    model_grads_to_master_grads(model, masters)
    assert masters[1].grad is None
    _, (flat,) = prep_param_lists(network, flat_master=True)
    model_grads_to_master_grads(model, [flat], flat_master=True)
    assert flat.grad.tolist() == [1.0, 1.0, 0.0]


def test_static_scaler() -> None:
    """The static scaler warns, scales losses and gradients, never sees an overflow and never moves."""
    with pytest.warns(DeprecatedFeatureWarning):
        scaler = LossScaler(8.0)
    weight = nn.Parameter(torch.ones(1))
    scaler.backward(weight.sum())
    assert weight.grad.item() == 8.0
    weight.grad.fill_(float("inf"))
    assert scaler.has_overflow([weight]) is False
    scaler.update_scale(True)
    assert scaler.loss_scale == 8.0
    assert scaler.scale_gradient(None, (torch.ones(1),), ())[0].item() == 8.0


def test_dynamic_scaler() -> None:
    """The dynamic scaler starts at 2**32, halves to no less than 1, and doubles per window since the last overflow."""
    assert DynamicLossScaler().loss_scale == 2**32
    scaler = DynamicLossScaler(init_scale=4, scale_factor=2.0, scale_window=3)
    seen = []
    for overflow in (False, False, False, True, False, False, False, True, True, True, True, True):
        scaler.update_scale(overflow)
        seen.append(scaler.loss_scale)
    assert seen == [4, 4, 8, 4, 4, 4, 8, 4, 2, 1, 1, 1]
    weight, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    scaler.backward(weight.sum(), retain_graph=True)
    assert weight.grad.tolist() == [1.0, 1.0]
    assert scaler.has_overflow([unused, weight]) is False
    for bad in (float("inf"), float("-inf"), float("nan")):
        weight.grad[1] = bad
        assert scaler.has_overflow([unused, weight]) is True
    assert scaler.scale_gradient(None, (torch.ones(1),), ())[0].item() == 1.0


@pytest.fixture
def wrapped(capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    def build(inner: Any = None, **options: Any) -> tuple[FP16_Optimizer, nn.Parameter, nn.Parameter]:
        half = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float16))
        single = nn.Parameter(torch.tensor([3.0]))
        optimizer = (inner or (lambda p: torch.optim.SGD(p, lr=0.25, momentum=0.5)))([half, single])
        with pytest.warns(DeprecatedFeatureWarning):
            wrapper = FP16_Optimizer(optimizer, **options)
        return wrapper, half, single

    yield build
    capsys.readouterr()


def loss_of(half: Tensor, single: Tensor) -> Tensor:
    return (half * torch.tensor([1.0, 3.0], dtype=torch.float16)).sum() + (single * 5).sum().half()


@pytest.mark.parametrize("options", [{}, {"static_loss_scale": 128.0}, DYNAMIC], ids=str)
def test_optimizer_steps_masters_and_model(wrapped: Any, options: dict[str, Any]) -> None:
    """Whatever the scale, masters follow SGD on unscaled gradients, and fp16 weights follow the masters."""
    optimizer, half, single = wrapped(**options)
    master = optimizer.fp32_from_fp16_groups[0][0]
    assert optimizer.param_groups[0]["params"][0] is master
    assert master.dtype is torch.float32
    for _ in range(2):
        optimizer.zero_grad()
        optimizer.backward(loss_of(half, single))
        assert optimizer.inspect_master_grad_data()[0][0].tolist() == [1.0, 3.0]
        optimizer.step()
    torch.testing.assert_close(master.detach(), torch.tensor([1.0 - 0.625, 2.0 - 3 * 0.625]))
    torch.testing.assert_close(half.detach(), master.detach().half())
    torch.testing.assert_close(single.detach(), torch.tensor([3.0 - 5 * 0.625]))
    assert optimizer.state[master]["momentum_buffer"].dtype is torch.float32


def test_optimizer_overflow(wrapped: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """On overflow the scale halves, the step is skipped and said so, clipping gives -1 and inspection None."""
    optimizer, half, single = wrapped(dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2.0**4})
    assert isinstance(optimizer.loss_scaler, AmpLossScaler)
    optimizer.backward(loss_of(half, single) * float("inf"))
    assert optimizer.overflow is True
    assert optimizer.loss_scale == 8.0
    assert optimizer.clip_master_grads(1.0) == -1
    assert optimizer.inspect_master_grad_data() is None
    assert optimizer.step() is None
    assert half.tolist() == [1.0, 2.0]
    assert "skipped" in capsys.readouterr().out
    optimizer.loss_scale = 4.0
    optimizer.zero_grad(set_grads_to_None=True)
    assert half.grad is None
    optimizer.backward(loss_of(half, single))
    assert half.grad.tolist() == [4.0, 12.0]
    assert optimizer.overflow is False


def test_optimizer_clips_masters(wrapped: Any) -> None:
    """Clipping returns the norm over fp16 and fp32 parameters and scales the gradients that `step` will use."""
    optimizer, half, single = wrapped(static_loss_scale=8.0)
    optimizer.backward(loss_of(half, single))
    norm = (1 + 9 + 25) ** 0.5
    assert float(optimizer.clip_master_grads(1.0)) == pytest.approx(norm)
    clipped = optimizer.inspect_master_grad_data()[0]
    assert float(torch.cat(clipped).norm()) == pytest.approx(1.0, rel=1e-4)


def test_delayed_master_update_accumulates(wrapped: Any) -> None:
    """With `update_master_grads=False` losses add up in the model's gradients before one unscaling."""
    optimizer, half, single = wrapped(static_loss_scale=4.0)
    optimizer.backward(loss_of(half, single), update_master_grads=False)
    optimizer.backward(loss_of(half, single), update_master_grads=False)
    optimizer.update_master_grads()
    assert [grad.tolist() for grad in optimizer.inspect_master_grad_data()[0]] == [[2.0, 6.0], [10.0]]


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad:UserWarning")  # LBFGS of torch 2.8
def test_step_with_closure(wrapped: Any) -> None:
    """An optimizer that evaluates repeatedly sees fresh weights, and an overflow in the closure calls it again."""
    optimizer, half, single = wrapped(inner=lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=4), **DYNAMIC)
    losses: list[float] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (half.float() - 0.5).square().sum() + single.square().sum()
        losses.append(loss.item())
        optimizer.backward(loss * (float("inf") if len(losses) == 2 else 1.0))
        return loss

    optimizer.step(closure)
    assert losses[1] == losses[2]
    assert losses[-1] < losses[0]
    assert optimizer.loss_scale == 128.0
    assert optimizer.first_closure_call_this_step is True
    assert torch.equal(half.detach(), optimizer.fp32_from_fp16_groups[0][0].detach().half())


def test_optimizer_state_round_trip(wrapped: Any) -> None:
    """The state has Apex's six keys, the masters among them, and a restored optimizer goes on bit for bit."""
    optimizer, half, single = wrapped(**DYNAMIC)
    optimizer.backward(loss_of(half, single))
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    assert list(saved) == [
        "loss_scaler",
        "dynamic_loss_scale",
        "overflow",
        "first_closure_call_this_step",
        "optimizer_state_dict",
        "fp32_from_fp16",
    ]
    assert isinstance(saved["loss_scaler"], AmpLossScaler)
    other, other_half, other_single = wrapped(**DYNAMIC)
    with torch.no_grad():
        other_half.copy_(half)
        other_single.copy_(single)
    other.load_state_dict(saved)
    assert other.loss_scaler._unskipped == 1
    for used, a, b in ((optimizer, half, single), (other, other_half, other_single)):
        used.zero_grad()
        used.backward(loss_of(a, b))
        used.step()
    for a, b in zip(optimizer.param_groups[0]["params"], other.param_groups[0]["params"], strict=True):
        assert torch.equal(a, b)


def test_loaded_state_is_not_shared(wrapped: Any) -> None:
    """Two optimizers that share a state dict do not share a loss scale afterwards."""
    optimizer, _, _ = wrapped(dynamic_loss_scale=True)
    other, _, _ = wrapped(dynamic_loss_scale=True)
    other.load_state_dict(optimizer.state_dict())
    other.loss_scale = 2.0
    assert optimizer.loss_scale == 2.0**16


def test_existing_state_moves_to_the_master(wrapped: Any) -> None:
    """Momentum gathered before wrapping belongs to the master afterwards, in fp32."""

    def inner(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.5)
        params[0].grad = torch.ones_like(params[0])
        optimizer.step()
        return optimizer

    optimizer, half, _ = wrapped(inner=inner)
    master = optimizer.fp32_from_fp16_groups[0][0]
    assert optimizer.state[master]["momentum_buffer"].dtype is torch.float32
    assert half not in optimizer.state


def test_optimizer_refusals(wrapped: Any) -> None:
    """Pickling and copying are RuntimeErrors; a trainable parameter of another dtype is a TypeError."""
    optimizer, _, _ = wrapped(verbose=False)
    with pytest.raises(RuntimeError, match="state_dict"):
        copy.deepcopy(optimizer)
    with pytest.raises(RuntimeError, match="load_state_dict"):
        optimizer.__setstate__({})
    wide = nn.Parameter(torch.ones(1, dtype=torch.float64))
    with pytest.warns(DeprecatedFeatureWarning), pytest.raises(TypeError, match="float64"):
        FP16_Optimizer(torch.optim.SGD([wide], lr=0.1))
    frozen = nn.Parameter(torch.ones(1, dtype=torch.float64), requires_grad=False)
    with pytest.warns(DeprecatedFeatureWarning):
        assert FP16_Optimizer(torch.optim.SGD([frozen], lr=0.1)).all_fp16_params == []
