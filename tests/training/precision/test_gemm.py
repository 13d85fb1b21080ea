"""Products of linear layers in formats of their own: their numbers, which layers have them, and what is refused."""

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from ampcompare.backends import fp8 as fp8_description
from ampcompare.base.errors import ConfigError, UnsupportedCombination
from ampcompare.base.tensors.products import OperationMode
from ampcompare.training.precision import linear_products, torchao_products
from ampcompare.training.precision.base import make_precision
from ampcompare.training.precision.cpu_half import EmulatedHalf
from ampcompare.training.precision.gemm import Gemm
from ampcompare.training.precision.linear_products import ProductRounding

E4M3 = torch.float8_e4m3fn
LACKS = fp8_description.LIBRARY.why_missing()
needs_torchao = pytest.mark.skipif(bool(LACKS), reason=LACKS or "-")


class Net(nn.Module):
    """A network that makes its layers in another order than it runs them, with dropout and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(24, 5)
        self.first = nn.Linear(20, 40)
        self.norm = nn.BatchNorm1d(40)
        self.second = nn.Linear(40, 24)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.dropout(self.norm(self.first(x)).relu(), 0.2, self.training)
        result: Tensor = self.head(self.second(hidden).relu())
        return result


def batch(step: int) -> Tensor:
    return torch.randn(12, 20, generator=torch.Generator().manual_seed(step))


def start(arm: str, model: nn.Module | None = None) -> tuple[Gemm, nn.Module, Any]:
    torch.manual_seed(0)
    precision: Any = make_precision(arm)
    model = Net() if model is None else model
    (model,), (optimizer,) = precision.prepare([model], [AdamW(model.parameters(), lr=0.01)])
    return precision, model, optimizer


def train(precision: Gemm, model: nn.Module, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        with precision.autocast():
            loss = model(batch(step)).float().square().mean()
        optimizer.zero_grad()
        precision.backward(loss, [optimizer])
        precision.step(optimizer)
        losses.append(loss.item())
    return losses


def weights(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def in_blocks(value: Tensor, dim: int) -> Tensor:
    """The fp32 values of a tensor in MXFP8: of each 32 along `dim`, e4m3 times a power of two that clips none."""
    moved = value.float().movedim(dim, -1)
    size = moved.shape[-1]
    blocks = nn.functional.pad(moved, (0, -size % 32)).unflatten(-1, (-1, 32))
    scale = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax(-1, keepdim=True).double() / 448))).float()
    return ((blocks / scale).to(E4M3).float() * scale).flatten(-2)[..., :size].movedim(-1, dim)


def one_layer(arm: str, rows: int, inside: int, outside: int) -> dict[str, Tensor]:
    """Run a layer without bias forward and backward; return what it got and gave, in bf16."""
    torch.manual_seed(0)
    layer, x = nn.Linear(inside, outside, bias=False), torch.randn(rows, inside).bfloat16().requires_grad_()
    upstream = torch.randn(rows, outside).bfloat16()
    weight = layer.weight.detach().bfloat16()
    precision: Any = make_precision(arm)
    (model,), (optimizer,) = precision.prepare([nn.Sequential(layer)], [SGD(layer.parameters(), lr=1.0)])
    with precision.autocast():
        y = model(x)
        loss = (y.float() * upstream.float()).sum()
    precision.backward(loss, [optimizer])
    (param,) = precision.unscale(optimizer)
    return {"x": x.detach(), "w": weight, "dy": upstream, "fprop": y, "dgrad": x.grad, "wgrad": param.grad}


@pytest.mark.parametrize("over", ["native:bf16", "half:bf16"])
@pytest.mark.parametrize("emulate_half", [False, True])
@pytest.mark.parametrize("shape", [(64, 64, 32), (7, 40, 24)])
@pytest.mark.parametrize("name", ["gemm:mxfp8,keep=none", "fp8:mxfp8"])
def test_products_are_those_of_the_formula(
    shape: tuple[int, int, int], over: str, emulate_half: bool, name: str
) -> None:
    """Blocks lie along what a product sums over: input features, output features, or rows of the batch."""
    keep = "" if "keep" in name else ",keep=none"
    with EmulatedHalf(torch.bfloat16) if emulate_half else torch.enable_grad():
        if name == "fp8:mxfp8":  # a name of gemm:mxfp8, whose layers have any size
            with pytest.raises(UnsupportedCombination, match="is the only linear layer"):
                one_layer(f"{name},over={over}", *shape)
            return
        found = one_layer(f"{name}{keep},over={over}", *shape)
    x, w, dy = (found[one].detach() for one in ("x", "w", "dy"))
    expected = {
        "fprop": in_blocks(x, 1) @ in_blocks(w, 1).T,
        "dgrad": in_blocks(dy, 1) @ in_blocks(w, 0),
        "wgrad": in_blocks(dy, 0).T @ in_blocks(x, 0),
    }
    for role, product in expected.items():
        assert torch.equal(found[role].float(), product.bfloat16().float()), role


@needs_torchao
def test_all_three_products_of_a_layer_are_torchaos() -> None:
    linear = pytest.importorskip("torchao.prototype.moe_training.mxfp8_linear")
    found = one_layer("gemm:mxfp8,keep=none", 64, 96, 32)
    x, w = (found[name].detach().float().requires_grad_() for name in ("x", "w"))
    kernels = (linear.MXFP8Dim0CastKernelChoice.TORCH, linear.MXFP8Dim1CastKernelChoice.TORCH)
    mode = (linear.KernelPreference.EMULATED, *kernels, linear.ScaleCalculationMode.RCEIL, False)
    y = linear.mx_mm.apply(x.bfloat16(), w.bfloat16(), E4M3, E4M3, E4M3, 32, *mode)
    y.backward(found["dy"])
    for role, other in (("fprop", y), ("dgrad", x.grad), ("wgrad", w.grad)):
        assert torch.equal(found[role].float(), other.float()), role


@needs_torchao
@pytest.mark.parametrize("scale", ["", ",scale=floor", ",scale=even"])
@pytest.mark.parametrize("shape", [(64, 96, 32), (7, 40, 24)])
def test_torchao_as_the_engine_gives_the_products_of_the_emulation(
    shape: tuple[int, int, int], scale: str
) -> None:
    """On a CPU by its own emulation, at any size; the row says what multiplied and how many results differ."""
    own = one_layer(f"gemm:mxfp8,keep=none{scale}", *shape)
    theirs = one_layer(f"gemm:mxfp8,keep=none,engine=torchao{scale}", *shape)
    assert all(torch.equal(own[role], theirs[role]) for role in ("fprop", "dgrad", "wgrad"))
    precision, model, optimizer = start("gemm:mxfp8,engine=torchao")
    torch.manual_seed(1)
    losses = train(precision, model, optimizer, range(3))
    (note,) = (note for note in precision.notes if "torchao" in note)
    assert re.fullmatch(
        r"products by torchao [\d.]+\S*, its emulation: 0 of [1-9][\d,]* results of the first pass differ from "
        "ampcompare's emulation",
        note,
    )
    other, model, optimizer = start("gemm:mxfp8")
    torch.manual_seed(1)
    assert train(other, model, optimizer, range(3)) == losses


@needs_torchao
def test_a_kernel_of_torchao_gets_sizes_that_it_takes_and_is_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a device has one. Here a function stands for it that gives ones."""
    sizes = []

    def multiply(a: Tensor, b: Tensor, *_scales: Any, **_options: Any) -> Tensor:
        sizes.extend([*a.shape, *b.shape])
        return torch.ones(len(a), b.shape[1], dtype=torch.bfloat16)

    monkeypatch.setattr(torchao_products, "has_mxfp8_kernel", lambda device: True)
    monkeypatch.setattr(torch, "_scaled_mm", multiply)
    precision, model, optimizer = start("gemm:mxfp8,engine=torchao")
    train(precision, model, optimizer, range(1))
    assert sizes
    assert all(size % 16 == 0 for size in sizes)
    (note,) = (note for note in precision.notes if "torchao" in note)
    different, compared = (
        int(word.replace(",", "")) for word in re.findall(r"([\d,]+) (?:of|results)", note)
    )
    assert 0.9 * compared < different <= compared


@needs_torchao
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_fp8_is_that_of_torchaos_layers(scaling: str) -> None:
    """Of the arm `fp8`, where the weights are bf16: torchao rounds fp32 weights, from which a kernel gets none."""
    over = "over=half:bf16"
    mine, other = (
        one_layer(f"gemm:{scaling},keep=none,{over}", 32, 64, 48),
        one_layer(f"fp8:{scaling},{over}", 32, 64, 48),
    )
    for role in ("fprop", "dgrad", "wgrad"):
        torch.testing.assert_close(mine[role].float(), other[role].float(), rtol=2**-7, atol=1e-6)
        assert (mine[role].float() == other[role].float()).float().mean() > 0.99, role


@pytest.mark.parametrize("role", ["fprop", "dgrad", "wgrad"])
def test_a_role_changes_its_own_product_alone(role: str) -> None:
    exact = one_layer("gemm:bf16,keep=none", 32, 64, 48)
    one = one_layer(f"gemm:bf16,{role}=nvfp4,keep=none", 32, 64, 48)
    others = one_layer(f"gemm:nvfp4,{role}=bf16,keep=none", 32, 64, 48)
    every = one_layer("gemm:nvfp4,keep=none", 32, 64, 48)
    for name in ("fprop", "dgrad", "wgrad"):
        assert torch.equal(one[name], exact[name]) is (name != role)
        assert torch.equal(others[name], every[name]) is (name != role)
        assert torch.equal(one[name], every[name] if name == role else exact[name])


@pytest.mark.parametrize(
    ("option", "changed"),
    [
        ("scale=even", {"fprop", "dgrad", "wgrad"}),
        ("tiles", {"fprop", "dgrad"}),
        ("rht", {"wgrad"}),
        ("sr", {"dgrad", "wgrad"}),
    ],
)
def test_a_switch_changes_the_products_that_it_names(option: str, changed: set[str]) -> None:
    plain, other = (one_layer(f"gemm:mxfp4,keep=none{more}", 32, 64, 48) for more in ("", f",{option}"))
    assert {
        role for role in ("fprop", "dgrad", "wgrad") if not torch.equal(plain[role], other[role])
    } == changed


def test_squares_let_both_products_of_a_weight_multiply_the_same_numbers() -> None:
    """By what a product with the unit matrix gives back of the weight."""
    torch.manual_seed(0)
    layer = nn.Linear(32, 32, bias=False)
    for switch, equal in ((",tiles", True), ("", False)):
        copied = copy.deepcopy(layer)
        precision: Any = make_precision(f"gemm:nvfp4,keep=none{switch}")
        (model,), _ = precision.prepare([nn.Sequential(copied)], [SGD(copied.parameters(), lr=1.0)])
        unit = torch.eye(32).requires_grad_()
        with precision.autocast():
            y = model(unit)
        y.backward(torch.eye(32).bfloat16())
        assert unit.grad is not None
        assert torch.equal(y.float(), unit.grad.t()) is equal


def test_a_weight_in_squares_is_rounded_once_for_both_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """And gives the products that two roundings give."""
    rounded = []
    original = linear_products.rounded_values_and_matrix_scale

    def count(matrix: Tensor, *args: Any, **options: Any) -> Any:
        rounded.append(options["square"])
        return original(matrix, *args, **options)

    monkeypatch.setattr(linear_products, "rounded_values_and_matrix_scale", count)
    shared = one_layer("gemm:nvfp4,tiles,keep=none", 32, 64, 48)
    assert rounded.count(True) == 1
    monkeypatch.setattr(ProductRounding, "shares_weight_tiles", lambda one, other: False)
    apart = one_layer("gemm:nvfp4,tiles,keep=none", 32, 64, 48)
    assert rounded.count(True) == 3
    assert all(torch.equal(shared[role], apart[role]) for role in ("fprop", "dgrad", "wgrad"))


def test_watching_changes_no_number_and_no_random_bit() -> None:
    """The ledger of some steps computes their figures on the way."""

    class Seeing(OperationMode):
        def see_operation(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
            pass

    losses = []
    for watches in (False, True):
        precision, model, optimizer = start("gemm:nvfp4,sr,rht,tiles")
        with Seeing() if watches else torch.enable_grad():
            losses.append(train(precision, model, optimizer, range(2)))
    assert losses[0] == losses[1]


def test_the_layer_that_runs_last_stays_in_bf16_and_the_row_says_so() -> None:
    """Whatever the order in which layers are made; finding it changes no random number and no statistic."""
    precision, model, optimizer = start("gemm:nvfp4")
    losses = train(precision, model, optimizer, range(3))
    assert precision.notes == ("kept in bf16: head, which runs last",)
    named, other, its = start("gemm:nvfp4,keep=head")
    assert train(named, other, its, range(3)) == losses
    assert named.notes == ("kept in bf16: head",)
    assert all(map(torch.equal, weights(model), weights(other)))
    assert all(map(torch.equal, model.buffers(), other.buffers()))
    everything, third, last = start("gemm:nvfp4,keep=none")
    assert train(everything, third, last, range(3)) != losses
    assert everything.notes == ()


def test_finding_the_last_layer_leaves_the_arguments_of_a_model_alone() -> None:
    """A generator that it draws from, and a tensor that it changes in place."""

    class Drawing(Net):
        def forward(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
            x.add_(torch.randn(x.shape, generator=generator))
            return super().forward(x)

    found = []
    for keep in ("", ",keep=head"):
        torch.manual_seed(0)
        precision, model, _ = start(f"gemm:nvfp4{keep}", Drawing())
        x, generator = batch(0), torch.Generator().manual_seed(7)
        with precision.autocast():
            found.append(model(x, generator=generator).detach())
        found.append(x)
    assert precision.notes == ("kept in bf16: head",)
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])


def test_an_evaluation_before_the_training_decides_nothing() -> None:
    """A network whose last layer in a training is another one than in an evaluation."""

    class Auxiliary(Net):
        def __init__(self) -> None:
            super().__init__()
            self.auxiliary = nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            result = super().forward(x)
            return self.auxiliary(result) if self.training else result

    precision, model, optimizer = start("gemm:mxfp4", Auxiliary())
    model.eval()
    with torch.no_grad(), precision.autocast():
        model(batch(0))
    assert precision.notes == ("kept in bf16: head, which runs last",)
    model.train()
    train(precision, model, optimizer, range(1))
    assert precision.notes == ("kept in bf16: auxiliary, which runs last",)


@pytest.mark.parametrize(
    ("arm", "model", "error", "match"),
    [
        (
            "gemm:mxfp8",
            nn.Sequential(nn.Conv2d(1, 2, 3)),
            UnsupportedCombination,
            "linear layers .* has none",
        ),
        (
            "gemm:mxfp8",
            nn.Sequential(nn.Linear(20, 3)),
            UnsupportedCombination,
            "only linear layer.*keep=none",
        ),
        ("gemm:mxfp8,keep=haed", Net(), ConfigError, "keep=haed matches no module.*near are head"),
    ],
)
def test_what_would_change_nothing_is_refused(
    arm: str, model: nn.Module, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        train(*start(arm, model), range(1))


def test_what_is_left_out_is_named() -> None:
    """Convolutions, attention with the projection inside of it, and subclasses that multiply by themselves."""

    class Own(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return nn.functional.linear(input, self.weight)

    model = nn.ModuleDict(
        {"conv": nn.Conv2d(1, 4, 3), "attend": nn.MultiheadAttention(16, 2), "own": Own(3, 3), "net": Net()}
    )
    precision: Any = make_precision("gemm:mxfp8,keep=net.head")
    precision.prepare([model], [SGD(model.parameters(), lr=1.0)])
    assert precision.notes == (
        "kept in bf16: net.head",
        "gemm is not in: conv (Conv2d), attend (MultiheadAttention), "
        "attend.out_proj (NonDynamicallyQuantizableLinear), own (Own)",
    )


def test_what_the_arm_underneath_keeps_in_fp32_stays_in_fp32() -> None:
    kept = start("gemm:nvfp4,keep=head,over=native:bf16+keep_fp32=second")
    plain = start("native:bf16,keep_fp32=second")
    for precision, model, _ in (kept, plain):
        seen: list[Tensor] = []
        model.get_submodule("second").register_forward_hook(lambda module, args, y, seen=seen: seen.append(y))
        model.eval()
        with precision.autocast():
            model(batch(0))
        assert seen[0].dtype is torch.float32


def test_random_rounding_resumes_to_the_last_bit() -> None:
    """From the state of the precision, in another process: weights, state of the optimizer, and those bits."""
    precision, model, optimizer = start("gemm:nvfp4,sr")
    train(precision, model, optimizer, range(2))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), precision.state_dict()))
    noise = torch.get_rng_state()
    expected = train(precision, model, optimizer, range(2, 5))
    again, other, its = start("gemm:nvfp4,sr")
    other.load_state_dict(saved[0])
    its.load_state_dict(saved[1])
    again.load_state_dict(saved[2])
    torch.set_rng_state(noise)
    assert train(again, other, its, range(2, 5)) == expected
    assert all(map(torch.equal, weights(model), weights(other)))
    assert "gemm_passes" in saved[2]
    assert start("gemm:nvfp4")[0].state_dict() == {}


def test_a_copy_of_a_model_multiplies_its_own_weights() -> None:
    precision, model, optimizer = start("gemm:mxfp8")
    train(precision, model, optimizer, range(1))
    model.eval()
    twin = copy.deepcopy(model)
    with torch.no_grad(), precision.autocast():
        before = model(batch(0))
        assert torch.equal(twin(batch(0)), before)
        twin.get_parameter("first.weight").zero_()
        assert not torch.equal(twin(batch(0)), before)
        assert torch.equal(model(batch(0)), before)


@pytest.mark.slow
# TorchDynamo reads it
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("arm", ["gemm:mxfp8", "gemm:nvfp4,sr,rht,tiles"])
def test_a_compiled_model_trains_alike(arm: str) -> None:
    """torch.compile leaves the layers out of its programs, which run as they do without it."""
    losses = []
    for compiles in (False, True):
        precision, model, optimizer = start(arm)
        called = torch.compile(model, backend="eager") if compiles else model
        losses.append(train(precision, called, optimizer, range(3)))  # type: ignore[arg-type]
    assert losses[0] == losses[1]


def test_a_model_that_cannot_be_copied_is_refused_where_the_guess_was_wrong() -> None:
    """The layer that was made last is guessed, and the first step shows it."""
    model = Net()
    model.uncopied = torch.zeros(1, requires_grad=True) * 2  # type: ignore[assignment]
    with pytest.raises(UnsupportedCombination, match=r"took second, and head ran last\. Add keep=head"):
        train(*start("gemm:mxfp8", model), range(1))
    model = Net()
    model.head, model.last = nn.Identity(), model.head
    model.forward = lambda x: model.last(model.second(model.first(x)))  # type: ignore[assignment]
    model.uncopied = torch.zeros(1, requires_grad=True) * 2  # type: ignore[assignment]
    precision, _, optimizer = start("gemm:mxfp8", model)
    train(precision, model, optimizer, range(2))
    assert precision.notes == ("kept in bf16: last, which runs last",)


def test_an_empty_batch_passes() -> None:
    precision, model, _ = start("gemm:nvfp4,keep=none")
    model.eval()
    with torch.no_grad(), precision.autocast():
        assert model(torch.zeros(0, 20)).shape == (0, 5)
