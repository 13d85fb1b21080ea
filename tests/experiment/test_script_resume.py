"""`exec --verify-resume`: scripts that resume, and scripts with one planted mistake, whose role and cause are named."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ampcompare.base.errors import ConfigError, LaunchError
from ampcompare.experiment.script_resume import ResumeCheck, verify_script_resume

SCRIPT = """import argparse
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--resume")
options = parser.parse_args()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
order = torch.Generator().manual_seed(1)
x, y = torch.randn(12, 4), torch.randint(0, 2, (12,))
first = 0
if options.resume:
    saved = torch.load(options.resume)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    schedule.load_state_dict(saved["schedule"])
    scaler.load_state_dict(saved["scaler"])
    torch.set_rng_state(saved["torch"])
    order.set_state(saved["order"])
    first = saved["epoch"]
for epoch in range(first, 3):
    for index in torch.randperm(12, generator=order).split(4):
        loss = nn.functional.cross_entropy(model(x[index]), y[index])
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    schedule.step()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
    saved.update(scaler=scaler.state_dict(), torch=torch.get_rng_state(), order=order.get_state(), epoch=epoch + 1)
    torch.save(saved, "last.pt")
"""
# The weights are in bf16, and fp32 masters are optimized.
MASTERS = """import argparse
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--resume")
options = parser.parse_args()
torch.manual_seed(0)
model = nn.Linear(4, 2)
saved = torch.load(options.resume) if options.resume else {"step": 0}
masters = [each.detach().clone().requires_grad_() for each in model.parameters()]
optimizer = torch.optim.SGD(masters, lr=0.1, momentum=0.9)
model.bfloat16()
if options.resume:
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    with torch.no_grad():
        for master, each in zip(masters, saved["masters"]):
            master.copy_(each)
x = torch.randn(6, 8, 4).bfloat16()
for step in range(saved["step"], 6):
    loss = model(x[step]).float().square().mean()
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for master, weight in zip(masters, model.parameters()):
            master.grad = weight.grad.float()
        optimizer.step()
        for master, weight in zip(masters, model.parameters()):
            weight.copy_(master)
    torch.save({"model": model.state_dict(), "masters": masters, "optimizer": optimizer.state_dict(), "step": step + 1},
               "last.pt")
"""
# As Apex documents it.
APEX = """import argparse
import torch
from apex import amp
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--resume")
options = parser.parse_args()
torch.manual_seed(0)
model = nn.Linear(4, 2).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
first = 0
if options.resume:
    saved = torch.load(options.resume)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    amp.load_state_dict(saved["amp"])
    first = saved["step"]
x = torch.randn(6, 8, 4).cuda()
for step in range(first, 6):
    loss = model(x[step]).float().square().mean()
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}
    torch.save({**saved, "step": step + 1}, "last.pt")
"""
# Two networks, each with an optimizer, a generator of noise, and an average that only an object of the script has.
TWO = """import argparse
import pathlib
import torch
from torch import nn

class Average:
    def __init__(self, model):
        self.values = [each.detach().clone() for each in model.parameters()]
    def update(self, model):
        for mine, each in zip(self.values, model.parameters()):
            mine.lerp_(each.detach(), 0.2)

def main(resume):
    torch.manual_seed(0)
    made, judge = nn.Linear(3, 2), nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    first, second = torch.optim.Adam(made.parameters(), 0.01), torch.optim.RMSprop(judge.parameters(), 0.01)
    noise, hooks, begin = torch.Generator().manual_seed(1), {made: [Average(made)]}, 0
    if resume:
        saved = torch.load(resume)
        made.load_state_dict(saved["made"]), judge.load_state_dict(saved["judge"])
        first.load_state_dict(saved["first"])
        second.load_state_dict(saved["second"])
        noise.set_state(saved["noise"])
        hooks[made][0].values = saved["average"]
        begin = saved["step"]
    x = torch.randn(6, 4, 2)
    for step in range(begin, 6):
        z = torch.randn(4, 3, generator=noise)
        loss = nn.functional.softplus(judge(made(z).detach()) - judge(x[step])).mean()
        second.zero_grad(), loss.backward(), second.step()
        loss = nn.functional.softplus(-judge(made(z))).mean()
        first.zero_grad(), loss.backward(), first.step()
        hooks[made][0].update(made)
        folder = pathlib.Path("runs")
        folder.mkdir(exist_ok=True)
        saved = {"made": made.state_dict(), "judge": judge.state_dict(), "first": first.state_dict(), "step": step + 1}
        saved.update(second=second.state_dict(), noise=noise.get_state(), average=hooks[made][0].values)
        torch.save(saved, folder / f"{step}.pt")

parser = argparse.ArgumentParser()
parser.add_argument("--resume")
main(parser.parse_args().resume)
"""
LOAD = {
    name: f'    {name}.load_state_dict(saved["{name}"])\n'
    for name in ("model", "optimizer", "schedule", "scaler")
}
FOLDER = """import argparse
import torch
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

parser = argparse.ArgumentParser()
parser.add_argument("--resume")
options = parser.parse_args()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
x = torch.randn(7, 5, 4)


class Application:
    step = 0

    def state_dict(self):
        of_model, of_optimizer = get_state_dict(model, optimizer)
        return {"model": of_model, "optimizer": of_optimizer, "step": self.step}

    def load_state_dict(self, saved):
        set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
        self.step = saved["step"]


application = Application()
if options.resume:
    checkpoint.load({"application": application}, checkpoint_id=options.resume)
while application.step < 7:
    loss = model(x[application.step]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    application.step += 1
    if application.step % 3 == 0:
        checkpoint.save({"application": application}, checkpoint_id=f"saved/{application.step}")
"""
SAVE_BOTH = """    save_file(model.state_dict(), "last.safetensors")
    torch.save(saved, "last.pt")"""
OF_MOMENTS = """    half = __import__("copy").deepcopy(optimizer.state_dict())
    for state in half["state"].values():
        state["exp_avg"] = state["exp_avg"].bfloat16()
        state["exp_avg_sq"] = state["exp_avg_sq"].bfloat16()
    saved = {"model": model.state_dict(), "optimizer": half"""
# Each: the script, what is replaced in it by what, and the role and cause that must be named.
MISTAKES: dict[str, tuple[str, list[tuple[str, str]], str, str]] = {
    "moments are not saved": (
        SCRIPT,
        [(LOAD["optimizer"], ""), ('"optimizer": optimizer.state_dict(), ', "")],
        "moments",
        r"the optimizer starts from scratch: its state is not in the file \(train.py:\d+\)",
    ),
    "moments are not loaded": (SCRIPT, [(LOAD["optimizer"], "")], "moments", "is in the file, and is not loaded"),
    "moments are saved in bf16": (
        SCRIPT,
        [('    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()', OF_MOMENTS)],
        "moments",
        r"moments were saved or loaded in bf16 \(train.py:\d+\)",
    ),
    "the scaler is not saved": (
        SCRIPT,
        [(LOAD["scaler"], ""), ("scaler=scaler.state_dict(), ", "")],
        "loss scale",
        "the GradScaler starts from scratch: its state is not in the file",
    ),
    "the scaler is not loaded": (SCRIPT, [(LOAD["scaler"], "")], "loss scale", "is in the file, and is not loaded"),
    "the schedule is not loaded": (
        SCRIPT,
        [(LOAD["schedule"], '    optimizer.param_groups[0]["lr"] = 0.01\n')],
        "learning rate",
        "the schedule starts from scratch: its state is in the file, and is not loaded",
    ),
    "the generator of dropout is not restored": (
        SCRIPT,
        [('    torch.set_rng_state(saved["torch"])\n', "")],
        "loss",
        r"dropout, or what else is random, draws other numbers: generators are not restored \(torch\)",
    ),
    "the sampler starts again": (
        SCRIPT,
        [('    order.set_state(saved["order"])\n', "")],
        "batches",
        "the sampler starts its epoch again: these are the batches of step 1",
    ),
    "augmentation draws others": (
        SCRIPT,
        [('    torch.set_rng_state(saved["torch"])\n', ""), ("model(x[index])", "model(x[index] + torch.randn(4, 1))")],
        "batches",
        r"samples are others: generators from which a sampler or an augmentation draws are not restored \(torch\)",
    ),
    "weight decay is another one": (
        SCRIPT,
        [(LOAD["optimizer"], f'{LOAD["optimizer"]}    optimizer.param_groups[0]["weight_decay"] = 0.1\n')],
        "options",
        r"weight_decay: 0.1 in place of 0 .*options of the optimizer are others, though train.py:\d+ loads its state",
    ),
    "weights are saved in bf16": (
        SCRIPT,
        [('{"model": model.state_dict()', '{"model": {k: v.bfloat16() for k, v in model.state_dict().items()}')],
        "weights",
        r"weights were saved or loaded in bf16 \(train.py:\d+\)",
    ),
    "buffers are left out": (
        SCRIPT,
        [('load_state_dict(saved["model"])', 'load_state_dict(dict(saved["model"]), strict=False)'),
         ('{"model": model.state_dict()', '{"model": dict(model.named_parameters())')],
        "buffers",
        "",
    ),
    "masters are made from bf16 weights": (
        MASTERS,
        [("master.copy_(each)", "master.copy_(each.bfloat16())")],
        "masters",
        "masters are rounded to bf16: they are made again from the bf16 weights at load",
    ),
    "Apex saves no masters": (
        APEX,
        [],
        "masters",
        "masters are rounded to fp16: they are made again from the fp16 weights at load",
    ),
    "the second optimizer is not loaded": (
        TWO,
        [('        second.load_state_dict(saved["second"])\n', "")],
        "moments",
        "of optimizer 2 .*optimizer 2 starts from scratch: its state is in the file, and is not loaded",
    ),
    "an object's average is not loaded": (
        TWO, [('        hooks[made][0].values = saved["average"]\n', "")], "averages", "average of the weights is not"
    ),
    "an older file is loaded": (
        TWO,
        [("torch.load(resume)", 'torch.load(sorted(pathlib.Path("runs").iterdir())[1])')],
        "weights",
        r"an older file is loaded: 1.pt, of step 2 \(train.py:\d+\)",
    ),
    "epochs are counted from 0": (SCRIPT, [('saved["epoch"]', "0")], "steps", "does not continue its count of steps"),
    "the file is not loaded": (
        SCRIPT, [("if options.resume:", "if False:")], "weights", "the script loads none of its files",
    ),
}  # fmt: skip
RIGHT: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "all is restored": (SCRIPT, []),
    "masters are saved": (MASTERS, []),
    "two optimizers in turn": (TWO, []),
    "a folder of torch.distributed.checkpoint": (FOLDER, []),
    "weights in a file of safetensors": (
        SCRIPT,
        [("import argparse", "import argparse\nfrom safetensors.torch import load_file, save_file"),
         ('saved["model"]', 'load_file("last.safetensors")'), ('"model": model.state_dict(), ', ""),
         ('    torch.save(saved, "last.pt")', SAVE_BOTH)],
    ),
    "nothing draws from the generator": (
        SCRIPT, [("nn.Dropout(0.2), ", ""), ('    torch.set_rng_state(saved["torch"])\n', "")]
    ),
    "it saves under another name first": (
        SCRIPT,
        [('torch.save(saved, "last.pt")', 'torch.save(saved, "last.tmp")\n    os.replace("last.tmp", "last.pt")'),
         ("import argparse", "import argparse, os")],
    ),
    "SGD has no state": (
        SCRIPT, [("torch.optim.Adam(model.parameters(), lr=0.01)", "torch.optim.SGD(model.parameters(), lr=0.01)")]
    ),
    "no scaler": (
        SCRIPT, [('"cpu", init_scale=8.0, growth_interval=2', '"cpu", enabled=False'), ("scaler.scale(loss)", "loss")]
    ),
    "it evaluates between epochs": (
        SCRIPT, [("    schedule.step()\n", "    schedule.step()\n    model.eval()\n    model(x)\n    model.train()\n")]
    ),
    "another optimizer": (SCRIPT, [("torch.optim.Adam(", "torch.optim.AdamW(")]),
    "the whole model is saved": (
        SCRIPT, [('"model": model.state_dict()', '"model": model'), ('saved["model"])', 'saved["model"].state_dict())'),
                 ("torch.load(options.resume)", "torch.load(options.resume, weights_only=False)")],
    ),
}  # fmt: skip

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("forked_runs")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert [path.name for path in tmp_path.iterdir()] in ([], ["train.py"])  # what it saves is in copies


def verify(
    folder: Path, text: str, changes: list[tuple[str, str]], step: int = 3, **options: Any
) -> tuple[int, str]:
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / "train.py").write_text(text, encoding="utf-8")
    said: list[str] = []
    settings = {
        "arm": "script",
        "device": "cpu",
        "guards": "off",
        "seed": 0,
        "name": "train.py",
        "arguments": [],
    }
    check = ResumeCheck(step, "--resume {checkpoint}", **options)
    code = verify_script_resume(settings, check, is_module=False, say=said.append)
    return code, "\n".join(said)


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_role_and_cause_of_a_mistake_are_named(folder: Path, name: str) -> None:
    text, changes, role, cause = MISTAKES[name]
    code, said = verify(folder, text, changes)
    assert code == 1, said
    assert "resumes: exact" not in said
    rows = [line for line in said.splitlines() if re.match(rf"{role}\s+\d", line)]
    assert len(rows) == 1, said
    assert re.search(cause, rows[0]), said
    answer = said.splitlines()[-1]
    assert re.search(cause.partition(".*")[2] or cause, answer), said
    if role not in ("batches", "steps") and "file is not" not in name:
        assert f"by {role}" in answer


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_a_script_that_resumes_is_exact(folder: Path, name: str) -> None:
    code, said = verify(folder, *RIGHT[name])
    assert (code, said.count("resumes: exact in the ")) == (0, 1), said


@pytest.mark.slow
def test_what_cannot_be_verified_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="trains 9 steps, and none behind step 9; name an earlier one"):
        verify(folder, SCRIPT, [], step=9)
    with pytest.raises(
        ConfigError, match="between step 7 and its last step: the last file before its end is that of"
    ):
        verify(folder, SCRIPT, [], step=7)
    with pytest.raises(ConfigError, match=r"saves nothing by torch\.save"):
        verify(folder, SCRIPT, [('    torch.save(saved, "last.pt")\n', "")])
    whole = [
        (LOAD["optimizer"], '    model, optimizer = saved["model"], saved["optimizer"]\n'),
        (LOAD["model"] + "    model", "    model"),
        (LOAD["schedule"], ""),
        ('"optimizer": optimizer.state_dict()', '"optimizer": optimizer'),
        ('"model": model.state_dict()', '"model": model'),
        ("load(options.resume)", "load(options.resume, weights_only=False)"),
        ("scaler.scale(loss)", "loss"),
        ("scaler.step(optimizer)\n        scaler.update()", "optimizer.step()"),
    ]
    with pytest.raises(ConfigError, match=r"brings as a whole is not followed\. Save its state_dict\(\)"):
        verify(folder, SCRIPT, whole)
    with pytest.raises(
        LaunchError, match=r"the script \(started again\) ended with exit code 1: KeyError: 'schedule'"
    ):
        verify(folder, SCRIPT, [('"schedule": schedule.state_dict()', "")])
