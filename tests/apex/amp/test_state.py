"""Checkpoints under amp: its own state, model and optimizer state, and the orders of loading."""

from typing import Any

import pytest
import torch
from torch import nn

from ampcompare.apex import amp

X = torch.linspace(-1, 1, 12).reshape(3, 4)


def start(level: str = "O2", seed: int = 0, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-4)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    return model, optimizer


def train(
    model: nn.Module, optimizer: Any, steps: int = 1, factor: float = 1 / 64, **options: Any
) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(X).float() - 1).square().mean()
        losses.append(loss.item())
        with amp.scale_loss(loss * factor, optimizer, **options) as scaled:
            scaled.backward()
        optimizer.step()
    return losses


def test_loading_goes_by_position(capsys: pytest.CaptureFixture[str]) -> None:
    """The n-th entry fills the n-th scaler; numbers that differ are reported, at any verbosity (deviation 22)."""
    start(num_losses=2)
    entry = {"loss_scale": 2.0, "unskipped": 1}
    amp.load_state_dict({"loss_scaler1": entry, "my_loss_scaler": {"loss_scale": 4.0, "unskipped": 5}})
    assert [s.loss_scale() for s in amp._amp_state.loss_scalers] == [2.0, 4.0]
    assert capsys.readouterr().out == ""
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 16.0, "unskipped": 0}})
    assert [s.loss_scale() for s in amp._amp_state.loss_scalers] == [16.0, 4.0]
    assert "contains 1 entries, while 2 loss_scalers" in capsys.readouterr().out
    amp.load_state_dict({f"loss_scaler{i}": entry for i in range(3)} | {"unknown": 1})
    assert "Skipping loss_scaler[2]" in capsys.readouterr().out


def test_loading_bad_states() -> None:
    """Unknown keys raise RuntimeError after the good ones were set; missing fields raise KeyError."""
    start()
    with pytest.raises(RuntimeError, match="'epoch'"):
        amp.load_state_dict({"epoch": 3, "loss_scaler0": {"loss_scale": 2.0, "unskipped": 1}})
    assert amp._amp_state.loss_scalers[0].loss_scale() == 2.0
    with pytest.raises(KeyError):
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0}})


def test_state_before_initialize() -> None:
    with pytest.raises(AttributeError, match=r"amp\.initialize"):
        amp.state_dict()
    with pytest.raises(AttributeError):
        amp.load_state_dict({})


def test_state_of_a_disabled_session() -> None:
    """With enabled=False the state is empty and loading does nothing; strict mode raises (deviation 34)."""
    amp.initialize(nn.Linear(1, 1), enabled=False, verbosity=0)
    assert amp.state_dict() == {}
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0, "unskipped": 1}})
    amp.initialize(nn.Linear(1, 1), enabled=False, verbosity=0, strict=True)
    with pytest.raises(AttributeError):
        amp.state_dict()


def second_moments(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    return optimizer.state_dict()["state"][0]["exp_avg_sq"]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("order", ["init_first", "load_first"])
def test_optimizer_state_is_not_rounded_on_the_way(order: str, strict: bool) -> None:
    """Second moments below the half range survive a resume under O2; in strict mode they become 0 (deviation 5)."""
    model, optimizer = start()
    train(model, optimizer)
    state = optimizer.state_dict()
    state["state"][0]["exp_avg_sq"].fill_(1e-9)
    twin = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    other = torch.optim.Adam(twin.parameters(), lr=0.01, eps=1e-4)
    if order == "load_first":
        other.load_state_dict(state)
    amp.initialize(twin, other, opt_level="O2", verbosity=0, strict=strict)
    if order == "init_first":
        other.load_state_dict(state)
    other.zero_grad()
    got = second_moments(other)
    assert got.dtype == torch.float32
    assert got.max().item() == (0.0 if strict else pytest.approx(1e-9))
    assert all(p.dtype == torch.float32 for p in other.state)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("part", ["whole", "layer"])
def test_loading_after_masters_exist(strict: bool, part: str) -> None:
    """Weights loaded after the masters were made last; in strict mode the next step overwrites them."""
    model, optimizer = start(strict=strict)
    train(model, optimizer)
    if part == "whole":
        model.load_state_dict({key: torch.full_like(value, 2.0) for key, value in model.state_dict().items()})
    else:
        model[0].load_state_dict(
            {key: torch.full_like(value, 2.0) for key, value in model[0].state_dict().items()}
        )
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(model[0].weight, torch.full((4, 4), 2.0).half()) is not strict
