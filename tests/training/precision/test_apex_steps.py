"""What the `apex` backend tells of steps whose overflow only the device knows."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from ampcompare.apex.amp._engine import device_skip
from ampcompare.base.environment.apex import ApexInstall
from ampcompare.training.precision.apex import Apex, choose_apex_module_and_engine_info, make_apex
from ampcompare.training.precision.base import StepOutcome
from tests.host_reads import HostReads

Change = Callable[[Apex, Any], None]
X = torch.linspace(-1, 1, 12).reshape(3, 4)


def train(level: str, *, fused: bool, change: Change | None = None) -> Any:
    """Train two models with two losses for twelve steps; return outcomes, host reads and weights."""
    torch.manual_seed(0)
    models: list[nn.Module] = [nn.Linear(4, 4), nn.Linear(4, 4)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9, fused=fused or None) for m in models]
    precision = make_apex(opt_level=level, engine="compat", num_losses=2)
    models, prepared = precision.prepare(models, optimizers)
    if change is not None:
        change(precision, prepared)
    outcomes: list[StepOutcome] = []
    with HostReads() as mode:
        for step in range(12):
            for loss_id, (model, optimizer) in enumerate(zip(models, prepared, strict=True)):
                loss = model(X).float().square().mean() / 64
                if (step, loss_id) in {(0, 1), (5, 0), (5, 1), (8, 0)}:
                    loss = loss * float("inf")
                precision.backward(loss, [optimizer], loss_id=loss_id, delay_unscale=step == 10)
            outcomes.append(precision.step(*prepared))
            for optimizer in prepared:
                optimizer.zero_grad()
        reads = mode.count
    facts = [(outcome.applied, outcome.loss_scales) for outcome in outcomes]
    precision.amp._amp_state.close()
    return facts, reads, [param.detach().tolist() for model in models for param in model.parameters()]


def host_reads(_: Apex, optimizers: Any) -> None:
    for optimizer in optimizers:
        optimizer.register_step_post_hook(lambda *_: None)


def long_way(precision: Apex, optimizers: Any) -> None:
    host_reads(precision, optimizers)
    precision.__class__ = Apex


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_outcomes_without_host_reads(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # as on a GPU, which is not read at once
    monkeypatch.setattr(device_skip, "_DEVICE_TYPES", frozenset({"cpu"}))
    late = train(level, fused=True)
    early = train(level, fused=True, change=host_reads)
    assert late[0] == early[0]
    assert late[2] == early[2]
    assert (late[1], early[1]) == (0, 22)
    assert [applied for applied, _ in late[0]].count((False, False)) == 1
    assert late[0][0] == ((True, False), (65536.0, 32768.0))
    assert late[0][8] == ((False, True), (16384.0, 16384.0))


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("fused", [False, True])
def test_the_short_backward_pass_has_the_same_bits(level: str, fused: bool) -> None:
    """A backward pass that starts from the scale gives what one from the scaled loss gives."""
    short, long = train(level, fused=fused), train(level, fused=fused, change=long_way)
    assert short[0] == long[0]
    assert short[2] == long[2]


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_loss_that_is_no_scalar(level: str) -> None:
    """A loss of one element in one dimension is scaled by the long way; a longer one is refused as by autograd."""
    precision = make_apex(opt_level=level, engine="compat")
    (model,), (optimizer,) = precision.prepare(
        [nn.Linear(4, 1)], [torch.optim.SGD([nn.Parameter(torch.ones(1))])]
    )
    precision.backward(model(X[:1]).float().reshape(1), [optimizer])
    with pytest.raises(RuntimeError, match="scalar"):
        precision.backward(model(X), [optimizer])


@pytest.mark.parametrize(
    ("kind", "name"), [("full", "nvidia"), ("python_only", "compat"), ("absent", "compat")]
)
def test_auto_takes_the_real_apex_with_its_kernels_only(
    kind: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Python-only Apex, which waits for the device at each parameter, is taken where it is asked for by name."""
    found = ApexInstall(kind, None, "0.1", f"an apex that is {kind}; remedy")
    monkeypatch.setattr("ampcompare.backends.apex_levels.find_installed_apex", lambda: found)
    monkeypatch.setitem(sys.modules, "apex", ModuleType("apex"))
    monkeypatch.setitem(sys.modules, "apex.amp", ModuleType("apex.amp"))
    engine = choose_apex_module_and_engine_info("auto", "O2", "cuda:0")[1]
    assert engine.name == name
    assert found.reason.partition(";")[0] in engine.reason
    if found.has_amp:
        asked = choose_apex_module_and_engine_info("nvidia", "O2", "cuda:0")[1]
        assert (asked.name, asked.version) == ("nvidia", "0.1" if kind == "full" else "0.1, Python only")
