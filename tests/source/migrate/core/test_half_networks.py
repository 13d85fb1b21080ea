"""Networks in fp16 that run outside of autocast, where O1 cast their inputs, stay with Apex."""

from pathlib import Path

import pytest

from ampcompare.source.migrate.project import migrate_file
from ampcompare.source.migrate.read.finding import BY_HAND

SCRIPT = """import copy
import torch
from apex import amp
from net import Net, export

model = Net()
twin = Net()
model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters()), opt_level="O1")


def save(net, x):
    return torch.jit.trace(net, x)


for x in batches:
    loss = model(x).mean()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
BELOW
"""
EXPORT = """import copy
import torch

class Net(torch.nn.Module):
    pass

def export(net, x):
    other = copy.deepcopy(net).half()
    torch.onnx.export(other, x, "net.onnx")
"""


def _left(folder: Path, below: str) -> list[str]:
    """Return what is said of the lines that are left by hand."""
    (folder / "net.py").write_text(EXPORT, encoding="utf-8")
    (folder / "train.py").write_text(SCRIPT.replace("BELOW", below), encoding="utf-8")
    migration = migrate_file(folder / "train.py").migration
    assert migration is not None
    return [each.message for each in migration.findings if each.kind == BY_HAND]


@pytest.mark.parametrize(
    "below",
    [
        "twin = twin.half()\ntwin.load_state_dict(model.state_dict())\ntorch.jit.trace(twin, x)",
        "twin.cuda().half()\ny = twin(x)",
        "twin.to(torch.float16)\nsave(twin, x)",
        "y = copy.deepcopy(model).half().eval()(x)",
        "save(copy.deepcopy(model).half(), x)",
        "export(model, x)",
    ],
)
def test_what_runs_in_fp16_outside_of_autocast_stays(tmp_path: Path, below: str) -> None:
    (said,) = _left(tmp_path, below)
    assert "O1 cast its inputs" in said
    assert ("runs a network whose weights line 8 casts" in said) == below.startswith("export")
    assert said.startswith(
        "line 9 of net.py" if below.startswith("export") else "this runs a network outside of"
    )


@pytest.mark.parametrize(
    "below",
    [
        "torch.save(copy.deepcopy(model).half().state_dict(), path)",
        "x = x.half()\nprint(x)",
        "y = twin(x)\ntwin.half()",
        "with torch.no_grad():\n    y = copy.deepcopy(twin).half().state_dict()",
    ],
)
def test_what_is_only_saved_or_a_tensor_is_rewritten(tmp_path: Path, below: str) -> None:
    assert not _left(tmp_path, below)
