"""Functions of torch that a name keeps from before `amp.initialize`, without O1's casts."""

from pathlib import Path
from typing import Any

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


NET = "class Net(nn.Module):\n    def __init__(self, name):\n        self.act = {}\n"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        # by a text
        (NET.format("getattr(F, 'softplus')"), ["softplus"]),
        ("NAME = 'softplus'\n" + NET.format("getattr(F, NAME)"), ["softplus"]),
        (NET.format("getattr(torch, name)"), ["a function from getattr(torch, name)"]),
        (NET.format("getattr(F, 'soft' + name)"), ["a function from getattr(F, 'soft' + name)"]),
        (NET.format("F.__dict__['softplus']"), ["softplus"]),
        (NET.format("vars(F)[name]"), ["a function from vars(F)[name]"]),
        (NET.format("vars(F).get('mse_loss')"), ["mse_loss"]),
        ("ALL = {**vars(torch)}\n", ["a function from vars(torch)"]),
        (NET.format("eval('F.softplus')"), ["softplus"]),
        (NET.format("eval('F.' + name)"), ["a function from eval('F.' + name)"]),
        (
            "import operator\n" + NET.format("operator.attrgetter('nn.functional.softplus')(torch)"),
            ["softplus"],
        ),
        (
            "import importlib\n" + NET.format("importlib.import_module('torch.nn.functional').softplus"),
            ["softplus"],
        ),
        ("import sys\nact = sys.modules['torch'].exp\n", ["exp"]),
        # of other places
        (NET.format("torch.Tensor.exp"), ["exp"]),
        ("power = torch.Tensor.__pow__\n", ["__pow__"]),
        (NET.format("torch.functional.norm"), ["norm"]),
        ("fn = F\nact = fn.softplus\n", ["softplus"]),
        ("from torch.nn.functional import *\ny = softplus(x)\nz = sum([1])\n", ["softplus"]),
        # through functions
        ("def pick(name):\n    return F.softplus\n", ["softplus"]),
        ("def acts():\n    yield F.softplus\n", ["softplus"]),
        ("pick = lambda: F.softplus\n", ["softplus"]),
        ("act = lambda x, f=torch.exp: f(x)\n", ["exp"]),
        ("def set_act():\n    global act\n    act = F.softplus\n", ["softplus"]),
        ("def make():\n    act = F.softplus\n    return lambda x: act(x)\n", ["softplus"]),
        ("def make():\n    return Net([F.softplus] * 2)\n", ["softplus"]),
        ("import functools\nact = functools.partial(F.softplus, beta=2)\n", ["softplus"]),
        ("def make(net):\n    net.acts = {'a': F.softplus, 'b': F.relu}\n", ["softplus"]),
        ("def make():\n    from torch import matmul\n    return matmul\n", ["matmul"]),
        ("def lead(optimizer):\n    act = F.softplus\n    prepare(optimizer)\n    act(x)\n", ["softplus"]),
        # what no list has, or is no function
        (NET.format("getattr(F, 'relu')"), []),
        (NET.format("getattr(torch, f'float{name}')"), []),
        (NET.format("getattr(torch, name.dtype)"), []),
        ("def make(x, name):\n    return x.to(getattr(torch, name))\n", []),
        (NET.format("getattr(nn, name)"), []),
        # what is called at once, or kept no longer than a call
        ("def loss(x, kind):\n    return {'a': F.l1_loss, 'b': F.mse_loss}[kind](x, x)\n", []),
        ("def loss(x, kind):\n    f = F.l1_loss if kind else F.mse_loss\n    return f(x, x)\n", []),
        ("def loss(x, kind):\n    return getattr(F, kind)(x, x)\n", []),
        ("def loss(x):\n    return [f(x) for f in (torch.exp, torch.log)]\n", []),
        ("def name_of(act):\n    return act == F.softplus or F.softplus.__name__\n", []),
        ("class Net(nn.Module):\n    def forward(self, x):\n        return self.run(F.softplus, x)\n", []),
    ],
)
def test_values_that_may_be_bound_before_casts(text: str, names: list[str]) -> None:
    assert list(find_early_bindings_of_torch(Module(HEAD + text)).values()) == names


def test_what_is_bound_below_initialize_is_cast() -> None:
    train = (
        "from apex import amp\ndef main(net, optimizer):\n    {0}\n    amp.initialize(net, optimizer)\n    {1}\n"
        "    act(1)\n"
    )
    bind = "act = F.softplus"
    assert list(find_early_bindings_of_torch(Module(HEAD + train.format(bind, "pass"))).values()) == [
        "softplus"
    ]
    assert not find_early_bindings_of_torch(Module(HEAD + train.format("pass", bind)))
    script = "from apex import amp\namp.initialize(net, optimizer)\ndef pick():\n    return F.softplus\n"
    assert not find_early_bindings_of_torch(Module(HEAD + script))


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


def _said(path: Path, text: str, rewritten: Any = "ordinary") -> str:
    path.write_text(text)
    choice = choose_rewrite_or_adapter([path], rewritten=rewritten)
    return " ".join([*choice.reason_lines(), *(line for each in choice.files for line in each.lines())])


def test_a_training_with_such_a_name_is_no_ordinary_one_and_has_a_note(tmp_path: Path) -> None:
    named = TRAIN.format(NAMED, "O1", "mse_loss(output, output.detach())")
    plain = TRAIN.format(PLAIN, "O1", "F.mse_loss(output, output.detach())")
    said = _said(tmp_path / "train.py", named)
    assert "binds mse_loss before amp.initialize" in said
    assert "mse_loss: bound before amp.initialize" in said
    assert "before amp.initialize" not in _said(tmp_path / "train.py", plain)
    assert "mse_loss: bound before" in _said(tmp_path / "train.py", named, rewritten="all")
    assert "mse_loss: bound before" not in _said(tmp_path / "train.py", named.replace('"O1"', '"O2"'))


def test_a_rewrite_names_other_files_that_bind_early(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(HEAD + NET.format("getattr(F, name)"))
    text = TRAIN.format(PLAIN + "from nets import Net\n", "O1", "F.mse_loss(output, output.detach())")
    assert "in nets.py, functions of torch: bound before" in _said(
        tmp_path / "train.py", text, rewritten="all"
    )
