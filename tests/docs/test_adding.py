"""The pages "Add a ...": a dummy, added to a copy of the package as the page says, appears where it has to."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--train-size", "32", "--val-size", "16", "--max-steps", "2", "--batch-size", "16", "--device", "cpu"]
PROBE = """
def dummy(fails):
    import os

    if fails:
        os.abort()
    return {"answer": "forty-two"}
"""
CHECK = """
    for name, fails in (("dummy", False), ("dummy that crashes", True)):
        answer = ask("dummy", seconds=seconds, options={"fails": fails})
        value = answer.value["answer"] if answer.done else answer.failure
        findings.append(Check("dummies", name, value, "ok" if answer.done else "problem"))
"""


class Checkout:
    """A copy of the package that a test may change, with what was compiled of it.

    Args:
        folder: where the copy goes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.package = folder / "ampcompare"
        shutil.copytree(ROOT / "ampcompare", self.package)

    def insert(self, file: str, before: str, text: str) -> None:
        """Insert text before the first occurrence of other text in a file."""
        path = self.package / file
        head, found, tail = path.read_text(encoding="utf-8").partition(before)
        assert found, f"{file} has no {before!r}: the page that names it may need another word too"
        path.write_text(head + text + found + tail, encoding="utf-8")

    def run(self, *words: str, code: int = 0) -> str:
        """Run a command of the changed package, and return what it prints."""
        environment = {**os.environ, "PYTHONPATH": str(self.folder)}
        done = subprocess.run(
            [sys.executable, "-m", "ampcompare", *words],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """A copy of the package of its own for a test."""
    return Checkout(tmp_path)


def test_a_new_option_is_a_flag_a_setting_and_in_the_schema(checkout: Checkout) -> None:
    """A field with one line in `RECIPE_OPTIONS` has help, a flag, a setting path, bounds and a place in the schema."""
    field = '    loss_tail: Positive = Field(1.0, description="weight of the tail of the loss")\n'
    checkout.insert("runs/settings/recipe.py", "    early_stop:", field)
    checkout.insert("cli/options.py", '    ("--early-stop"', '    ("--loss-tail", "recipe.loss_tail", SCHEDULE),\n')

    assert "--loss-tail" in checkout.run("run", "--help")
    assert "loss_tail: 2.5  # " in checkout.run("config", "show", "--origin", "--loss-tail", "2.5")
    assert json.loads(checkout.run("config", "schema"))["$defs"]["Recipe"]["properties"]["loss_tail"] == {
        "default": 1.0,
        "description": "weight of the tail of the loss",
        "exclusiveMinimum": 0,
        "title": "Loss Tail",
        "type": "number",
    }
    assert "loss_tail" in checkout.run("config", "show", "--set", "recipe.loss_tail=0", code=2)


@pytest.mark.slow
def test_a_new_model_and_data_set_are_listed_and_trained(checkout: Checkout) -> None:
    """A network and a data set with the lines that the page names are in `list`, and a run takes them by name."""
    checkout.insert("tasks/networks.py", "class Mlp(", "class Narrow(nn.Module):\n" + NARROW)
    checkout.insert("tasks/catalog.py", '    "mlp": ', '    "narrow": "one linear layer",\n')
    checkout.insert("tasks/catalog.py", '    "synthetic": ', '    "stripes": "patterns, generated",\n')
    checkout.insert("tasks/models.py", "ConvNet, Mlp,", "Narrow, ")
    checkout.insert("tasks/models.py", '"mlp": Mlp,', '"narrow": Narrow, ')
    checkout.insert("tasks/load.py", "    if name in TORCHVISION_FILES:", STRIPES)

    assert "one linear layer" in checkout.run("list", "models")
    assert "patterns, generated" in checkout.run("list", "data")
    checkout.run("run", "--arch", "narrow", "--data", "stripes", *TINY, "-o", "out")
    (path,) = checkout.folder.glob("out/cells/*/record.json")
    record = json.loads(path.read_text(encoding="utf-8"))
    assert (record["status"], record["config"]["recipe"]["data"]["name"]) == ("completed", "stripes")


@pytest.mark.slow
def test_a_new_probe_is_asked_in_a_child_and_its_crash_is_an_answer(checkout: Checkout) -> None:
    """A probe with its `Check` is a line of `doctor`, and one that aborts does not end `doctor`."""
    checkout.insert("api/doctor/probes.py", "def torch_build(", PROBE)
    checkout.insert("api/doctor/examine.py", "    findings += examine_extras()", CHECK.lstrip("\n"))

    examination = json.loads(checkout.run("doctor", "--json"))
    shown = {check["name"]: check for check in examination["findings"]}
    assert shown["dummy"]["value"] == "forty-two"
    assert "SIGABRT" in shown["dummy that crashes"]["value"]


@pytest.mark.slow
def test_a_new_backend_is_listed_explained_and_trained(checkout: Checkout) -> None:
    """Two files, an import and a line in `BUILT_IN` make an arm that `list` and `explain` know and that trains."""
    (checkout.package / "backends" / "dummy.py").write_text(BACKEND, encoding="utf-8")
    (checkout.package / "training" / "precision" / "dummy.py").write_text(DUMMY_PRECISION, encoding="utf-8")
    checkout.insert("backends/catalog.py", "    fabric,\n", "    dummy,\n")
    checkout.insert("backends/catalog.py", '    "fabric": ', '    "dummy": dummy.SPEC,\n')

    assert "fp32 by another name" in checkout.run("list", "arms")
    assert "equal to the last bit" in checkout.run("explain", "dummy")
    checkout.run("compare", "--arm", "fp32", "--arm", "dummy", "--seeds", "0", *TINY, "-o", "out")
    records = json.loads((checkout.folder / "out" / "report.json").read_text(encoding="utf-8"))["records"]
    assert [record["status"] for record in records] == ["completed", "completed"]
    assert len({record["summary"]["losses_sha256"] for record in records}) == 1


def test_a_new_rule_of_lint_is_listed_and_reports(checkout: Checkout) -> None:
    """A function under `@rule` with its mistake is a line of `lint`, and a rule of SARIF with a remedy."""
    path = checkout.package / "source" / "lint" / "rules" / "masks.py"
    path.write_text(path.read_text(encoding="utf-8") + RULE, encoding="utf-8")
    script = checkout.folder / "script.py"
    script.write_text("from torch import amp\n\namp_dummy()\n", encoding="utf-8")

    assert "script.py:3:1: AMP299" in checkout.run("lint", str(script), code=1)
    assert "remove the call" in checkout.run("lint", "--format", "sarif", str(script), code=1)


@pytest.mark.slow
def test_a_new_task_is_listed_and_trained(checkout: Checkout) -> None:
    """A file, an entry of `TASKS` and one of the defaults make a task that trains by its name."""
    (checkout.package / "tasks" / "halving.py").write_text(TASK, encoding="utf-8")
    checkout.insert("tasks/catalog.py", '    "segmentation": TaskSpec(', TASK_SPEC)
    checkout.insert("runs/settings/recipe.py", '    "segmentation": {', TASK_DEFAULTS)

    assert "half of a number; RMSE" in checkout.run("list", "tasks")
    assert "numbers from 0 to 1; --task halving" in checkout.run("list", "data")
    checkout.run("run", "--task", "halving", "--device", "cpu", "-o", "out")
    (path,) = checkout.folder.glob("out/cells/*/record.json")
    record = json.loads(path.read_text(encoding="utf-8"))
    assert (record["status"], record["metrics"][0]["name"]) == ("completed", "RMSE")
    assert record["config"]["recipe"]["batch_size"] == 16


NARROW = """
    def __init__(self, num_classes, sample_shape):
        super().__init__()
        self.layer = nn.Linear(math.prod(sample_shape), num_classes)

    def forward(self, x):
        return self.layer(x.flatten(1))


"""
STRIPES = """    if name == "stripes":
        return _synthetic
"""
BACKEND = """
from ampcompare.backends.explanation import FP32_BYTES, ArmExplanation
from ampcompare.backends.spec import BackendSpec, ContractArm

SPEC = BackendSpec(
    summary="fp32 by another name",
    implementation="ampcompare.training.precision.dummy:Dummy",
    explain=lambda options: ArmExplanation(
        "fp32 by another name", (("weights", "stay fp32"),), "fp32", "equal to the last bit", (), (), ()
    ),
    memory=lambda options: FP32_BYTES,
    contract=(ContractArm("dummy"),),
)
"""
DUMMY_PRECISION = """
from ampcompare.training.precision.base import Precision


class Dummy(Precision):
    def __init__(self, *, device="cpu"):
        pass

    def _prepare(self, models, optimizers):
        return list(models), list(optimizers)
"""
RULE = """

@rule(
    Mistake(
        "AMP299",
        "amp-dummy",
        "amp_dummy() is called",
        "it does nothing",
        "remove the call",
    ),
)
def dummy(module: LintModule) -> Iterator[Finding]:
    for call in module.calls:
        if name_of(call.func) == "amp_dummy":
            yield module.finding("AMP299", call, "a dummy is called")
"""
TASK = '''
import torch
from torch import nn

from ampcompare.tasks.catalog import REGRESSION, RMSE
from ampcompare.tasks.task import Task
from ampcompare.tasks.in_memory import TensorData


class Halving(Task):
    """Each sample is to be halved."""

    metrics = REGRESSION

    def __init__(self, recipe):
        x = torch.linspace(0, 1, 32)[:, None]
        self.data = TensorData.of("line", (x, x / 2), (x, x / 2), seed=recipe.seed)

    def make_models(self):
        return [nn.Linear(1, 1)]

    def loss(self, models, batch):
        return (models[0](batch[0]) - batch[1]).square().mean()

    def measure(self, outputs, batch):
        return {RMSE.name: (outputs - batch[1]).abs().flatten()}


def halving(recipe):
    return Halving(recipe)
'''
TASK_SPEC = """    "halving": TaskSpec(
        "half of a number; RMSE",
        "ampcompare.tasks.halving:halving",
        REGRESSION,
        {"line": "numbers from 0 to 1"},
        {"linear": "one weight and one bias"},
        frozenset(),
    ),
"""
TASK_DEFAULTS = """    "halving": {
        "data": {"name": "line"},
        "model": {"arch": "linear"},
        "epochs": 2,
        "batch_size": 16,
    },
"""
