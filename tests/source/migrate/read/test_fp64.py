"""Programs that make tensors of fp64 for networks: what says so, and the note."""

from pathlib import Path

import pytest

from ampcompare.source.migrate.adapter.choice import choose_adapter_for_all, choose_rewrite_or_adapter
from ampcompare.source.migrate.read.fp64 import find_fp64
from ampcompare.source.module import Module

NETWORK = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 2)
        self.register_buffer("places", torch.arange(8, dtype=torch.float64).float())

    def forward(self, x):
        {0}
        return self.layer(x)
"""
TRAIN = """\
import torch
from apex import amp
{0}
model = Net().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
for step in range(4):
    loss = model(torch.ones(4, 8, device="cuda")).float().pow(2).mean()
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("x = x.double()", True),
        ("x = x.to(torch.float64)", True),
        ("x = x + torch.ones(8, dtype=torch.double)", True),
        ("x = x.type(torch.cuda.DoubleTensor)", True),
        ("print(x.detach().cpu().double().norm())", False),
        ("print((x > 0).double())", False),
        ("x = x.float() if x.dtype == torch.float64 else x", False),
        ("x = x.float() if x.dtype in (torch.float64,) else x", False),
        ("assert not isinstance(x, torch.DoubleTensor)", False),
        ("self.double()", False),
        ("x = x.float()", False),
    ],
)
def test_finds_what_makes_a_tensor_fp64(line: str, is_found: bool) -> None:
    assert [each.lineno for each in find_fp64(Module(NETWORK.format(line)))] == [12] * is_found


CONSTRUCTOR = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 2)
        {0}

    def forward(self, x):
        return self.layer(x)
"""
CONSTRUCTORS = {
    'self.register_buffer("places", torch.arange(8, dtype=torch.float64))': True,
    "self.places = torch.ones(8, dtype=torch.double)": True,
    "places = torch.ones(8).double(); self.scale = nn.Parameter(places * 2)": True,
    "self.second = nn.Linear(8, 2).double()": True,
    "self.layer.double()": True,
    "self.double()": True,
    "places = torch.ones(8, dtype=torch.float64); self.places = places.float()": False,
    "self.size = int(torch.ones(8).double().sum())": False,
    "print(torch.ones(8).double())": False,
}


@pytest.mark.parametrize(("line", "is_found"), CONSTRUCTORS.items())
def test_finds_what_a_constructor_keeps_in_fp64(line: str, is_found: bool) -> None:
    assert [each.lineno for each in find_fp64(Module(CONSTRUCTOR.format(line)))] == [9] * is_found


LOOP = """\
import torch
import torch.nn.functional as F


def train(model, criterion, batches, meter):
    for x, y in batches:
        {0}
"""
LINES = {
    "model(torch.zeros(4, 8, dtype=torch.float64))": True,
    "x = x.double(); x = x / 2; out = model(x, None)": True,
    "loss = criterion(model(x), y.double())": True,
    "loss = F.mse_loss(model(x), y.to(torch.double))": True,
    "model.double()": True,
    "torch.set_default_dtype(torch.float64)": True,
    "model(x.double().float())": False,
    "accuracy = (model(x) - y).double().mean(); meter.add(accuracy); print(accuracy)": False,
    "total = model(x).sum().double(); save_model(model, total)": False,
    "print(model(x).double().cpu().numpy())": False,
    "w = torch.ones(4, dtype=torch.double); i = torch.multinomial(w, 2); model(x[i])": False,
}


@pytest.mark.parametrize(("line", "is_found"), LINES.items())
def test_finds_what_a_loop_gives_networks_in_fp64(line: str, is_found: bool) -> None:
    assert [each.lineno for each in find_fp64(Module(LOOP.format(line)))] == [7] * is_found


FOLLOWED = {
    "def sample():\n    return torch.rand(4, 8).double()\n\nout = net(sample())": 2,
    "def step(x):\n    return net(x)\n\nstep(torch.rand(4, 8, dtype=torch.float64))": 4,
    "class Rows:\n    def __getitem__(self, i):\n        return torch.tensor(self.rows[i], dtype=torch.float64)": 3,
    "m = torch.nn.Linear(8, 2).double()\nm(torch.ones(8))": 1,
}


@pytest.mark.parametrize(("text", "line"), FOLLOWED.items())
def test_follows_fp64_through_functions_and_names(text: str, line: int) -> None:
    assert [each.lineno for each in find_fp64(Module("import torch\n" + text))] == [line + 1]


@pytest.mark.parametrize("way", ["rewrite", "adapter"])
@pytest.mark.parametrize("apart", [True, False])
def test_a_training_with_a_buffer_of_fp64_has_a_note(tmp_path: Path, way: str, apart: bool) -> None:
    network = CONSTRUCTOR.format('self.register_buffer("places", torch.arange(8, dtype=torch.float64))')
    path = tmp_path / "train.py"
    path.write_text(TRAIN.format("from net import Net" if apart else network))
    (tmp_path / "net.py").write_text(network)
    choice = choose_adapter_for_all([path])
    if way == "rewrite":
        choice = choose_rewrite_or_adapter([path], rewritten="all")
    said = [line for each in choice.files for line in each.lines() if "makes tensors of fp64" in line]
    assert len(said) == 1
    assert ("net.py" in said[0]) == apart


@pytest.mark.parametrize("way", ["rewrite", "adapter"])
@pytest.mark.parametrize("apart", [True, False])
def test_a_training_with_such_a_network_has_a_note(tmp_path: Path, way: str, apart: bool) -> None:
    network = NETWORK.format("x = x.double()")
    path = tmp_path / "train.py"
    path.write_text(TRAIN.format("from net import Net" if apart else network))
    (tmp_path / "net.py").write_text(network)
    choice = choose_adapter_for_all([path])
    if way == "rewrite":
        choice = choose_rewrite_or_adapter([path], rewritten="all")
    said = [line for each in choice.files for line in each.lines() if "makes tensors of fp64" in line]
    assert len(said) == 1
    assert ("net.py" in said[0]) == apart
