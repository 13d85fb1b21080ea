"""What fused optimizers keep, save and restore; groups of every kind; errors; known defects, repaired and strict."""

import copy
import io
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampcompare.apex.optimizers import (
    FusedAdagrad,
    FusedAdam,
    FusedLAMB,
    FusedNovoGrad,
    FusedSGD,
)

ALL: list[tuple[Any, dict[str, Any]]] = [
    (FusedAdam, {}),
    (FusedAdam, {"capturable": True, "master_weights": True}),
    (FusedSGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    (FusedLAMB, {}),
    (FusedNovoGrad, {}),
    (FusedAdagrad, {}),
]
NAMES = ["adam", "adam-capturable", "sgd", "lamb", "novograd", "adagrad"]
EVERY = pytest.mark.parametrize("kind,options", ALL, ids=NAMES)


@pytest.fixture(params=[False, True], ids=["default", "strict"])
def strict(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the switch is on that brings back defects of Apex."""
    monkeypatch.setenv("AMPCOMPARE_APEX_STRICT", "1" if request.param else "")
    return bool(request.param)


def params(*dtypes: torch.dtype, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(4, generator=generator).to(dtype)) for dtype in dtypes]


def give_grads(to: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(100 + seed)
    for param in to:
        param.grad = torch.randn(4, generator=generator).to(param.dtype)


def values(of: list[nn.Parameter]) -> list[Tensor]:
    return [param.detach().clone() for param in of]


def assert_equal(a: list[Tensor], b: list[Tensor]) -> None:
    for one, other in zip(a, b, strict=True):
        assert torch.equal(one, other)


@EVERY
@pytest.mark.parametrize("through", ["state dict", "file", "deepcopy", "pickle"])
def test_a_restored_optimizer_goes_on_bit_for_bit(kind: Any, options: dict[str, Any], through: str) -> None:
    """After a save in the middle, by each of the usual ways, the next steps give the very same weights."""
    ours = params(torch.float32, torch.float32)
    optimizer = kind(ours, **options)
    for number in range(3):
        give_grads(ours, number)
        optimizer.step()
    if through == "deepcopy":
        other = copy.deepcopy(optimizer)
        other_params = other.param_groups[0]["params"]
    elif through == "pickle":
        file = io.BytesIO()
        torch.save(optimizer, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
        other_params = other.param_groups[0]["params"]
    else:
        other_params = [nn.Parameter(param.detach().clone()) for param in ours]
        other = kind(other_params, **options)
        saved = optimizer.state_dict()
        if through == "file":
            file = io.BytesIO()
            torch.save(saved, file)
            file.seek(0)
            saved = torch.load(file)
        other.load_state_dict(copy.deepcopy(saved))
    for number in range(3, 6):
        for used, by in ((ours, optimizer), (other_params, other)):
            give_grads(used, number)
            by.step()
    assert_equal(values(ours), values(other_params))


@EVERY
def test_groups_empty_late_and_without_gradients(kind: Any, options: dict[str, Any]) -> None:
    """An empty group and a group without gradients are harmless, and a group added later is trained."""
    first, silent, late = params(torch.float32), params(torch.float32, seed=1), params(torch.float32, seed=2)
    optimizer = kind([{"params": first}, {"params": silent}], **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of the empty group itself
        optimizer.add_param_group({"params": []})
    before = values(first + silent + late)
    give_grads(first, 0)
    optimizer.step()
    optimizer.add_param_group({"params": late, "lr": 0.5})
    give_grads(first + late, 1)
    optimizer.step()
    after = values(first + silent + late)
    assert not torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])
    assert not torch.equal(before[2], after[2])
    assert float(optimizer.param_groups[-1]["lr"]) == 0.5
    assert float(optimizer.param_groups[0]["lr"]) != 0.5


@EVERY
def test_mixed_widths_step_like_each_alone(kind: Any, options: dict[str, Any]) -> None:
    """A group of fp16 and fp32 parameters gets what two groups of one width get."""
    together, apart = params(torch.float16, torch.float32), params(torch.float16, torch.float32)
    one = kind(together, **options)
    two = kind([{"params": [param]} for param in apart], **options)
    for number in range(3):
        give_grads(together, number)
        give_grads(apart, number)
        one.step()
        two.step()
    for a, b in zip(values(together), values(apart), strict=True):
        torch.testing.assert_close(a, b)


@EVERY
def test_zero_grad(kind: Any, options: dict[str, Any]) -> None:
    """`zero_grad()` sets None; `set_to_none=False`, which Apex refuses, leaves zeros."""
    ours = params(torch.float32)
    optimizer = kind(ours, **options)
    give_grads(ours, 0)
    optimizer.zero_grad(set_to_none=False)
    assert ours[0].grad.tolist() == [0.0] * 4
    optimizer.zero_grad()
    assert ours[0].grad is None


@EVERY
def test_closure(kind: Any, options: dict[str, Any]) -> None:
    """A closure is run with gradients on, before the update, and its value is returned."""
    ours = params(torch.float32)
    optimizer = kind(ours, **options)
    before = values(ours)

    def closure() -> Tensor:
        loss = ours[0].square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == pytest.approx(float(before[0].square().sum()))
    assert not torch.equal(before[0], ours[0])


@pytest.mark.parametrize("kind,options", [ALL[0], *ALL[3:5]], ids=["adam", "lamb", "novograd"])
def test_amsgrad_is_refused(kind: Any, options: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="amsgrad"):
        kind(params(torch.float32), amsgrad=True, **options)


@EVERY
def test_unsupported_gradients(kind: Any, options: dict[str, Any]) -> None:
    """Sparse gradients, fp64 parameters and a group on two devices are RuntimeErrors that say so."""
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        kind(table.parameters(), **options).step()
    wide = params(torch.float64)
    optimizer = kind(wide, **options)
    give_grads(wide, 0)
    with pytest.raises(RuntimeError, match="float64"):
        optimizer.step()
    scattered = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, device="meta"))]
    optimizer = kind(scattered, **options)
    for param in scattered:
        param.grad = torch.ones_like(param)
    with pytest.raises(RuntimeError, match="cpu, meta"):
        optimizer.step()


def test_adam_argument_errors() -> None:
    """Masters need `capturable`; the 2018 arguments of `step` and unknown ones are refused."""
    ours = params(torch.float32)
    with pytest.raises(RuntimeError, match="capturable"):
        FusedAdam(ours, master_weights=True)
    optimizer = FusedAdam(ours)
    for name in ("grads", "output_params", "scale", "grad_norms"):
        with pytest.raises(RuntimeError, match="2019"):
            optimizer.step(**{name: 1})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unknown"):
        optimizer.step(unknown=1)


@pytest.mark.parametrize(
    "options",
    [
        {"lr": -1.0},
        {"lr": 1.0, "momentum": -0.1},
        {"lr": 1.0, "weight_decay": -0.1},
        {"lr": 1.0, "nesterov": True},
        {"lr": 1.0, "nesterov": True, "momentum": 0.9, "dampening": 0.1},
        {},
    ],
    ids=str,
)
def test_sgd_argument_errors(options: dict[str, Any]) -> None:
    """Negative values, nesterov without momentum or with dampening, and a missing rate are ValueErrors."""
    with pytest.raises(ValueError):
        FusedSGD(params(torch.float32), **options)


def test_novograd_argument_errors() -> None:
    """Another norm than 2 or 0 is a RuntimeError, and a gradient more than at the first step an AssertionError."""
    ours = params(torch.float32, torch.float32)
    optimizer = FusedNovoGrad(ours, norm_type=1)
    give_grads(ours, 0)
    with pytest.raises(RuntimeError, match="norm_type=1"):
        optimizer.step()
    optimizer = FusedNovoGrad(ours)
    ours[1].grad = None
    optimizer.step()
    give_grads(ours, 0)
    with pytest.raises(AssertionError, match="2 gradients"):
        optimizer.step()


def test_lamb_clips_by_the_norm_of_all_groups() -> None:
    """The divisor comes from the gradients of all groups together, fp16 and fp32."""
    ours = params(torch.float32, torch.float16)
    optimizer = FusedLAMB([{"params": ours[:1]}, {"params": ours[1:]}], betas=(0.0, 0.0), weight_decay=0.0)
    ours[0].grad = torch.full((4,), 3.0)
    ours[1].grad = torch.full((4,), 4.0, dtype=torch.float16)
    optimizer.step()
    # With betas of 0 the first moment is the clipped gradient; the common norm is 10.
    torch.testing.assert_close(optimizer.state[ours[0]]["exp_avg"], torch.full((4,), 0.3))
    torch.testing.assert_close(
        optimizer.state[ours[1]]["exp_avg"], torch.full((4,), 0.4, dtype=torch.float16)
    )


def test_steps_leave_the_version_counters_alone() -> None:
    """As with Apex's kernels, a graph built before a step can still be back-propagated after it."""
    ours = params(torch.float32)
    loss = ours[0].square().sum()
    give_grads(ours, 0)
    FusedAdam(ours).step()
    loss.backward()


def test_a_late_first_gradient_keeps_the_momentum_of_others(strict: bool) -> None:
    """A parameter that gets its first gradient late and comes last does not reset the momentum of the rest."""
    ours = params(torch.float32, torch.float32)
    optimizer = FusedSGD(ours, lr=0.1, momentum=0.5)
    for number in range(3):
        ours[0].grad = torch.ones(4)
        ours[1].grad = torch.ones(4) if number == 2 else None
        optimizer.step()
    momentum = optimizer.state[ours[0]]["momentum_buffer"]
    torch.testing.assert_close(momentum, torch.full((4,), 1.0 if strict else 1.75))


def test_adam_trains_later_groups(strict: bool) -> None:
    """Under the strict switch FusedAdam passes over a group added after construction, as in Apex."""
    ours = params(torch.float32, torch.float32)
    optimizer = FusedAdam(ours[:1])
    optimizer.add_param_group({"params": ours[1:]})
    before = values(ours)
    give_grads(ours, 0)
    optimizer.step()
    assert not torch.equal(before[0], ours[0])
    assert torch.equal(before[1], ours[1]) is strict


def test_loading_keeps_moments_in_fp32(strict: bool) -> None:
    """A second moment far below fp16's range survives a state dict over fp16 parameters; strict, it is cast."""
    ours = params(torch.float16)
    optimizer = FusedAdam(ours)
    ours[0].grad = torch.full((4,), 1e-3, dtype=torch.float16)
    optimizer.step()
    before = optimizer.state[ours[0]]["exp_avg_sq"].clone()
    optimizer.load_state_dict(optimizer.state_dict())
    moment = optimizer.state[ours[0]]["exp_avg_sq"]
    if strict:
        assert moment.dtype is torch.float16
        assert moment.tolist() == [0.0] * 4
    else:
        assert moment.dtype is torch.float32
        assert torch.equal(moment, before)
        assert moment.max() < 2e-9


def test_novograd_state_before_the_first_step_can_be_loaded(strict: bool) -> None:
    """`amp.initialize` relies on that; under the strict switch it is a KeyError, as in Apex."""
    optimizer = FusedNovoGrad(params(torch.float32))
    with pytest.raises(KeyError, match="exp_avg_sq") if strict else nullcontext():
        optimizer.load_state_dict(optimizer.state_dict())
    assert "exp_avg_sq" not in optimizer.param_groups[0]


def test_capturable_adam_counts_the_steps_it_makes(strict: bool) -> None:
    """The counter stands still exactly at overflowed steps; strict, the flag of the call before decides."""
    ours = params(torch.float32)
    optimizer = FusedAdam(ours, capturable=True)
    counts = []
    for overflow in (True, False, True, False):
        give_grads(ours, 0)
        optimizer.found_inf = torch.tensor(float(overflow))  # type: ignore[attr-defined]
        optimizer.step()
        counts.append(int(optimizer.param_groups[0]["step"]))
    assert counts == ([1, 1, 2, 2] if strict else [0, 1, 1, 2])


def test_sgd_refuses_bf16_and_passes_over_it_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """FusedSGD raises for a bf16 parameter; under the strict switch it leaves it untrained in silence, as in Apex."""
    ours = params(torch.bfloat16)
    give_grads(ours, 0)
    with pytest.raises(RuntimeError, match="bfloat16"):
        FusedSGD(ours, lr=0.1).step()
    monkeypatch.setenv("AMPCOMPARE_APEX_STRICT", "1")
    before = values(ours)
    FusedSGD(ours, lr=0.1).step()
    assert_equal(before, values(ours))
