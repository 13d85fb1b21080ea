"""A script with the adapter in the place of Apex: every arm trains it as it trains the script before `migrate`."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ampcompare.source.amp_names import ADAPTER
from ampcompare.source.migrate.adapter.imports import adapt_text, adapter_text
from ampcompare.source.migrate.adapter.mark import MARK, has_adapter_mark

pytestmark = pytest.mark.integration

BEFORE = """import torch
from torch import nn
from apex import amp

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 3)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
amp.register_float_function(torch, "sigmoid")


@amp.half_function
def product(a, b):
    return a @ b


model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
for step in range(6):
    x, y = torch.randn(8, 4).cuda(), torch.randint(3, (8,)).cuda()
    out = model(x)
    loss = nn.functional.cross_entropy(out, y) + torch.sigmoid(out).mean() + product(out, out.t()).mean()
    with amp.disable_casts():
        loss = loss + out.float().square().mean()
    loss = loss * float("inf" if step == 2 else 1)
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
    optimizer.step()
    if step == 3:
        amp.load_state_dict(amp.state_dict())
    with torch.no_grad():
        accuracy = model.eval()(x).float().sum().item()
    model.train()
    print(step, repr(loss.item()), repr(accuracy), amp._amp_state.loss_scalers[0].loss_scale())
print([repr(each.double().sum().item()) for each in model.parameters()])
"""
TWO_LOSSES = """import torch
from torch import nn
from apex import amp

torch.manual_seed(0)
nets = [nn.Linear(4, 4).cuda(), nn.Linear(4, 1).cuda()]
optimizers = [torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9) for net in nets]
nets, optimizers = amp.initialize(nets, optimizers, opt_level="O2", num_losses=2, verbosity=0)
for step in range(5):
    for part in range(2):
        hidden = nets[0](torch.randn(8, 4).cuda())
        losses = [hidden.float().square().mean(), nets[1](hidden.detach()).float().square().mean()]
        for number, (loss, optimizer) in enumerate(zip(losses, optimizers)):
            with amp.scale_loss(loss, optimizer, loss_id=number, delay_unscale=part == 0) as scaled:
                scaled.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    print([repr(loss.item()) for loss in losses])
print([repr(each.double().sum().item()) for net in nets for each in net.parameters()])
"""
ARMS = [
    *("native:fp16", "O2"),
    *(
        pytest.param(arm, marks=pytest.mark.slow)
        for arm in (
            "fp32",
            "bf16",
            "O0",
            "O1",
            "O3",
            "half:bf16",
            "half:masters=fp32,dynamic",
            "apex:O1,loss_scale=64",
        )
    ),
]
KINDS = ("initialize", "backward", "plain_backward", "step", "note")


def run(python: Any, folder: Path, *words: str) -> tuple[str, list[dict[str, Any]]]:
    """Run a script, and return what it printed, and the rows of its record without times."""
    words = ("-m", "ampcompare", "exec", "--device", "cpu", "--record", "rows.jsonl", *words)
    done = python.run(list(words), folder, {**os.environ, "PYTHONWARNINGS": "ignore"})
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    return done.stdout, [{**row, "seconds": None} for row in rows if row.get("kind") in KINDS]


@pytest.mark.parametrize("text", [BEFORE, TWO_LOSSES], ids=["one_loss", "two_losses"])
@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_trains_both_scripts_alike(arm: str, text: str, tmp_path: Path, forked_python: Any) -> None:
    """Losses, scales, skipped steps, evaluations and weights agree to the last bit."""
    (tmp_path / "before.py").write_text(text)
    (tmp_path / "after.py").write_text(adapt_text(text).text)
    (tmp_path / f"{ADAPTER}.py").write_text(adapter_text(), encoding="utf-8")
    before = run(forked_python, tmp_path, "--arm", arm, "before.py")
    assert run(forked_python, tmp_path, "--arm", arm, "after.py") == before
    losses = [row["loss"] for row in before[1] if row["kind"] == "backward"]
    assert len(losses) == (6 if text is BEFORE else 20)


PLACES = {  # the adapter, the import of the script, the script and the words that run it
    "in_a_package": (
        "pkg/sub/adapter.py",
        "from .sub.adapter import amp",
        "pkg/train.py",
        ("-m", "pkg.train"),
    ),
    "under_another_name": ("mixed.py", "import mixed as amp", "train.py", ("train.py",)),
    "by_its_full_name": (
        "pkg/adapter.py",
        "import pkg.adapter\namp = pkg.adapter",
        "train.py",
        ("train.py",),
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_the_adapter_is_known_by_its_mark(place: str, tmp_path: Path, forked_python: Any) -> None:
    adapter, imported, script, words = PLACES[place]
    (tmp_path / adapter).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / adapter).write_text("# Copyright of the project.\n" + adapter_text(), encoding="utf-8")
    text = TWO_LOSSES.replace("from apex import amp\n", "")
    late = text.replace("nets, optimizers = amp", imported.replace("\n", "; ") + "\nnets, optimizers = amp")
    (tmp_path / script).write_text(late)
    (tmp_path / "before.py").write_text(TWO_LOSSES)
    before = run(forked_python, tmp_path, "--arm", "O1", "before.py")
    assert run(forked_python, tmp_path, "--arm", "O1", *words) == before


def test_the_adapter_acts_by_itself_as_the_script_is_written(tmp_path: Path, forked_python: Any) -> None:
    """Also without an arm, and under a name of the project's own; losses are those before the scale."""
    (tmp_path / "mixed.py").write_text(adapter_text(), encoding="utf-8")
    (tmp_path / "train.py").write_text(BEFORE.replace("from apex import amp", "import mixed as amp"))
    (tmp_path / "before.py").write_text(BEFORE)
    for words in ((), ("--arm", "script")):
        printed, rows = run(forked_python, tmp_path, *words, "train.py")
        assert "mixed" not in printed
        losses = [row["loss"] for row in rows if row["kind"] == "backward"]
        assert [each == "inf" for each in losses] == [number == 2 for number in range(6)]
        assert max(each for each in losses if each != "inf") < 10
        assert [row["applied"] for row in rows if row["kind"] == "step"] == [
            False,
            True,
            False,
            True,
            True,
            True,
        ]


def test_an_opt_level_of_the_command_is_that_of_the_adapter(tmp_path: Path, forked_python: Any) -> None:
    (tmp_path / "mixed.py").write_text(adapter_text(), encoding="utf-8")
    text = TWO_LOSSES.replace("from apex import amp", "import mixed as amp")
    (tmp_path / "train.py").write_text(text)
    (tmp_path / "plain.py").write_text(text.replace("O2", "O0"))
    asked = run(forked_python, tmp_path, "--opt-level", "O0", "train.py")
    assert asked == run(forked_python, tmp_path, "plain.py")
    assert asked[1][0]["opt_level"] == "O0"


def test_the_mark_is_that_of_the_text(tmp_path: Path) -> None:
    """Of the adapter alone: a file that speaks of it has no mark."""
    assert adapter_text().startswith(f'"""{MARK}')
    other = tmp_path / "other.py"
    other.write_text(f'MARK = "{MARK}"\n')
    assert not has_adapter_mark(str(other))
    assert not has_adapter_mark(str(tmp_path / "missing.py"))
