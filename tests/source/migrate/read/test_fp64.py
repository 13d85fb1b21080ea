"""Networks that make tensors of fp64: what says so, and the note."""

from pathlib import Path

import pytest

from ampcompare.source.migrate.adapter.choice import choose_adapter_for_all, choose_rewrite_or_adapter
from ampcompare.source.migrate.read.fp64 import find_fp64_in_networks
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
    assert [each.lineno for each in find_fp64_in_networks(Module(NETWORK.format(line)))] == [12] * is_found


@pytest.mark.parametrize("way", ["rewrite", "adapter"])
@pytest.mark.parametrize("apart", [True, False])
def test_a_training_with_such_a_network_has_a_note(tmp_path: Path, way: str, apart: bool) -> None:
    network = NETWORK.format("x = x.double()")
    path = tmp_path / "train.py"
    path.write_text(TRAIN.format("from net import Net" if apart else network))
    (tmp_path / "net.py").write_text(network)
    choice = choose_adapter_for_all([path])
    if way == "rewrite":
        choice = choose_rewrite_or_adapter([path], only_ordinary=False)
    said = [line for each in choice.files for line in each.lines() if "makes tensors of fp64" in line]
    assert len(said) == 1
    assert ("net.py" in said[0]) == apart
