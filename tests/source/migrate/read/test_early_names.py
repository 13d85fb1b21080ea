"""Functions of torch that a name keeps from before `amp.initialize`, without O1's casts."""

from pathlib import Path

import pytest

from ampcompare.source.migrate.adapter.choice import choose_rewrite_or_adapter
from ampcompare.source.migrate.read.early_names import find_early_bindings_of_torch
from ampcompare.source.module import Module

HEAD = "import torch\nfrom torch import nn\nimport torch.nn.functional as F\n"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("from torch.nn.functional import mse_loss, relu\n", ["mse_loss"]),
        ("from torch.nn.functional import mse_loss as loss, linear\n", ["mse_loss, linear"]),
        ("from torch import matmul\n", ["matmul"]),
        ("from torch.linalg import multi_dot, eigh\n", ["multi_dot"]),
        (
            "class Net(nn.Module):\n    def __init__(self):\n        self.loss = F.cross_entropy\n",
            ["cross_entropy"],
        ),
        ("KINDS = {'mse': F.mse_loss}\n", ["mse_loss"]),
        ("def train(loss=F.mse_loss): pass\n", ["mse_loss"]),
        # what is looked up when it is called
        ("def train(x):\n    from torch.nn.functional import mse_loss\n", []),
        ("class Net(nn.Module):\n    def forward(self, x):\n        return F.softmax(x, 1)\n", []),
        ("x = F.softmax(y, 1)\nloss = lambda x: F.mse_loss(x, x)\n", []),
        ("from own import mse_loss\n", []),
    ],
)
def test_names_that_are_bound_where_a_module_is_imported_or_a_model_made(text: str, names: list[str]) -> None:
    assert list(find_early_bindings_of_torch(Module(HEAD + text)).values()) == names


TRAIN = """{0}
from apex import amp

model = torch.nn.Linear(8, 2).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level="{1}")
for step in range(4):
    output = model(torch.ones(4, 8, device="cuda"))
    loss = {2}
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
"""
NAMED = "import torch\nfrom torch.nn.functional import mse_loss\n"
PLAIN = "import torch\nimport torch.nn.functional as F\n"


def _said(path: Path, text: str, **options: bool) -> str:
    path.write_text(text)
    choice = choose_rewrite_or_adapter([path], **options)
    return " ".join([*choice.reason_lines(), *(line for each in choice.files for line in each.lines())])


def test_a_training_with_such_a_name_is_no_ordinary_one_and_has_a_note(tmp_path: Path) -> None:
    named = TRAIN.format(NAMED, "O1", "mse_loss(output, torch.zeros_like(output))")
    plain = TRAIN.format(PLAIN, "O1", "F.mse_loss(output, torch.zeros_like(output))")
    said = _said(tmp_path / "train.py", named)
    assert "binds mse_loss before amp.initialize" in said
    assert "mse_loss: bound before amp.initialize" in said
    assert "before amp.initialize" not in _said(tmp_path / "train.py", plain)
    assert "mse_loss: bound before" in _said(tmp_path / "train.py", named, only_ordinary=False)
    assert "mse_loss: bound before" not in _said(tmp_path / "train.py", named.replace('"O1"', '"O2"'))
