"""fp8 products: their rounding, which layers have them, and what is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from ampcompare.backends import fp8 as description
from ampcompare.backends.library import Library
from ampcompare.base.errors import BackendUnavailable, UnsupportedCombination
from ampcompare.training.precision.base import make_precision
from ampcompare.training.precision.cpu_half import EmulatedHalf

LACKS = description.LIBRARY.missing()
needs_torchao = pytest.mark.skipif(bool(LACKS), reason=LACKS or "-")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 10))


def rounded(value: Tensor, dtype: torch.dtype, dim: int | None) -> Tensor:
    """The fp32 values of a tensor in fp8, with one scale or one, a power of two, for each slice along `dim`."""
    largest = value.abs().amax() if dim is None else value.abs().amax(dim, keepdim=True)
    scale = (torch.finfo(dtype).max / largest.double().clamp(min=1e-12)).float()
    if dim is not None:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    return (value.float() * scale).to(dtype).float() / scale


@needs_torchao
@pytest.mark.parametrize("over", ["native:bf16", "half:dtype=bf16"])
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("emulate_half", [False, True])
def test_the_products_are_those_of_the_formula(scaling: str, over: str, emulate_half: bool) -> None:
    """Forward and both backward products take rounded operands, multiply them in fp32 and round once to bf16."""
    torch.manual_seed(0)
    layer, x = nn.Linear(16, 32, bias=False), torch.randn(8, 16)
    upstream = torch.randn(8, 32).bfloat16()
    weight = layer.weight.detach().clone() if over.startswith("native") else layer.weight.detach().bfloat16()
    precision = make_precision(f"fp8:{scaling},over={over}")
    (model,), (optimizer,) = precision.prepare([nn.Sequential(layer)], [SGD(layer.parameters(), lr=1.0)])
    with EmulatedHalf(torch.bfloat16) if emulate_half else torch.enable_grad():
        with precision.autocast():
            y = model(x)
            loss = (y.float() * upstream.float()).sum()
        precision.backward(loss, [optimizer])
    rows = scaling == "rowwise"
    of_gradient = E4M3 if rows else E5M2
    wide = x.bfloat16()
    expected = (rounded(wide, E4M3, -1 if rows else None) @ rounded(weight, E4M3, -1 if rows else None).T).bfloat16()
    assert torch.equal(y.float(), expected.float())
    gradient = rounded(upstream, of_gradient, 0 if rows else None).T @ rounded(wide, E4M3, 0 if rows else None)
    (param,) = precision.unscale(optimizer)
    assert param.grad is not None
    torch.testing.assert_close(param.grad.float(), gradient.bfloat16().float(), rtol=2**-8, atol=0)


def in_blocks(value: Tensor, dim: int) -> Tensor:
    """The fp32 values of a tensor in MXFP8: of each 32 along `dim`, e4m3 times a power of two that clips none."""
    moved = value.float().movedim(dim, -1)
    size = moved.shape[-1]
    blocks = nn.functional.pad(moved, (0, -size % 32)).unflatten(-1, (-1, 32))
    scale = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax(-1, keepdim=True).double() / 448))).float()
    return ((blocks / scale).to(E4M3).float() * scale).flatten(-2)[..., :size].movedim(-1, dim)


@needs_torchao
@pytest.mark.parametrize("over", ["native:bf16", "half:dtype=bf16"])
@pytest.mark.parametrize("emulate_half", [False, True])
@pytest.mark.parametrize("shape", [(64, 64, 32), (7, 40, 24)])
def test_products_in_mxfp8_are_those_of_the_formula(shape: tuple[int, int, int], over: str, emulate_half: bool) -> None:
    """Blocks lie along what a product sums over, the batch for the gradient of the weight."""
    rows, inside, outside = shape
    torch.manual_seed(0)
    layer, x = nn.Linear(inside, outside, bias=False), torch.randn(rows, inside).bfloat16().requires_grad_()
    upstream = torch.randn(rows, outside).bfloat16()
    weight = layer.weight.detach().bfloat16()
    precision = make_precision(f"fp8:mxfp8,align=8,over={over}")
    (model,), (optimizer,) = precision.prepare([nn.Sequential(layer)], [SGD(layer.parameters(), lr=1.0)])
    with EmulatedHalf(torch.bfloat16) if emulate_half else torch.enable_grad():
        with precision.autocast():
            y = model(x)
            loss = (y.float() * upstream.float()).sum()
        precision.backward(loss, [optimizer])
    assert torch.equal(y.float(), (in_blocks(x, 1) @ in_blocks(weight, 1).T).bfloat16().float())
    (param,) = precision.unscale(optimizer)
    assert param.grad is not None
    assert x.grad is not None
    into_weight = in_blocks(upstream, 0).T @ in_blocks(x, 0)
    assert torch.equal(param.grad.float(), into_weight.bfloat16().float())
    assert torch.equal(x.grad.float(), (in_blocks(upstream, 1) @ in_blocks(weight, 0)).bfloat16().float())
    assert precision.emulated == "fp8"


@needs_torchao
@pytest.mark.parametrize("arm", ["fp8", "fp8:mxfp8", "fp8:mxfp8,over=half:dtype=bf16"])
def test_layers_that_are_not_converted_are_named(arm: str) -> None:
    """A head of 10 classes, convolutions and attention stay in bf16, the projection inside attention too."""
    model = nn.ModuleDict({"conv": nn.Conv2d(1, 4, 3), "attend": nn.MultiheadAttention(16, 2), "net": net()})
    precision = make_precision(arm)
    (prepared,), _ = precision.prepare([model], [SGD(model.parameters(), lr=1.0)])
    assert precision.notes == (
        "fp8 is not in: conv (Conv2d), attend (MultiheadAttention), "
        "attend.out_proj (NonDynamicallyQuantizableLinear), net.2 (32 to 10, not multiples of 16)",
    )
    if arm == "fp8":
        kinds = {name: type(module).__name__ for name, module in prepared.named_modules()}
        assert [name for name, kind in kinds.items() if kind == "Float8Linear"] == ["net.0"]


@needs_torchao
def test_what_the_arm_underneath_keeps_in_fp32_is_not_converted() -> None:
    """A kept module, by name or type, computes in fp32 with all that is inside of it."""
    precision: Any = make_precision("fp8:rowwise,align=2")
    precision._kept = ["*.0", "ModuleList"]
    model = nn.ModuleDict({"head": nn.ModuleList([nn.Linear(16, 16)]), "net": net()})
    (prepared,), _ = precision.prepare([model], [SGD(model.parameters(), lr=1.0)])
    kinds = {name: type(module).__name__ for name, module in prepared.named_modules()}
    assert [name for name, kind in kinds.items() if kind == "Float8Linear"] == ["net.2"]


@needs_torchao
def test_a_model_without_such_layers_is_refused() -> None:
    """A bf16 run must not be called fp8."""
    model = nn.Sequential(nn.Linear(4, 3))
    with pytest.raises(UnsupportedCombination, match=r"multiples of 16, and this model has none; use half:dtype=bf16"):
        make_precision("fp8:rowwise,over=half:dtype=bf16").prepare([model], [SGD(model.parameters(), lr=1.0)])


@needs_torchao
@pytest.mark.parametrize(
    ("capability", "scaling", "emulated"),
    [((8, 0), "tensorwise", "fp8"), ((8, 9), "tensorwise", ""), ((8, 9), "rowwise", "fp8"), ((9, 0), "rowwise", "")],
)
def test_hardware_is_used_where_it_is(
    capability: tuple[int, int], scaling: str, emulated: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels are asked for from the compute capability that has them, with padding of the batch; else emulation."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    precision: Any = make_precision(f"fp8:{scaling}", device="cuda:0")
    assert precision.emulated == emulated
    model = net()
    (prepared,), _ = precision.prepare([model], [SGD(model.parameters(), lr=1.0)])
    assert prepared[0].config.emulate is bool(emulated)
    assert prepared[0].config.pad_inner_dim is not bool(emulated)
    if not emulated:
        with pytest.raises(BackendUnavailable, match="multiples of 16, but align is 8"):
            make_precision(f"fp8:{scaling},align=8", device="cuda:0")


@needs_torchao
def test_a_torchao_without_mxfp8_for_linear_layers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that lacks the module, or a name in it, is refused with what to type."""
    for module, said in (("torchao.no_such", "cannot be imported"), ("torchao.float8", "emulates MXFP8 otherwise")):
        monkeypatch.setattr(
            "ampcompare.training.precision.fp8.MXFP8_LIBRARY", Library((module,), ("torchao",), "pip install -U")
        )
        with pytest.raises(BackendUnavailable, match=rf"{said}.*; pip install -U"):
            make_precision("fp8:mxfp8")
