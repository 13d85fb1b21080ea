"""Hooks of gradients, in which O1 casts and autocast does not."""

from pathlib import Path

import pytest

from ampcompare.source.migrate.adapter.choice import choose_adapter_for_all, choose_rewrite_or_adapter

TRAIN = """import torch
from apex import amp
{0}

model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level="{1}")
model.weight.register_hook({2})
for step in range(4):
    loss = model(torch.ones(4, 8, device="cuda")).float().mean()
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
"""
PROJECT = """
def turn(grad):
    return grad @ torch.eye(8)

def project(grad):
    return turn(grad)
"""
SAID = "a hook of gradients runs {} here: O1 casts in it too"


def _said(folder: Path, *words: str) -> str:
    path = folder / "train.py"
    path.write_text(TRAIN.format(*words))
    choice = choose_rewrite_or_adapter([path], rewritten="all")
    return " ".join(line for each in choice.files for line in each.lines())


@pytest.mark.parametrize(
    ("head", "hook", "names"),
    [
        ("", "lambda g: torch.mm(g, g)", "mm"),
        ("", "lambda g: g.mm(g).pow(2)", "pow, mm"),
        (PROJECT, "project", "@"),
        ("layer = torch.nn.Linear(8, 8)", "layer", "Linear"),
        ("from elsewhere import project", "project", "project"),
        ("", "lambda g: torch.clamp(g, -1, 1) / 2", ""),
        ("", "lambda g: print(g.shape, len(g))", ""),
    ],
)
def test_hooks_that_compute_what_o1_casts_have_a_note(
    tmp_path: Path, head: str, hook: str, names: str
) -> None:
    said = _said(tmp_path, head, "O1", hook)
    assert SAID.format(names) in said if names else "a hook of gradients" not in said


def test_a_level_that_casts_no_functions_has_no_note(tmp_path: Path) -> None:
    assert "a hook of gradients" not in _said(tmp_path, "", "O2", "lambda g: torch.mm(g, g)")


def test_hooks_in_a_network_of_another_file_are_named(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(
        "import torch\n\ndef watch(x):\n    x.register_hook(lambda g: g.norm())\n    return x\n"
    )
    said = _said(tmp_path, "from nets import watch", "O1", "lambda g: g")
    assert "nets.py: line 4: " + SAID.format("norm") in said


UNDER_ADAPTER = {
    "model.register_full_backward_hook(lambda m, gi, go: (go[0] @ m.weight,))": "@",
    "model.register_full_backward_pre_hook(lambda m, go: torch.matmul(go[0], m.weight))": "matmul",
    "model.weight.register_post_accumulate_grad_hook(lambda p: print(p.grad.norm()))": "norm",
    "(model.weight * 2).grad_fn.register_hook(lambda gi, go: torch.mm(go[0], go[0]))": "mm",
    "torch.nn.modules.module.register_module_full_backward_hook(lambda m, gi, go: go[0].mm(go[0].T))": "mm",
    "torch.nn.modules.module.register_module_full_backward_hook(lambda m, gi, go: None)": "",
    "model.register_full_backward_hook(lambda m, gi, go: print(go[0].shape))": "",
    "model.weight.register_hook(lambda g: torch.mm(g, g))": "",
    "model.register_forward_hook(lambda m, x, y: torch.mm(y, y))": "",
}


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(("line", "names"), UNDER_ADAPTER.items())
def test_hooks_of_modules_have_a_note_under_the_adapter(
    tmp_path: Path, line: str, names: str, apart: bool
) -> None:
    """Where those of tensors are cast in."""
    path, text = tmp_path / "train.py", TRAIN.replace("model.weight.register_hook({2})", "{2}")
    (tmp_path / "watch.py").write_text(f"import torch\n\ndef watch(model):\n    {line}\n")
    path.write_text(
        text.format("from watch import watch", "O1", "watch(model)") if apart else text.format("", "O1", line)
    )
    said = [
        one for each in choose_adapter_for_all([path]).files for one in each.lines() if "a hook of" in one
    ]
    assert len(said) == bool(names)
    if said:
        assert ("in watch.py: O1 casts" if apart else f"runs {names} here: O1 casts") in said[0]


OWN = """
class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod{0}
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return {1}
"""


@pytest.mark.parametrize(
    ("decorator", "value", "is_said"),
    [
        ("", "torch.mm(grad, weight.t()), x.t().mm(grad)", True),
        ("", "grad * x, grad", False),
        ("\n    @torch.cuda.amp.custom_bwd", "torch.mm(grad, weight.t()), x.t().mm(grad)", False),
    ],
)
def test_own_autograd_functions_that_compute_products_backward_are_named(
    tmp_path: Path, decorator: str, value: str, is_said: bool
) -> None:
    """Types that O1 makes one may differ there: torch refuses such products."""
    said = _said(tmp_path, OWN.format(decorator, value), "O1", "print")
    assert ("the backward pass of Product runs mm here" in said) is is_said
