"""The Horovod backend on a stub with the calls that it makes: what is broadcast, exchanged, awaited and stepped."""

import contextlib
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from ampcompare.base.errors import UnsupportedCombination
from ampcompare.training.precision.base import make_precision

OTHER_RANK = 2.0  # what the other of two processes has for each gradient


class StubOptimizer:
    """As Horovod's: gradients are averaged with another process's when they are awaited, in `step` if not before."""

    def __init__(self, calls: list[str], optimizer: Optimizer, named_parameters: Any, **options: Any) -> None:
        self.calls = calls
        self.optimizer = optimizer
        self.options = {**options, "names": [name for name, _ in named_parameters]}
        self.param_groups = optimizer.param_groups
        self.waits = True

    def synchronize(self) -> None:
        self.calls.append("synchronize")
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = (param.grad + OTHER_RANK) / 2

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        self.waits = False
        yield
        self.waits = True

    def step(self) -> None:
        if self.waits:
            self.synchronize()
        self.calls.append("step")
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Install the stub as `horovod.torch`; return the names of the calls that are made."""
    made: list[str] = []
    hvd = ModuleType("horovod.torch")
    vars(hvd).update(
        init=lambda: made.append("init"),
        Compression=SimpleNamespace(none="no compression", fp16="to fp16"),
        broadcast_parameters=lambda state, root_rank: made.append(f"broadcast {len(state)} from {root_rank}"),
        broadcast_optimizer_state=lambda optimizer, root_rank: made.append(
            f"broadcast state from {root_rank}"
        ),
        DistributedOptimizer=lambda optimizer, **options: StubOptimizer(made, optimizer, **options),
    )
    package = ModuleType("horovod")
    package.__spec__ = ModuleSpec("horovod", None)
    monkeypatch.setitem(sys.modules, "horovod", package)
    monkeypatch.setitem(sys.modules, "horovod.torch", hvd)
    return made


def start(arm: str) -> tuple[Any, nn.Linear, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    precision = make_precision(arm)
    _, (optimizer,) = precision.prepare([model], [SGD(model.parameters(), lr=0.5)])
    return precision, model, optimizer


def test_a_step_takes_the_mean_of_all_processes(calls: list[str]) -> None:
    """Weights and state are sent out once; a step awaits the exchange and moves by the averaged gradient."""
    precision, model, optimizer = start("horovod:compression=fp16")
    assert calls == ["init", "broadcast 2 from 0", "broadcast state from 0"]
    assert optimizer.options == {
        "compression": "to fp16",
        "backward_passes_per_step": 1,
        "names": ["0.weight", "0.bias"],
    }
    before = model.bias.detach().clone()
    precision.backward(model(torch.ones(3, 4)).sum(), [optimizer])
    own = model.bias.grad
    assert own is not None
    expected = before - 0.5 * (own.clone() + OTHER_RANK) / 2
    outcome = precision.step(optimizer)
    assert (outcome.applied, outcome.loss_scales) == ((True,), ())
    assert calls[3:] == ["synchronize", "step"]
    assert torch.equal(model.bias, expected)


def test_what_is_clipped_is_exchanged_before_and_not_again(calls: list[str]) -> None:
    """`unscale` awaits the exchange once; the step after it does not exchange a second time."""
    precision, model, optimizer = start("horovod")
    precision.backward(model(torch.ones(3, 4)).sum(), [optimizer])
    for _ in range(2):
        assert [param.shape for param in precision.unscale(optimizer)] == [(2, 4), (2,)]
    precision.step(optimizer)
    assert calls[3:] == ["synchronize", "step"]
    optimizer.zero_grad()
    precision.backward(model(torch.ones(3, 4)).sum(), [optimizer])
    precision.step(optimizer)
    assert calls[5:] == ["synchronize", "step"]


@pytest.mark.usefixtures("calls")
def test_accumulation_must_be_known_beforehand() -> None:
    """Micro-batches without `passes` are refused with what to write; with it Horovod is told."""
    precision, model, optimizer = start("horovod")
    with pytest.raises(UnsupportedCombination, match="write horovod:passes=N"):
        precision.backward(model(torch.ones(3, 4)).sum(), [optimizer], delay_unscale=True)
    precision, model, optimizer = start("horovod:passes=2")
    assert optimizer.options["backward_passes_per_step"] == 2
    precision.backward(model(torch.ones(3, 4)).sum(), [optimizer], delay_unscale=True)
