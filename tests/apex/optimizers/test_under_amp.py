"""Every fused optimizer under `amp.initialize`, at the levels that patch no torch function."""

from typing import Any

import pytest
import torch
from torch import nn

from ampcompare.apex import DeprecatedFeatureWarning, amp
from ampcompare.apex.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD
from ampcompare.apex.parallel.LARC import LARC

KINDS: list[tuple[Any, dict[str, Any]]] = [
    (FusedAdam, {"lr": 0.01}),
    (FusedSGD, {"lr": 0.05, "momentum": 0.9}),
    (FusedSGD, {"lr": 0.05, "momentum": 0.9, "materialize_master_grads": False}),
    (FusedLAMB, {"lr": 0.01}),
    (FusedNovoGrad, {"lr": 0.01}),
    (FusedAdagrad, {"lr": 0.05}),
]
NAMES = ["adam", "sgd", "sgd-model-grads", "lamb", "novograd", "adagrad"]


def train(
    kind: Any, options: dict[str, Any], level: str, steps: int = 8
) -> tuple[list[float], nn.Module, Any]:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
    inputs, targets = torch.randn(6, 4), torch.randn(6, 2)
    optimizer = kind(model.parameters(), **options)
    with pytest.warns(DeprecatedFeatureWarning):
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0)
    losses = []
    for _ in range(steps):
        loss = (model(inputs) - targets).square().mean()
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model, optimizer


@pytest.mark.parametrize("kind,options", KINDS, ids=NAMES)
def test_o2_follows_o0(kind: Any, options: dict[str, Any]) -> None:
    """At O2 the losses stay close to those of O0 and fall, and the fp16 weights are the rounded masters."""
    plain, _, _ = train(kind, options, "O0")
    mixed, model, optimizer = train(kind, options, "O2")
    assert mixed == pytest.approx(plain, rel=0.02)
    assert mixed[-1] < mixed[0]
    for param, master in zip(model.parameters(), amp.master_params(optimizer), strict=True):
        assert master.dtype is torch.float32
        assert torch.equal(param.detach(), master.detach().to(param.dtype))


def test_larc_under_amp() -> None:
    """A LARC around FusedSGD can be initialized and trained at O2."""
    losses, _, optimizer = train(lambda params: LARC(FusedSGD(params, lr=0.5), 0.1), {}, "O2")
    assert isinstance(optimizer, LARC)
    assert losses[-1] < losses[0]
