"""Fused norms against fp64 formulas, forward and backward, in all dtypes, memory-efficient and plain."""

import copy
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ampcompare.apex.normalization import FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm
from ampcompare.apex.normalization import fused_layer_norm as functional
from tests.covering import covering

SHAPES = [((4, 6), 6), ((2, 3, 4), (3, 4)), ((5,), [5]), ((2, 1, 3, 1), (3, 1))]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def exact(
    values: Tensor, weight: Tensor | None, bias: Tensor | None, dims: tuple[int, ...], eps: float, rms: bool
) -> Tensor:
    values = values if rms else values - values.mean(dims, keepdim=True)
    result = values / (values.square().mean(dims, keepdim=True) + eps).sqrt()
    result = result if weight is None else result * weight
    return result if bias is None else result + bias


@covering(
    {
        "shape,normalized": SHAPES,
        "dtype": list(TOLERANCE),
        "affine,memory_efficient,rms": list(product([True, False], repeat=3)),  # each a function of its own
    }
)
def test_forward_and_backward(
    shape: tuple[int, ...],
    normalized: Any,
    dtype: torch.dtype,
    affine: bool,
    memory_efficient: bool,
    rms: bool,
) -> None:
    """Output, input gradient and parameter gradients are those of fp64 arithmetic, in the dtype that went in."""
    torch.manual_seed(0)
    kind = FusedRMSNorm if rms else FusedLayerNorm
    module = kind(normalized, elementwise_affine=affine, memory_efficient=memory_efficient).to(dtype)
    for parameter in module.parameters():
        torch.nn.init.uniform_(parameter, 0.5, 1.5)
    values = torch.randn(shape).to(dtype).requires_grad_()
    direction = torch.randn(shape).to(dtype)
    output = module(values)
    assert output.dtype is dtype
    output.backward(direction)

    wide = values.detach().double().requires_grad_()
    twins = {name: p.detach().double().requires_grad_() for name, p in module.named_parameters()}
    dims = tuple(range(-len(module.normalized_shape), 0))
    expected = exact(wide, twins.get("weight"), twins.get("bias"), dims, 1e-5, rms)
    expected.backward(direction.double())
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)
    assert values.grad.dtype is dtype
    torch.testing.assert_close(values.grad.double(), wide.grad, rtol=tolerance * 4, atol=tolerance * 4)
    for name, parameter in module.named_parameters():
        assert parameter.grad.dtype is dtype
        torch.testing.assert_close(
            parameter.grad.double(), twins[name].grad, rtol=tolerance * 4, atol=tolerance * 4
        )


@pytest.mark.parametrize("kind,mixed", [(FusedLayerNorm, False), (MixedFusedLayerNorm, True)])
@pytest.mark.parametrize("rms", [True, False])
@pytest.mark.parametrize("memory_efficient", [True, False])
def test_output_dtypes(kind: Any, mixed: bool, rms: bool, memory_efficient: bool) -> None:
    """With fp16 input and fp32 parameters the plain classes give fp16 and the mixed ones fp32; both train."""
    if rms:
        kind = MixedFusedRMSNorm if mixed else FusedRMSNorm
    module = kind(4, memory_efficient=memory_efficient)
    values = torch.randn(3, 4).half().requires_grad_()
    output = module(values)
    assert output.dtype is (torch.float32 if mixed else torch.float16)
    output.float().square().sum().backward()
    assert values.grad.dtype is torch.float16
    assert module.weight.grad.dtype is torch.float32


def test_parameters_and_representation() -> None:
    """Weights start as ones, biases as zeros, of the normalized shape; without affine both are registered as None."""
    layer, rms = FusedLayerNorm(5), FusedRMSNorm([2, 3])
    assert layer.state_dict().keys() == {"weight", "bias"}
    assert rms.state_dict().keys() == {"weight"}
    assert torch.equal(layer.weight, torch.ones(5))
    assert torch.equal(layer.bias, torch.zeros(5))
    assert rms.weight.shape == rms.normalized_shape == (2, 3)
    bare = FusedLayerNorm(5, elementwise_affine=False)
    assert bare.weight is None
    assert bare.bias is None
    assert list(bare.parameters()) == []
    assert repr(bare) == "FusedLayerNorm(torch.Size([5]), eps=1e-05, elementwise_affine=False)"
    assert torch.equal(copy.deepcopy(layer)(torch.arange(5.0)), layer(torch.arange(5.0)))


@pytest.mark.parametrize("kind", [MixedFusedLayerNorm, MixedFusedRMSNorm])
def test_mixed_classes_are_always_affine(kind: Any) -> None:
    """`elementwise_affine` warns, False is a RuntimeError, and other unknown keywords are ignored."""
    with pytest.warns(UserWarning, match="always affine"):
        assert kind(3, elementwise_affine=True).weight is not None
    with (
        pytest.warns(UserWarning, match="always affine"),
        pytest.raises(RuntimeError, match="elementwise_affine"),
    ):
        kind(3, elementwise_affine=False)
    assert kind(3, bias=False, memory_efficient=True).memory_efficient is True


def test_functional_forms() -> None:
    """The functions default to eps 1e-6, and agree with torch's layer norm and RMS norm."""
    values = torch.randn(3, 4) * 1e-3
    weight, bias = torch.rand(4), torch.rand(4)
    torch.testing.assert_close(
        functional.fused_layer_norm(values, (4,)), F.layer_norm(values, (4,), eps=1e-6)
    )
    torch.testing.assert_close(functional.fused_rms_norm(values, (4,)), F.rms_norm(values, (4,), eps=1e-6))
    for form in (functional.fused_layer_norm_affine, functional.mixed_dtype_fused_layer_norm_affine):
        expected = F.layer_norm(values, (4,), weight, bias, 1e-6)
        torch.testing.assert_close(form(values, weight, bias, (4,)), expected)
    for form in (functional.fused_rms_norm_affine, functional.mixed_dtype_fused_rms_norm_affine):
        torch.testing.assert_close(form(values, weight, (4,)), F.rms_norm(values, (4,), weight, 1e-6))


@pytest.mark.parametrize("kind", [FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm])
def test_autocast_sets_the_dtype(kind: Any) -> None:
    """Under autocast the input and the parameters are cast, so all classes give the autocast dtype; fp64 stays."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert kind(4)(torch.randn(2, 4)).dtype is torch.bfloat16
        assert kind(4).double()(torch.randn(2, 4, dtype=torch.float64)).dtype is torch.float64


@pytest.mark.parametrize("kind", [FusedLayerNorm, FusedRMSNorm])
@pytest.mark.parametrize("memory_efficient", [True, False])
def test_memory_efficient_saves_no_input(kind: Any, memory_efficient: bool) -> None:
    """The memory-efficient form keeps no tensor with the input's values for backward; the plain form does."""
    values = torch.randn(8, 16, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        kind(16, memory_efficient=memory_efficient)(values)
    keeps_input = any(t.shape == values.shape and torch.equal(t, values) for t in saved)
    assert keeps_input is not memory_efficient


@pytest.mark.parametrize("kind", [FusedLayerNorm, FusedRMSNorm])
def test_memory_efficient_with_zero_weights_stays_finite(kind: Any) -> None:
    """A weight of exactly 0 leaves nothing to divide by; gradients are finite all the same."""
    module = kind(4, memory_efficient=True)
    with torch.no_grad():
        module.weight[1] = 0.0
    values = torch.randn(3, 4, requires_grad=True)
    module(values).square().sum().backward()
    assert values.grad is not None
    assert torch.isfinite(values.grad).all()
    assert torch.isfinite(module.weight.grad).all()


APPLIED = {
    "FusedLayerNormFunction": functional.fused_layer_norm,
    "FusedLayerNormAffineFunction": functional.fused_layer_norm_affine,
    "FusedLayerNormAffineMixedDtypesFunction": functional.mixed_dtype_fused_layer_norm_affine,
    "FusedRMSNormFunction": functional.fused_rms_norm,
    "FusedRMSNormAffineFunction": functional.fused_rms_norm_affine,
    "FusedRMSNormAffineMixedDtypesFunction": functional.mixed_dtype_fused_rms_norm_affine,
}


@covering(
    {
        "name": list(APPLIED),
        "memory_efficient": [(), (False,), (True,)],
        "dtypes": [(torch.float32, torch.float32), (torch.float16, torch.float32)],
    }
)
def test_autograd_functions(name: str, memory_efficient: tuple[bool, ...], dtypes: Any) -> None:
    """What scripts call by `apply` has output and gradients of the function of that kind, dtypes included."""
    torch.manual_seed(0)
    count = 0 if "Affine" not in name else 1 if "RMS" in name else 2
    leaves = [torch.randn(4, 2, 3).to(dtypes[0])] + [
        torch.rand(2, 3).add(0.5).to(dtypes[1]) for _ in range(count)
    ]
    ours, theirs = ([leaf.clone().requires_grad_() for leaf in leaves] for _ in range(2))
    output = getattr(functional, name).apply(*ours, (2, 3), 1e-5, *memory_efficient)
    expected = APPLIED[name](*theirs, (2, 3), 1e-5)
    assert output.dtype is expected.dtype
    torch.testing.assert_close(output, expected)
    direction = torch.randn(4, 2, 3).to(output.dtype)
    output.backward(direction)
    expected.backward(direction)
    tolerance = 1e-2 if output.dtype is torch.float16 else 2e-3 if dtypes[0] is torch.float16 else 1e-5
    for a, b in zip(ours, theirs, strict=True):
        assert b.grad is not None
        assert a.grad.dtype is a.dtype
        torch.testing.assert_close(a.grad, b.grad, rtol=tolerance, atol=tolerance)


def test_a_constant_row_of_half_stays_finite() -> None:
    """A constant row in fp16 with an eps that fp16 rounds to 0 gives zeros, where a half-precision norm gives NaN."""
    row = torch.full((1, 4), 3.0, dtype=torch.float16)
    weight, bias = torch.ones(4, dtype=torch.float16), torch.zeros(4, dtype=torch.float16)
    output = functional.FusedLayerNormAffineFunction.apply(row, weight, bias, (4,), 1e-12)
    assert output.tolist() == [[0.0] * 4]
