"""The ledger of ampcompare's own loop: what ran is what each arm declares, in unchanged bits, and lies are seen."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from ampcompare.backends.arm import Arm
from ampcompare.backends.catalog import BUILT_IN
from ampcompare.results.analysis.pairing.declared import role_comparisons
from ampcompare.results.records.ledger import Ledger
from ampcompare.training.ledger import TrainingLedgerRecorder
from ampcompare.training.loop import update
from ampcompare.training.parallel.replication import SingleProcess
from ampcompare.training.precision import linear_products
from ampcompare.training.precision.base import make_precision
from ampcompare.training.precision.cpu_half import choose_cpu_half_mode_and_context
from tests.covering import covering

CPU = torch.device("cpu")
ARMS = [
    arm.text
    for name, spec in BUILT_IN.items()
    if name not in ("fsdp", "horovod", "accelerate", "fabric", "mmengine", "fp8")
    for arm in spec.contract
]
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda params: SGD(params, lr=0.05),
    "momentum": lambda params: SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: AdamW(params, lr=0.01, eps=1e-4),
}


def loss_of(models: list[nn.Module], batch: Tensor) -> Tensor:
    loss: Tensor = models[0](batch).float().square().mean()
    return loss


def train(
    arm: str,
    optimizer: str = "momentum",
    passes: int = 1,
    *,
    watched: bool = True,
    steps: int = 3,
    scale: float = 1.0,
) -> tuple[Ledger, list[Tensor]]:
    """Train a small network; return what was seen, and the weights."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    precision = make_precision(arm)
    (model,), (made,) = precision.prepare([model], [OPTIMIZERS[optimizer](model.parameters())])
    keeper = TrainingLedgerRecorder([model], 20)
    make = keeper.make_recorded_update(update) if watched else update
    _, emulation = choose_cpu_half_mode_and_context("auto", precision.half_dtype, CPU)
    scales: tuple[float, ...] = ()
    with emulation:
        for step in range(steps):
            batches = [
                scale * torch.linspace(-1, 1, 24).reshape(6, 4) * (step + part + 1) for part in range(passes)
            ]
            _, _, outcome = make([model], [made], precision, SingleProcess(), loss_of, batches, None)
            scales = outcome.loss_scales
    ledger = keeper.look.read_ledger_from_device(loss_scale=scales[0] if scales else None)
    return ledger, [param.detach().clone() for param in model.parameters()]


def differences(arm: str, ledger: Ledger) -> list[str]:
    return [role.difference_text for role in role_comparisons(Arm.parse(arm).roles, ledger) if role.differs]


@covering({"arm": ARMS, "optimizer": list(OPTIMIZERS), "passes": [1, 2]})
def test_what_runs_is_what_is_declared(arm: str, optimizer: str, passes: int) -> None:
    """Every contract arm, with and without state of the optimizer, and with micro-batches."""
    ledger, _ = train(arm, optimizer, passes)
    assert differences(arm, ledger) == []
    assert ledger.forward
    assert ledger.backward
    assert bool(ledger.accumulated) == (passes == 2)
    assert bool(ledger.types_of_groups("state")) == (optimizer != "sgd")


@pytest.mark.parametrize("arm", ARMS)
def test_looking_changes_no_bit(arm: str) -> None:
    for seen, plain in zip(train(arm)[1], train(arm, watched=False)[1], strict=True):
        assert torch.equal(seen, plain)


@pytest.mark.parametrize(
    ("arm", "ran", "role", "text"),
    [
        ("native:bf16,state=bf16", "native:bf16", "state", "state is fp32, bf16 was asked"),
        ("half:bf16,kahan", "half:bf16,state=bf16", "rounding", "rounding is nearest, kahan was asked"),
        (
            "half:bf16,rounding=stochastic",
            "half:bf16,state=bf16",
            "rounding",
            "rounding is nearest, stochastic was",
        ),
        ("half:bf16,masters=fp32", "half:bf16", "masters", "masters are none, fp32 was asked"),
        ("half:bf16", "half:bf16,masters=fp32", "masters", "masters are fp32, none was asked"),
        ("half:bf16,state=bf16", "half:bf16", "gradients", "gradients are bf16, fp32 was asked"),
        ("native:bf16", "fp32", "forward products", "products are fp32, bf16 was asked"),
        ("fp32", "native:bf16", "forward products", "products are bf16, fp32 was asked"),
        ("native:fp16", "native:bf16", "loss scale", "loss scale is none, dynamic was asked"),
        ("fp32", "half:bf16", "weights", "weights are bf16, fp32 was asked"),
        (
            "half:bf16,masters=fp32,grads=fp32",
            "half:bf16,masters=fp32",
            "accumulated gradients",
            "are bf16, fp32 was",
        ),
    ],
)
def test_an_arm_that_ran_as_another_is_seen(arm: str, ran: str, role: str, text: str) -> None:
    """The part that differs is named, with both types."""
    ledger, _ = train(ran, passes=2)
    found = {part.name: part for part in role_comparisons(Arm.parse(arm).roles, ledger) if part.differs}
    assert text in found[role].difference_text


@pytest.mark.parametrize(
    ("option", "base"),
    [
        ("state=bf16", "native:bf16"),
        ("weights=bf16", "native:bf16"),
        ("masters=fp32", "native:bf16,weights=bf16"),
        ("kahan", "native:bf16,weights=bf16"),
        ("rounding=stochastic", "native:bf16,weights=bf16"),
        ("masters=fp32", "half:bf16"),
        ("state=fp32", "half:bf16"),
        ("kahan", "half:bf16"),
        ("rounding=stochastic", "half:bf16"),
        ("keep_fp32=0", "half:bf16"),
        ("grads=fp32", "half:bf16,masters=fp32"),
        ("masters=none", "apex:O2,loss_scale=8,engine=compat"),
    ],
)
def test_an_option_changes_bits(option: str, base: str) -> None:
    """No option is inert in the loop: with momentum and two micro-batches the weights differ after a few steps."""
    changed = base + ("," if ":" in base else ":") + option
    one, other = (train(arm, passes=2, steps=6)[1] for arm in (base, changed))
    assert any(not torch.equal(first, second) for first, second in zip(one, other, strict=True))


def test_updates_that_rounding_loses_are_counted() -> None:
    """bf16 weights lose small updates, masters none; an overflow moves nothing, and is not a loss."""
    assert train("fp32", scale=0.05)[0].lost == pytest.approx(0.0, abs=0.15)  # of biases before a batch norm
    lost = train("half:bf16", "sgd", scale=0.05)[0].lost
    assert lost is not None
    assert lost > 0.3
    assert train("half:bf16,masters=fp32", scale=0.05)[0].lost == pytest.approx(0.0, abs=0.15)
    assert train("half:bf16,kahan")[0].lost is None
    assert train("half:dynamic,init_scale=1e9", steps=2)[0].lost is None


@pytest.mark.parametrize(
    ("arm", "eps", "zero"),
    [
        ("half", 1e-8, 1.0),
        ("half", 1e-4, 0.0),
        ("half,state=fp32", 1e-8, 0.0),
        ("half:bf16", 1e-8, 0.0),
        ("fp32", 0.0, 0.0),
    ],
)
def test_zero_denominators_are_counted(arm: str, eps: float, zero: float) -> None:
    """Small gradients leave Adam a second moment of 0 in fp16, and an eps of 1e-8 is 0 there, too."""
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(8, 4)
    precision = make_precision(arm)
    (model,), (made,) = precision.prepare([model], [AdamW(model.parameters(), eps=eps)])
    keeper = TrainingLedgerRecorder([model], 20)
    batches = [1e-2 * torch.randn(16, 8)]
    _, emulation = choose_cpu_half_mode_and_context("auto", precision.half_dtype, CPU)
    with emulation:
        keeper.make_recorded_update(update)(
            [model], [made], precision, SingleProcess(), lambda m, x: 1e-2 * loss_of(m, x), batches, None
        )
    found = keeper.look.read_ledger_from_device()
    assert found.zero_denominators == zero
    assert [(group.eps, group.zero_eps) for group in found.groups] == [(eps, zero == 1.0 or eps == 0.0)]
    assert 0 < (found.largest_gradient or 0) < 1e-2


def test_an_optimizer_without_a_denominator_has_none() -> None:
    assert train("half", "sgd")[0].zero_denominators is None


def test_the_largest_gradient_is_that_of_the_optimizer() -> None:
    """It does not depend on the loss scale, by which a reader multiplies it."""
    plain, scaled = (train(f"half,master_weights=true,loss_scale={scale}")[0] for scale in (1, 128))
    assert plain.largest_gradient == pytest.approx(scaled.largest_gradient, rel=0.01)
    assert scaled.loss_scale == 128.0


def test_products_elsewhere_are_named() -> None:
    """A module that is kept in fp32 shows as products of another type."""
    ledger, _ = train("native:bf16,keep_fp32=2")
    assert 0.1 < ledger.forward["fp32"] < 0.5
    assert list(ledger.elsewhere) == ["fp32"]


def test_later_looks_take_little_time() -> None:
    """After the first two steps one of twenty is looked at, without a mode, and none where looks have taken long."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    precision = make_precision("fp32")
    optimizer = SGD(model.parameters(), lr=0.1)
    keeper = TrainingLedgerRecorder([model], 20)
    make = keeper.make_recorded_update(update)
    for _ in range(19):
        make([model], [optimizer], precision, SingleProcess(), loss_of, [torch.ones(2, 4)], None)
    assert keeper.look.steps == [0, 1]
    keeper._since -= 1000.0  # as if the steps had taken long
    for _ in range(2):
        make([model], [optimizer], precision, SingleProcess(), loss_of, [torch.ones(2, 4)], None)
    assert keeper.look.steps == [0, 1, 20]
    keeper._spent = 1e6
    for _ in range(40):
        make([model], [optimizer], precision, SingleProcess(), loss_of, [torch.ones(2, 4)], None)
    assert keeper.look.steps == [0, 1, 20]


def linear_ledger(arm: str, *, scale: float = 1.0, steps: int = 2) -> Ledger:
    """Train two linear layers and return what was seen."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 32))
    precision = make_precision(arm)
    (model,), (made,) = precision.prepare([model], [AdamW(model.parameters(), lr=0.01)])
    keeper = TrainingLedgerRecorder([model], 20)
    batches = [scale * torch.randn(32, 48, generator=torch.Generator().manual_seed(1))]
    for _ in range(steps):
        keeper.make_recorded_update(update)(
            [model], [made], precision, SingleProcess(), loss_of, batches, None
        )
    return keeper.look.read_ledger_from_device(loss_scale=None)


def test_the_ledger_has_the_products_of_linear_layers_by_format() -> None:
    """Shares of multiply-adds, and what rounding did: 4 bits lose more than 8, and some numbers become 0."""
    errors = {}
    for name in ("mxfp8", "nvfp4", "mxfp4"):
        arm = f"gemm:{name}"
        ledger = linear_ledger(arm)
        assert differences(arm, ledger) == []
        assert ledger.linear_in_bf16 == ["2"]
        assert ledger.lost_gradients == []
        shares = {(one.role, one.format.partition(",")[0]): one.share for one in ledger.linear}
        assert shares["fprop", name] == pytest.approx(48 / (48 + 32))
        assert shares["wgrad", name] == pytest.approx(48 / (48 + 32))
        assert shares["dgrad", "bf16"] == 1  # the batch needs no gradient
        errors[name] = next(one.error for one in ledger.linear if one.error is not None)
        assert ledger.forward[name] == pytest.approx(48 / (48 + 32))
        zeroed = next(one.zeroed for one in ledger.linear if one.zeroed is not None)
        assert (zeroed > 0.01) is (name != "mxfp8")
    assert 0.01 < errors["mxfp8"] < 0.05 < errors["nvfp4"] < errors["mxfp4"] < 0.3
    cut = {one.format: one.cut_off for one in linear_ledger("gemm:mxfp8,scale=floor").linear}
    assert (cut["mxfp8, scale floor"] or 0) > 0
    ends = {one.format: one.scales_at_end for one in linear_ledger("gemm:mxfp8", scale=2.0**-124).linear}
    assert (ends["mxfp8, scale rceil"] or 0) > 0.3


@pytest.mark.parametrize(
    ("arm", "ran", "text"),
    [
        (
            "gemm:mxfp8,keep=none",
            "gemm:mxfp8,scale=floor,keep=none",
            "fprop is mxfp8, scale floor, mxfp8, scale rceil",
        ),
        (
            "gemm:nvfp4,rht,keep=none",
            "gemm:nvfp4,keep=none",
            "wgrad is nvfp4, scale te, nvfp4, scale te, rht was asked",
        ),
        (
            "gemm:nvfp4,keep=none",
            "gemm:nvfp4,dgrad=bf16,keep=none",
            "dgrad is bf16, nvfp4, scale te was asked",
        ),
        ("gemm:nvfp4,keep=none", "native:bf16", "fprop is none, nvfp4, scale te was asked"),
    ],
)
def test_another_format_scale_or_switch_is_not_as_declared(arm: str, ran: str, text: str) -> None:
    assert any(difference.startswith(text) for difference in differences(arm, linear_ledger(ran)))


def test_a_gradient_that_is_all_zero_is_not_as_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training goes on with it, and learns nothing there; zeros of a weight that is 0 are no fault."""
    arm = "gemm:mxfp8,keep=none"
    original = linear_products._product_and_operands

    def lose(layer: Any, role: str, left: Tensor, right: Tensor, **options: Any) -> Any:
        result, operands = original(layer, role, left, right, **options)
        return (result * 0 if role == "wgrad" and layer.name == "0" else result), operands

    monkeypatch.setattr(linear_products, "_product_and_operands", lose)
    ledger = linear_ledger(arm)
    assert ledger.lost_gradients == ["0 wgrad"]
    (difference,) = differences(arm, ledger)
    assert difference.startswith("wgrad is mxfp8, scale rceil; all 0, where bf16 is not, in 0, ")
    monkeypatch.undo()
    monkeypatch.setattr(
        nn.Linear, "reset_parameters", lambda layer: [nn.init.zeros_(p) for p in layer.parameters()]
    )
    assert linear_ledger(arm).lost_gradients == []
