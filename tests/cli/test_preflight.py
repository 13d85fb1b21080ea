"""Before a matrix a few steps of each arm are trained: fifteen mistakes are said once, and healthy scripts start."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ampcompare.experiment import preflight as module
from ampcompare.experiment.preflight import SKIPPED

pytestmark = pytest.mark.integration

# Counts its steps in a file that every cell appends to, the only one that cells may change.
TRAIN = """
import argparse, os, sys, torch
from torch import nn
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--seed", type=int)
{arguments}
args = parser.parse_args()
{setup}
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
for step in range(8):
    x = torch.randn(16, 8)
    loss = nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    {step}
    with open(os.environ["COUNT"], "a") as count:
        count.write("x")
    print("step", step, "loss", round(loss.item(), 4))
print("final accuracy: 0.75")
"""


def script(*, arguments: str = "", setup: str = "", step: str = "") -> str:
    return TRAIN.format(arguments=arguments, setup=setup, step=step)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a user."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "real").mkdir()
    monkeypatch.setenv("COUNT", str(tmp_path / "real" / "count"))
    monkeypatch.setenv("AMPCOMPARE_COMPARE_ALLOW_WRITES", "real")
    return tmp_path


# What is planted, the arguments of compare and of the script, the exit code, and what is said, once.
CERTAIN: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], int, str]] = {
    "an argument is missing": (
        script(arguments="parser.add_argument('--data', required=True)"), (), (), 3,
        "error: the following arguments are required: --data (usage: train.py [-h]",
    ),
    "an argument is unknown": (
        script(), (), ("--learning-rate", "1"), 3, "error: unrecognized arguments: --learning-rate 1 (usage: train.py",
    ),
    "no GPU": (
        script(setup="torch.zeros(1).cuda()"), (), (), 4, "(train.py:9); this machine has no GPU: add --device cpu",
    ),
    "a mistake of syntax": (script(setup="if 1 print()"), (), (), 3, "SyntaxError: invalid syntax (train.py, line 9)"),
    "a missing module": (script(setup="import nosuch"), (), (), 3, "No module named 'nosuch' (train.py:9)"),
    "a question": (script(setup="input('go on? ')"), (), (), 3, "the script reads from standard input"),
    "no step": (script(setup="sys.exit()"), (), (), 3, "no optimizer of torch has updated the weights of a module"),
    "a step that raises": (script(step="raise ValueError('labels')"), (), (), 3, "ValueError: labels (train.py:18)"),
    "half a number": (
        script(step="print('f1 1,234')"), ("--metric", r"f1=f1 (\d)"), (), 2, "metric f1: its pattern takes 1 of 1",
    ),
    "one seed": (
        script(setup="torch.manual_seed(0)"), (), (), 2, "torch.manual_seed(0) in train.py:9: --shift-seeds shifts",
    ),
    "only generators of its own": (
        script(setup="g = torch.Generator().manual_seed(0)")
        .replace("torch.randn(16, 8)", "torch.randn(16, 8, generator=g)")
        .replace("optimizer =", "for p in model.parameters(): nn.init.normal_(p, generator=g)\noptimizer ="),
        ("--shift-seeds",), (), 2, "torch.Generator(0) in train.py:9, which --shift-seeds all shifts",
    ),
    "weights from a file, in a fixed order": (
        script(setup="torch.manual_seed(0); torch.save(nn.Linear(8, 2).state_dict(), 'first.pt')")
        .replace("optimizer =", "model = nn.Linear(8, 2); model.load_state_dict({'weight': torch.ones(2, 8), "
                 "'bias': torch.ones(2)})\noptimizer =").replace("torch.randn(16, 8)", "torch.eye(16, 8)"),
        ("--shift-seeds", "all"), (), 2, "come from files (Module.load_state_dict in train.py:11)",
    ),
    "no arm": (
        script(setup="import torch.optim.adamw; torch.set_default_dtype(torch.float64)"),
        ("--arm", "bf16,O2", "--reference", "O2"), (), 2,
        "float64, which apex:O2 is not made for",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", CERTAIN)
def test_what_is_certain_to_fail_stops_there(call: Any, folder: Path, what: str) -> None:
    """Once, with its exit code, before any cell has begun; `--dry-run` says it too."""
    text, options, arguments, code, said = CERTAIN[what]
    (folder / "train.py").write_text(text)
    device = () if what == "no GPU" else ("--device", "cpu")
    arms = () if "--arm" in options else ("--arm", "fp32,bf16")
    done = call(
        "compare", *arms, *device, "--seeds", "0-2", "-o", "out", *options, "--", "train.py", *arguments
    )
    assert (done.code, done.out) == (code, ""), done.err
    assert done.err.count(said) == 1, done.err
    assert SKIPPED in done.err
    assert not list((folder / "out").glob("cells/*"))
    steps = (folder / "real" / "count").read_text() if (folder / "real" / "count").exists() else ""
    assert len(steps) <= 6  # of the trials of two arms
    stored = json.loads((folder / "out" / "plan.json").read_text())["preflight"]
    assert said.split(" (")[0].removeprefix("apex:O2: ") in json.dumps(stored)


@pytest.mark.parametrize(
    "words",
    [
        ["diagnose", "--arm", "bf16", "--device", "cpu", "--", "train.py", "--nosuch"],
        ["profile", "--arm", "fp32,bf16", "--device", "cpu", "--", "train.py", "--nosuch"],
        ["migrate", "--verify", "train.py", "--", "--nosuch"],
    ],
    ids=lambda words: words[0],
)
def test_other_commands_try_a_script_too(call: Any, folder: Path, words: list[str]) -> None:
    """What is certain to fail is said in one line, with the usage, before any long run."""
    (folder / "train.py").write_text(
        script().replace(
            "import argparse", "from apex.parallel import DistributedDataParallel\nimport argparse"
        )
    )
    done = call(*words)
    assert (done.code, done.out) == (3, "")
    assert done.err.count("unrecognized arguments: --nosuch (usage: train.py [-h]") == 1
    assert SKIPPED in done.err


DOUBTFUL: dict[str, tuple[str, tuple[str, ...], str]] = {
    "the seed is not followed": (
        script(setup="torch.manual_seed(0)"), (), "does not follow the seed, so that all seeds give the same run: "
        "the script seeds torch.manual_seed(0) in train.py:9: --shift-seeds shifts that for each seed, or "
        "--seed-arg=--seed passes it on",
    ),
    "a metric of the end": (script(), ("--metric", r"acc=accuracy: ([\d.]+)"), "metric acc: not seen in 3 steps"),
    "a metric of each step": (script(), ("--metric", r"loss:min=loss ([\d.]+)"), "metric loss: 0."),
    "an arm that cannot": (
        script(step="optimizer.step(lambda: loss)").replace("AdamW", "LBFGS").replace("    optimizer.step()\n", ""),
        ("--arm", "fp32,O1"), "  apex:O1 cannot train: ",
    ),
    "a file that is written": (script(step="torch.save(1, 'ck.pt')"), (), "writes"),
    "an optimizer of other weights": (
        script().replace("for step in", "import copy; model = copy.deepcopy(model)\nfor step in"),
        ("--arm", "script,fp32"), "AdamW got no gradient for any of its 4 weights in its first 2 steps",
    ),
    "a loss that is no number": (
        script().replace("optimizer.zero_grad()", "loss = loss.log() + torch.nan; optimizer.zero_grad()"), (),
        "  the loss is not finite in step 0, before anything is compared",
    ),
    "a loss that one arm cannot hold": (
        script().replace("for step in", "model[2].weight.data.mul_(1e6)\nfor step in"), ("--arm", "script,half"),
        "  half: the loss is not finite in step 0, before anything is compared",
    ),
}  # fmt: skip


def test_a_profile_of_too_few_steps_does_not_begin(call: Any, folder: Path) -> None:
    """The loops of the script say how many it makes."""
    (folder / "train.py").write_text(script())
    done = call("profile", "--arm", "fp32", "--device", "cpu", "--", "train.py")
    assert done.code == 2
    assert "the script makes 8 steps, and" in done.err


LONGER = (
    "a metric of each step",
    "a metric of the end",
    "a file that is written",
    "a loss that is no number",
)


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=[pytest.mark.slow] * (what in LONGER)) for what in DOUBTFUL]
)
def test_what_is_doubtful_is_said_and_the_matrix_starts(call: Any, folder: Path, what: str) -> None:
    """Once, before the first cell."""
    text, options, said = DOUBTFUL[what]
    (folder / "train.py").write_text(text)
    arms = () if "--arm" in options else ("--arm", "fp32,bf16")
    done = call("compare", *arms, "--device", "cpu", "--seeds", "0", "-o", "out", *options, "--", "train.py")
    assert said in done.err.partition("[1/2]")[0], done.err
    assert done.err.partition("[1/2]")[0].count(said) == 1
    assert len(list((folder / "out").glob("cells/*/record.json"))) == 2


CLIPPED = """
import torch
from torch import nn
from clipping import clip

model = nn.Linear(8, 2).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cuda")
for step in range(16):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(torch.randn(16, 8).cuda()), torch.ones(16).long().cuda())
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    clip(optimizer)
    scaler.step(optimizer)
    scaler.update()
"""
CLIPPING = """
def clip(optimizer):
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad.clamp_(-0.5, 0.5)
"""


@pytest.mark.parametrize("guards", ["on", pytest.param("off", marks=pytest.mark.slow)])
def test_a_mistake_in_the_use_of_amp_is_said_before_any_cell(call: Any, folder: Path, guards: str) -> None:
    """Once, for the script as it is; the report has it too, and the cell's timed steps run without guards."""
    (folder / "train.py").write_text(CLIPPED)
    (folder / "clipping.py").write_text(CLIPPING)
    words = ("--no-guards",) * (guards == "off")
    done = call(
        "compare",
        "--arm",
        "script,fp32",
        "--device",
        "cpu",
        "--seeds",
        "0",
        "-o",
        "out",
        *words,
        "--",
        "train.py",
    )
    said = (
        "guard clip-scaled: clipping.py:5: gradients are limited by clamp before scaler.unscale_(optimizer)"
    )
    assert done.code == 0
    assert done.err.count(said) == (guards == "on"), done.err
    assert f"  script: {said}" in done.err.partition("[1/2]")[0] or guards == "off"
    report = (folder / "out" / "report.md").read_text()
    assert ("guard clip-scaled: clipping.py:5: gradients are limited" in report) == (guards == "on")
    records = [json.loads(path.read_text()) for path in (folder / "out").glob("cells/*/record.json")]
    found = {record["arm"]: [text.partition(";")[0] for text in record["guards"]] for record in records}
    assert found == {"script": [said] * (guards == "on"), "fp32": []}


def test_what_takes_long_is_ended(call: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow steps after the first one, a script that makes none, and other arms than the reference."""
    monkeypatch.setattr(module, "MAX_SECONDS", 0.2)
    words = ("compare", "--arm", "fp32,bf16", "--device", "cpu", "--dry-run", "--json", "--", "train.py")
    (folder / "train.py").write_text(script(step="import time; time.sleep(60 * (step == 1))"))
    arms = call(*words).json()["preflight"]["arms"]
    # those before the sleep
    assert [(trial["error"], trial["steps"]) for trial in arms.values()] == [("", 2), ("", 2)]
    monkeypatch.setattr(module, "MAX_SECONDS_BEFORE", 0.2)
    (folder / "train.py").write_text(script(setup="import time; time.sleep(60)"))
    found = call(*words).json()["preflight"]
    assert [(trial["error"], trial["steps"]) for trial in found["arms"].values()] == [("", 0)]
    assert found["untried"] == ["native:bf16"]
    assert "no step yet" in call(*(word for word in words if word != "--json")).out


def test_arms_for_which_the_time_does_not_last_are_named(
    call: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MIN_BUDGET", 0.0)
    (folder / "train.py").write_text(script())
    done = call(
        "compare", "--arm", "fp32,bf16,O1", "--seeds", "0", "--device", "cpu", "--dry-run", "--", "train.py"
    )
    assert "preflight" in done.out
    assert "  native:bf16, apex:O1 not tried, as that takes long: their first cells show it" in done.out


@pytest.mark.slow
def test_the_plan_is_estimated_from_its_steps(call: Any, folder: Path) -> None:
    """The loop of the script says how many a cell makes; without a preflight nothing is known, and nothing runs."""
    (folder / "train.py").write_text(script())
    words = ("compare", "--arm", "fp32,bf16", "--device", "cpu", "--dry-run", "-o", "out")
    done = call(*words, "--", "train.py")
    assert "fp32, native:bf16 trained, 3 steps each, with AdamW, loss 0." in done.out
    assert "for 6 cells in turn, 8 steps each" in done.out
    assert re.search(
        r"time and memory: about [\d.ms]+ for 6 cells without a record, estimated from a few", done.out
    )
    found = call(*words, "--json", "--", "train.py").json()
    assert found["preflight"]["cell_steps"] == 8
    assert 0 < found["estimate"]["seconds"] < 60
    steps = len((folder / "real" / "count").read_text())
    assert steps == 8  # two in each of four short runs: the third ends it
    assert "time and memory: unknown" in call(*words, "--no-preflight", "--", "train.py").out
    assert len((folder / "real" / "count").read_text()) == steps
    assert not (folder / "out").exists()


@pytest.mark.slow
def test_a_plan_with_records_is_not_tried_again(call: Any, folder: Path) -> None:
    """Only an arm that is new is; what the first preflight has seen stays in the plan."""
    (folder / "train.py").write_text(script())
    words = ("--device", "cpu", "--seeds", "0", "-o", "out", "--", "train.py")
    assert "preflight" in call("compare", "--arm", "fp32", *words).err
    assert "preflight" not in call("compare", "--arm", "fp32", *words).err
    again = call("compare", "--arm", "fp32,bf16", *words)
    assert "native:bf16 trained, 3 steps each" in again.err
    stored = json.loads((folder / "out" / "plan.json").read_text())["preflight"]
    assert list(stored["arms"]) == ["fp32", "native:bf16"]


def test_what_fails_later_in_all_cells_ends_the_matrix(call: Any, folder: Path) -> None:
    """The reference and another arm have failed alike, and the rest is not paid for."""
    (folder / "train.py").write_text(script() + "raise KeyError('val')\n")
    words = ("--device", "cpu", "--seeds", "0-2", "-o", "out", "--", "train.py")
    done = call("compare", "--arm", "fp32,bf16", *words)
    assert done.code == 3
    assert "ampcompare: each cell that ran failed: KeyError: 'val' (train.py:" in done.err
    assert len(list((folder / "out").glob("cells/*/record.json"))) == 2


HEALTHY: dict[str, str] = {
    "two steps": script().replace("range(8)", "range(2)"),
    "reads what is piped": script(setup="sys.stdin.read()"),
    "catches everything": "while True:\n    try:\n"
    + "".join(f"        {line}\n" for line in script().splitlines())
    + "    except:\n        continue\n",
    "closure": script(step="optimizer.step(lambda: loss)").replace("    optimizer.step()\n", ""),
    "two optimizers": script(
        step="other.step()",
        setup="free = nn.Linear(8, 2); other = torch.optim.SGD(free.parameters(), lr=0.1)",
    ).replace(
        "loss = nn.functional.cross_entropy(model(x)", "loss = nn.functional.cross_entropy(model(x) + free(x)"
    ),
    "without end": script().replace("for step in range(8):", "for step in iter(int, 1):"),
}


QUICK = ("two steps", "catches everything", "closure", "two optimizers")


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=[pytest.mark.slow] * (what not in QUICK)) for what in HEALTHY]
)
def test_healthy_scripts_are_not_refused(call: Any, folder: Path, what: str) -> None:
    """Whatever their shape: each arm makes its steps, and no line is about what it cannot do."""
    (folder / "train.py").write_text(HEALTHY[what])
    done = call("compare", "--arm", "fp32,bf16", "--device", "cpu", "--dry-run", "--json", "--", "train.py")
    assert done.code == 0, done.err
    arms = done.json()["preflight"]["arms"]
    assert [trial["error"] for trial in arms.values()] == ["", ""]
    assert {trial["steps"] for trial in arms.values()} == {2 if what == "two steps" else 3}
