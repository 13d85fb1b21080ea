"""The example of a backend in another package: found by its entry point, and true to the contract."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from ampcompare.training.precision.base import Precision, make_precision

pytestmark = pytest.mark.usefixtures("registered")
LR = 0.5
TINY = ["--epochs", "1", "--train-size", "64", "--val-size", "32", "--arch", "mlp"]


def net() -> nn.Sequential:
    """A small network with batch norm."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def batch() -> Tensor:
    """Eight different inputs."""
    return torch.arange(32.0).view(8, 4).sin()


def start(arm: str = "bf16-params") -> tuple[Precision, nn.Module, SGD]:
    """A prepared network with its optimizer."""
    model = net()
    precision = make_precision(arm)
    (prepared,), (optimizer,) = precision.prepare([model], [SGD(model.parameters(), lr=LR)])
    assert isinstance(optimizer, SGD)
    return precision, prepared, optimizer


def backward(precision: Precision, model: nn.Module, optimizer: SGD, x: Tensor, **options: bool) -> None:
    """One forward and backward pass as the loop makes it."""
    with precision.autocast():
        loss = model(x).square().mean()
    precision.backward(loss, [optimizer], **options)


def test_run_trains_it_by_name(plugin_path: list[str], tmp_path: Path, forked_python: Any) -> None:
    """`ampcompare run --backend` in another process knows the backend, its options, and what it computes in."""
    path = os.pathsep.join([*plugin_path, os.environ["PYTHONPATH"]])
    words = ["-m", "ampcompare", "run", "--arm", "bf16-params:bn_fp32=false", "--json", *TINY]
    done = forked_python.run(words, tmp_path, {**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert (record["status"], record["half"].split()[0]) == ("completed", "bf16")
    assert record["arm"] == "bf16-params:bn_fp32=false"


def test_updates_below_the_precision_of_bfloat16_add_up() -> None:
    """Steps that a bfloat16 weight would round away move it after enough of them."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    precision = make_precision("bf16-params")
    (prepared,), (optimizer,) = precision.prepare([model], [SGD(model.parameters(), lr=2.0**-10)])
    for _ in range(16):
        precision.backward(prepared(torch.ones(1, 1)).sum(), [optimizer])
        precision.step(optimizer)
        optimizer.zero_grad()
    assert model.weight.item() == 1 - 16 * 2.0**-10
    assert torch.tensor(1.0, dtype=torch.bfloat16) - 2.0**-10 == 1.0


def test_loaded_weights_reach_the_masters() -> None:
    """A step after loading a checkpoint starts from the loaded weights, not from older masters."""
    precision, model, optimizer = start()
    model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
    assert all(not master.any() for master in precision.unscale(optimizer))
