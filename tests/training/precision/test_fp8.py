"""fp8 products: their rounding, which layers have them, and what is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from ampcompare.backends import fp8 as description
from ampcompare.base.errors import BackendUnavailable, UnsupportedCombination
from ampcompare.training.precision.base import make_precision
from ampcompare.training.precision.cpu_half import EmulatedHalf

LACKS = description.LIBRARY.why_missing()
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
@pytest.mark.parametrize("over", ["native:bf16", "half:bf16"])
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
    expected = (
        rounded(wide, E4M3, -1 if rows else None) @ rounded(weight, E4M3, -1 if rows else None).T
    ).bfloat16()
    assert torch.equal(y.float(), expected.float())
    gradient = rounded(upstream, of_gradient, 0 if rows else None).T @ rounded(
        wide, E4M3, 0 if rows else None
    )
    (param,) = precision.unscale(optimizer)
    assert param.grad is not None
    torch.testing.assert_close(param.grad.float(), gradient.bfloat16().float(), rtol=2**-8, atol=0)


@needs_torchao
@pytest.mark.parametrize("arm", ["fp8", "fp8:rowwise,over=half:bf16"])
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
    with pytest.raises(
        UnsupportedCombination, match=r"multiples of 16, and this model has none; use half:bf16"
    ):
        make_precision("fp8:rowwise,over=half:bf16").prepare([model], [SGD(model.parameters(), lr=1.0)])


@needs_torchao
@pytest.mark.parametrize(
    ("capability", "scaling", "emulated"),
    [
        ((8, 0), "tensorwise", "fp8"),
        ((8, 9), "tensorwise", ""),
        ((8, 9), "rowwise", "fp8"),
        ((9, 0), "rowwise", ""),
    ],
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
