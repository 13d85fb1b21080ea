"""The layers, losses and optimizers around amp that legacy scripts import, against plain torch."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampcompare.apex.amp import utils
from ampcompare.apex.amp._initialize import applier, to_type
from ampcompare.apex.amp.scaler import LossScaler
from ampcompare.apex.contrib.clip_grad import clip_grad_norm_
from ampcompare.apex.contrib.layer_norm import FastLayerNorm
from ampcompare.apex.contrib.multihead_attn import SelfMultiheadAttn
from ampcompare.apex.contrib.optimizers import FP16_Optimizer, FusedAdam
from ampcompare.apex.contrib.xentropy import SoftmaxCrossEntropyLoss
from ampcompare.apex.fused_dense import FusedDense, FusedDenseGeluDense
from ampcompare.apex.mlp import MLP
from ampcompare.apex.optimizers import FusedAdam as PresentFusedAdam
from tests.covering import covering


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("half_to_float", [None, False, True])
def test_cross_entropy(smoothing: float, half_to_float: bool | None) -> None:
    """Losses and gradients are those of torch's smoothed cross entropy; padded rows have neither."""
    half = half_to_float is not None
    logits = torch.randn(6, 5).to(torch.float16 if half else torch.float32).requires_grad_()
    labels = torch.tensor([1, 2, 3, 4, 2, 3])
    loss = SoftmaxCrossEntropyLoss.apply(logits, labels, smoothing, 3, bool(half_to_float))
    assert loss.dtype is (torch.float16 if half_to_float is False else torch.float32)
    loss.float().sum().backward()
    twin = logits.detach().float().requires_grad_()
    expected = F.cross_entropy(twin, labels, reduction="none", ignore_index=3, label_smoothing=smoothing)
    expected.sum().backward()
    tolerance = 2e-3 if half else 1e-6
    torch.testing.assert_close(loss.float(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(logits.grad.float(), twin.grad, rtol=tolerance, atol=tolerance)
    assert logits.grad[2].tolist() == [0.0] * 5


@pytest.mark.parametrize("dtypes", [[torch.float32] * 3, [torch.float16, torch.float32, torch.float64]])
@pytest.mark.parametrize("limit", [0.5, 1e6])
def test_clipping(dtypes: list[torch.dtype], limit: float) -> None:
    """The norm is that of all gradients in fp64, and all are scaled by one factor."""
    params = [nn.Parameter(torch.zeros(4, dtype=dtype)) for dtype in dtypes]
    for param in params:
        param.grad = torch.randn(4).to(param.dtype)
    before = [param.grad.double().clone() for param in params if param.grad is not None]
    norm = torch.cat(before).norm()
    torch.testing.assert_close(clip_grad_norm_(params, limit).double(), norm, rtol=1e-5, atol=0)
    for param, old in zip(params, before, strict=True):
        torch.testing.assert_close(
            param.grad.double(), old * min(1.0, limit / norm.item()), rtol=2e-3, atol=1e-5
        )


def test_clipping_beyond_half_precision() -> None:
    """A norm above 65504 of fp16 gradients is finite; a norm that is not raises where that is asked for."""
    param = nn.Parameter(torch.zeros(4, dtype=torch.float16))
    param.grad = torch.full((4,), 6e4, dtype=torch.float16)
    assert clip_grad_norm_(param, 1.0).item() == pytest.approx(1.2e5, rel=1e-3)
    param.grad.fill_(math.inf)
    with pytest.raises(RuntimeError, match="inf"):
        clip_grad_norm_([param], 1.0, error_if_nonfinite=True)
    assert clip_grad_norm_([], 1.0) == 0


def test_fast_layer_norm() -> None:
    """FastLayerNorm is torch's layer norm over the last dimension."""
    layer, values = FastLayerNorm(6), torch.randn(2, 3, 6)
    torch.testing.assert_close(layer(values), F.layer_norm(values, (6,)))


@pytest.mark.parametrize(
    "activation,function", [("none", lambda x: x), ("relu", F.relu), ("sigmoid", torch.sigmoid)]
)
@pytest.mark.parametrize("bias", [True, False])
def test_mlp(activation: str, function: Any, bias: bool) -> None:
    """MLP is linear layers with the activation behind each, and trains all its parameters."""
    mlp, values = MLP([4, 5, 3], bias, activation), torch.randn(2, 4)
    expected = values
    for index, weight in enumerate(mlp.weights):
        expected = function(F.linear(expected, weight, mlp.biases[index] if bias else None))
    output = mlp(values)
    torch.testing.assert_close(output, expected)
    output.sum().backward()
    assert all(parameter.grad is not None for parameter in mlp.parameters())
    assert "weight_0" in mlp.state_dict()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert mlp(values).dtype is torch.bfloat16
    assert copy.deepcopy(mlp).weights[0] is not mlp.weights[0]


def test_fused_dense() -> None:
    """The dense layers are those of torch, GELU in its tanh form between two."""
    values = torch.randn(2, 4)
    one, bare, two = FusedDense(4, 3), FusedDense(4, 3, bias=False), FusedDenseGeluDense(4, 5, 3)
    for parameter in [*one.parameters(), *bare.parameters(), *two.parameters()]:
        nn.init.normal_(parameter)
    torch.testing.assert_close(one(values), F.linear(values, one.weight, one.bias))
    torch.testing.assert_close(bare(values), values @ bare.weight.T)
    inner = F.gelu(F.linear(values, two.weight1, two.bias1), approximate="tanh")
    torch.testing.assert_close(two(values), F.linear(inner, two.weight2, two.bias2))


def test_functions_of_amp_utils() -> None:
    """They cast floating tensors and leave others, and a cast of a parameter is kept while autograd can use it."""
    weight, number = nn.Parameter(torch.ones(2)), torch.ones(1, dtype=torch.long)
    cache: dict[Any, Any] = {}
    half = utils.cached_cast(utils.maybe_half, weight, cache)
    assert half.dtype is torch.float16
    assert utils.cached_cast(utils.maybe_half, weight, cache) is half
    assert utils.maybe_float(half).dtype is torch.float32
    assert utils.casted_args(utils.maybe_half, [torch.ones(1), number], {})[1] is number
    assert utils.collect_fp_tensor_types([half, number], {"y": [weight.detach()]}) == {
        "HalfTensor",
        "FloatTensor",
    }
    assert utils.should_cache(weight)
    assert not utils.should_cache(half)


@covering({"separate": [False, True], "bias": [False, True], "mask": [None, "keys", "additive", "time"]})
def test_self_attention(separate: bool, bias: bool, mask: str | None) -> None:
    """Self-attention equals torch's `MultiheadAttention` with the same weights, under each kind of mask."""
    ours = SelfMultiheadAttn(8, 2, 0.0, bias, False, "default", separate, mask == "additive")
    twin = nn.MultiheadAttention(8, 2, bias=bias)
    for parameter in ours.parameters():
        nn.init.normal_(parameter, 0.0, 0.5)

    def by_part(stacked: Tensor) -> Tensor:  # per head (q, k, v), to all q, all k, all v
        return stacked.view(2, 3, 4, *stacked.shape[1:]).transpose(0, 1).reshape(stacked.shape)

    with torch.no_grad():
        twin.in_proj_weight.copy_(by_part(ours._stack_qkv_projections("weight")))
        twin.out_proj.weight.copy_(ours.out_proj_weight)
        if bias:
            twin.in_proj_bias.copy_(by_part(ours._stack_qkv_projections("bias")))
            twin.out_proj.bias.copy_(ours.out_proj_bias)
    values = torch.randn(5, 3, 8)
    hidden = torch.zeros(3, 5, dtype=torch.bool)
    hidden[1, 3:] = True
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    masks: dict[str | None, tuple[dict[str, Tensor], dict[str, Tensor]]] = {
        None: ({}, {}),
        "keys": ({"key_padding_mask": hidden}, {"key_padding_mask": hidden}),
        "additive": ({"key_padding_mask": hidden * -1e9}, {"key_padding_mask": hidden}),
        "time": ({"attn_mask": later}, {"attn_mask": later}),
    }
    output, weights = ours(values, values, values, **masks[mask][0])
    torch.testing.assert_close(output, twin(values, values, values, **masks[mask][1])[0])
    assert weights is None


@pytest.mark.parametrize("impl", ["fast", "default"])
def test_attention_with_norm_and_residual(impl: str) -> None:
    """With `include_norm_add` the query is normalized before and added after."""
    values = torch.randn(5, 3, 8)
    normed = F.layer_norm(values, (8,))
    itself = SelfMultiheadAttn(8, 2, include_norm_add=True, impl=impl)
    plain = SelfMultiheadAttn(8, 2, impl=impl)
    plain.load_state_dict(itself.state_dict(), strict=False)
    torch.testing.assert_close(itself(values, None, None)[0], values + plain(normed, None, None)[0])


def adam_2018(
    param: Tensor, grads: list[Tensor], lr: float, eps: float, inside: bool, decay: float
) -> Tensor:
    param, m, v = param.double(), torch.zeros(4).double(), torch.zeros(4).double()
    for step, grad in enumerate(grads, 1):
        m, v = 0.9 * m + 0.1 * grad.double(), 0.999 * v + 0.001 * grad.double() ** 2
        denominator = (v + eps).sqrt() if inside else v.sqrt() + eps
        param = param - lr * math.sqrt(1 - 0.999**step) / (1 - 0.9**step) * (m / denominator + decay * param)
    return param


@pytest.mark.parametrize("inside", [False, True])
def test_adam_of_2018(inside: bool) -> None:
    """`eps_inside_sqrt` moves eps under the root, and decay follows the bias-corrected rate."""
    param = nn.Parameter(torch.randn(4))
    start, grads = param.detach().clone(), [torch.randn(4) for _ in range(3)]
    optimizer = FusedAdam([param], lr=0.1, eps=1e-3, eps_inside_sqrt=inside, weight_decay=0.1)
    for grad in grads:
        param.grad = grad
        optimizer.step()
    expected = adam_2018(start, grads, 0.1, 1e-3, inside, 0.1)
    torch.testing.assert_close(param.detach().double(), expected, rtol=1e-4, atol=1e-6)
    assert copy.deepcopy(optimizer).eps_mode == optimizer.eps_mode


@pytest.mark.parametrize("with_norms", [True, False])
def test_adam_of_2018_clips_scaled_gradients(with_norms: bool) -> None:
    """`max_grad_norm` clips the gradients as unscaled, by the given norm or by their own."""
    param, copied = nn.Parameter(torch.randn(4)), torch.zeros(4, dtype=torch.float16)
    start, grad = param.detach().clone(), torch.tensor([3.0, 4.0, 0.0, 0.0])
    optimizer = FusedAdam([param], lr=0.1, eps=1e-3, max_grad_norm=1.0)
    norms = [torch.tensor([5.0 * 8])] if with_norms else None
    optimizer.step(grads=[(grad * 8).half()], output_params=[copied], scale=8.0, grad_norms=norms)
    expected = adam_2018(start, [grad / 5.0], 0.1, 1e-3, False, 0.0)
    torch.testing.assert_close(param.detach().double(), expected, rtol=1e-4, atol=1e-6)
    assert torch.equal(copied, param.detach().half())


def test_arguments_of_2018_choose_the_optimizer_of_2018() -> None:
    """`apex.optimizers.FusedAdam(max_grad_norm=...)` and `apex.optimizers.FP16_Optimizer` are those of contrib."""
    import ampcompare.apex.optimizers as optimizers

    param = nn.Parameter(torch.zeros(2))
    assert type(PresentFusedAdam([param], lr=0.1, bias_correction=False, max_grad_norm=1.0)) is FusedAdam
    assert type(PresentFusedAdam([param], lr=0.1, bias_correction=False)) is PresentFusedAdam
    assert optimizers.FP16_Optimizer is FP16_Optimizer
    with pytest.raises(AttributeError):
        optimizers.NoSuchOptimizer  # noqa: B018


OPTIMIZERS: dict[str, Any] = {
    "adam-2018": lambda params: FusedAdam(params, lr=0.01, max_grad_norm=1.0),
    "adam": lambda params: PresentFusedAdam(params, lr=0.01),
    "torch": lambda params: torch.optim.SGD(params, lr=0.01),
}


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_fp16_optimizer_trains_and_resumes(kind: str) -> None:
    """A half model trains by fp32 masters that it follows, and goes on from a state dict bit for bit."""

    def make() -> tuple[nn.Module, FP16_Optimizer]:
        torch.manual_seed(1)
        model = nn.Linear(4, 2).half()
        return model, FP16_Optimizer(
            OPTIMIZERS[kind](model.parameters()), dynamic_loss_scale=True, verbose=False
        )

    def train(model: nn.Module, optimizer: FP16_Optimizer, steps: int) -> float:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = (model(torch.linspace(-1, 1, 8).view(2, 4).half()).float() - 1).square().mean() / 64
            optimizer.backward(loss)
            optimizer.step()
        return loss.item()

    model, optimizer = make()
    first = train(model, optimizer, 1)
    assert train(model, optimizer, 20) < first
    for weight, master in zip(model.parameters(), optimizer.fp32_groups[0], strict=True):
        assert torch.equal(weight, master.half())
    other, resumed = make()
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, 3)
    train(other, resumed, 3)
    for a, b in zip(optimizer.fp32_groups[0], resumed.fp32_groups[0], strict=True):
        assert torch.equal(a, b)
    assert resumed.cur_scale == optimizer.cur_scale


def test_fp16_optimizer_scale() -> None:
    """An overflow skips the step and halves the scale; it doubles after 1000 steps without one; args are refused."""
    model = nn.Linear(2, 1).half()
    optimizer = FP16_Optimizer(
        OPTIMIZERS["adam-2018"](model.parameters()), dynamic_loss_scale=True, verbose=False
    )
    before = model.weight.detach().clone()
    for param in model.parameters():
        param.grad = torch.full_like(param, math.inf)
    optimizer.step()
    assert torch.equal(model.weight, before)
    assert optimizer.cur_scale == optimizer.loss_scale == 2.0**15
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.cur_iter = 1000
    optimizer.step()
    assert optimizer.cur_scale == 2.0**16
    with pytest.raises(SystemError, match="dynamic_loss_args"):
        FP16_Optimizer(
            OPTIMIZERS["torch"](model.parameters()), dynamic_loss_scale=True, dynamic_loss_args={"x": 1}
        )


def test_internals_that_scripts_touch() -> None:
    """Overflow buffers can be read and set, and `applier` casts what it says."""
    scaler = LossScaler("dynamic")
    scaler._overflow_buf = torch.ones(1, dtype=torch.int32)
    assert scaler.update_scale()
    optimizer = PresentFusedAdam([nn.Parameter(torch.zeros(2))])
    assert optimizer._dummy_overflow_buf.tolist() == [0]
    assert optimizer._dummy_overflow_buf.dtype is torch.int32
    batch = {"x": [torch.ones(2), "text", torch.ones(1, dtype=torch.long)], "n": 3}
    cast = applier(batch, lambda value: to_type(torch.float16, value))
    assert [cast["x"][0].dtype, cast["x"][1], cast["x"][2].dtype, cast["n"]] == [
        torch.float16,
        "text",
        torch.long,
        3,
    ]
