"""The pages "Add a ...": dummies, added to a copy of the package as the pages say, appear where they have to."""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPARE = (
    "compare --arm fp32 --arm dummy --seeds 0 --arch narrow --data stripes "
    "--train-size 32 --val-size 16 --max-steps 2 --batch-size 16 --device cpu -o out"
)
COMMANDS = (
    *("run --help", "config show --origin --loss-tail 2.5"),
    *("config schema", "config show --set recipe.loss_tail=0"),
    *("list models", "list data", "list arms", "list tasks", "explain dummy", "doctor --json"),
    *("lint script.py", "lint --format json script.py", COMPARE, "run --task halving --device cpu -o halved"),
)
SESSION = """
import contextlib, io, json, sys
from ampcompare.cli import main

answers = []
for command in sys.argv[1:]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main(command.split())
    answers.append((code, said.getvalue()))
json.dump(answers, sys.stdout)
"""


class Checkout:
    """A copy of the package that tests may change, with what was compiled of it.

    Args:
        folder: where the copy goes.
        python: runs its commands, a `ForkedPython`.
    """

    def __init__(self, folder: Path, python: Any) -> None:
        self.folder = folder
        self.package = folder / "ampcompare"
        self._python = python
        shutil.copytree(ROOT / "ampcompare", self.package)

    def insert(self, file: str, before: str, text: str) -> None:
        """Insert text before the first occurrence of other text in a file."""
        path = self.package / file
        head, found, tail = path.read_text(encoding="utf-8").partition(before)
        assert found, f"{file} has no {before!r}: the page that names it may need another word too"
        path.write_text(head + text + found + tail, encoding="utf-8")

    def run(self, commands: Sequence[str]) -> None:
        """Run commands of the changed package, all in one process, and keep what they print."""
        (self.folder / "session.py").write_text(SESSION, encoding="utf-8")
        environment = {**os.environ, "PYTHONPATH": str(self.folder)}
        done = self._python.run(["session.py", *commands], self.folder, environment, timeout=240)
        assert done.returncode == 0, done.stderr
        self._said = dict(zip(commands, json.loads(done.stdout), strict=True))

    def said(self, command: str, code: int = 0) -> str:
        """Return what a command has printed, which ended with this exit code."""
        ended, text = self._said[command]
        assert ended == code, text
        return str(text)

    def records(self, folder: str) -> list[dict[str, Any]]:
        """Return the records of a run directory, by the names of their files."""
        paths = sorted(self.folder.glob(f"{folder}/cells/*/record.json"))
        return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory, forked_python: Any) -> Checkout:
    """A copy of the package with one dummy of each kind, each of which its page says how to add."""
    made = Checkout(tmp_path_factory.mktemp("checkout"), forked_python)
    for file, before, text in INSERTED:
        made.insert(file, before, text)
    for file, text in FILES.items():
        with (made.package / file).open("a", encoding="utf-8") as new:
            new.write(text)
    (made.folder / "script.py").write_text("from torch import amp\n\namp_dummy()\n", encoding="utf-8")
    made.run(COMMANDS)
    return made


@pytest.fixture
def trained(checkout: Checkout) -> list[dict[str, Any]]:
    """The records of two arms, one a dummy, on the new network and the new data set."""
    checkout.said(COMPARE)
    return checkout.records("out")


@pytest.mark.slow
def test_a_new_option_is_a_flag_a_setting_and_in_the_schema(checkout: Checkout) -> None:
    """A field with one line in `RECIPE_OPTIONS` has help, a flag, a setting path, bounds and a place in the schema."""
    assert "--loss-tail" in checkout.said("run --help")
    assert "loss_tail: 2.5  # " in checkout.said("config show --origin --loss-tail 2.5")
    assert json.loads(checkout.said("config schema"))["$defs"]["Recipe"]["properties"]["loss_tail"] == {
        "default": 1.0,
        "description": "weight of the tail of the loss",
        "exclusiveMinimum": 0,
        "title": "Loss Tail",
        "type": "number",
    }
    assert "loss_tail" in checkout.said("config show --set recipe.loss_tail=0", code=2)


@pytest.mark.slow
def test_a_new_model_and_data_set_are_listed_and_trained(
    checkout: Checkout, trained: list[dict[str, Any]]
) -> None:
    """A network and a data set with the lines that the page names are in `list`, and a run takes them by name."""
    assert "one linear layer" in checkout.said("list models")
    assert "patterns, generated" in checkout.said("list data")
    for record in trained:
        recipe = record["config"]["recipe"]
        assert (record["status"], recipe["data"]["name"], recipe["model"]["arch"]) == (
            "completed",
            "stripes",
            "narrow",
        )


@pytest.mark.slow
def test_a_new_probe_is_asked_in_a_child_and_its_crash_is_an_answer(checkout: Checkout) -> None:
    """A probe with its `Check` is a line of `doctor`, and one that aborts does not end `doctor`."""
    shown = {
        check["name"]: check["value"] for check in json.loads(checkout.said("doctor --json"))["findings"]
    }
    assert shown["dummy"] == "forty-two"
    assert "SIGABRT" in shown["dummy that crashes"]


def test_a_new_backend_is_listed_explained_and_trained(
    checkout: Checkout, trained: list[dict[str, Any]]
) -> None:
    """Two files, an import and a line in `BUILT_IN` make an arm that `list` and `explain` know and that trains."""
    assert "fp32 by another name" in checkout.said("list arms")
    assert "equal to the last bit" in checkout.said("explain dummy")
    assert sorted(record["arm"] for record in trained) == ["dummy", "fp32"]
    assert len({record["summary"]["losses_sha256"] for record in trained}) == 1


def test_a_new_rule_of_lint_is_listed_and_reports(checkout: Checkout) -> None:
    """A function under `@register_rule` with its mistake is a line of `lint`, and has a remedy in JSON."""
    assert "script.py:3:1: AMP299" in checkout.said("lint script.py", code=1)
    assert "remove the call" in checkout.said("lint --format json script.py", code=1)


def test_a_new_task_is_listed_and_trained(checkout: Checkout) -> None:
    """A file, an entry of `TASKS` and one of the defaults make a task that trains by its name."""
    assert "half of a number; RMSE" in checkout.said("list tasks")
    assert "numbers from 0 to 1; --task halving" in checkout.said("list data")
    checkout.said("run --task halving --device cpu -o halved")
    (record,) = checkout.records("halved")
    assert (record["status"], record["metrics"][0]["name"]) == ("completed", "RMSE")
    assert record["config"]["recipe"]["batch_size"] == 16


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
        value = answer.value["answer"] if answer.has_returned else answer.failure
        findings.append(Check("dummies", name, value, "ok" if answer.has_returned else "problem"))
"""
NARROW = """
    def __init__(self, num_classes, sample_shape):
        super().__init__()
        self.layer = nn.Linear(math.prod(sample_shape), num_classes)

    def forward(self, x):
        return self.layer(x.flatten(1))


"""
STRIPES = """    if name == "stripes":
        return _make_synthetic_images(options)
"""
BACKEND = """
from ampcompare.backends.explanation import ArmExplanation
from ampcompare.backends.roles import Roles
from ampcompare.backends.spec import BackendSpec, ContractTestArm

SPEC = BackendSpec(
    summary="fp32 by another name",
    implementation="ampcompare.training.precision.dummy:Dummy",
    explain=lambda options: ArmExplanation(
        "fp32 by another name", (("weights", "stay fp32"),), "fp32", "equal to the last bit", (), (), ()
    ),
    roles=lambda options: Roles(),
    contract=(ContractTestArm("dummy"),),
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

@register_rule(
    Mistake(
        "AMP299",
        "amp-dummy",
        "amp_dummy() is called",
        "it does nothing",
        "remove the call",
    ),
    needs=("amp_dummy",),
)
def dummy(module: LintModule) -> Iterator[Finding]:
    for call in module.calls:
        if dotted_text_of(call.func) == "amp_dummy":
            yield module.make_finding("AMP299", call, "a dummy is called")
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
INSERTED = [  # a file, what is found there, and what goes before it
    (
        "settings/recipe.py",
        "    early_stop:",
        '    loss_tail: Positive = Field(1.0, description="weight of the tail of the loss")\n',
    ),
    ("cli/shared_options.py", '    ("--early-stop"', '    ("--loss-tail", "recipe.loss_tail", SCHEDULE),\n'),
    ("tasks/networks.py", "class Mlp(", "class Narrow(nn.Module):\n" + NARROW),
    ("tasks/catalog.py", '    "mlp": ', '    "narrow": "one linear layer",\n'),
    ("tasks/catalog.py", '    "synthetic": ', '    "stripes": "patterns, generated",\n'),
    ("tasks/models.py", "ConvNet, Mlp,", "Narrow, "),
    ("tasks/models.py", '"mlp": Mlp,', '"narrow": Narrow, '),
    ("tasks/image_data.py", "    if name in TORCHVISION_FILES:", STRIPES),
    ("doctor/probes.py", "def torch_build(", PROBE),
    ("doctor/examine.py", "    findings += examine_extras()", CHECK.lstrip("\n")),
    ("backends/catalog.py", "    fabric,\n", "    dummy,\n"),
    ("backends/catalog.py", '    "fabric": ', '    "dummy": dummy.SPEC,\n'),
    ("tasks/catalog.py", '    "segmentation": TaskSpec(', TASK_SPEC),
    ("settings/recipe.py", '    "segmentation": {', TASK_DEFAULTS),
]
FILES = {  # what is appended
    "backends/dummy.py": BACKEND,
    "training/precision/dummy.py": DUMMY_PRECISION,
    "source/lint/rules/masks.py": RULE,
    "tasks/halving.py": TASK,
}
