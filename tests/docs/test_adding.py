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
    """A copy of the package that a test may change.

    Args:
        folder: where the copy goes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.package = folder / "ampcompare"
        shutil.copytree(ROOT / "ampcompare", self.package, ignore=shutil.ignore_patterns("__pycache__"))

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
    checkout.insert("settings/recipe.py", "    early_stop:", field)
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
    (checkout.package / "doctor" / "probes" / "dummy.py").write_text(PROBE, encoding="utf-8")
    checkout.insert("doctor/examine.py", "    findings += examine_extras()", CHECK.lstrip("\n"))

    examination = json.loads(checkout.run("doctor", "--json"))
    shown = {check["name"]: check for check in examination["findings"]}
    assert shown["dummy"]["value"] == "forty-two"
    assert "SIGABRT" in shown["dummy that crashes"]["value"]


NARROW = """
    def __init__(self, num_classes, sample_shape):
        super().__init__()
        self.layer = nn.Linear(math.prod(sample_shape), num_classes)

    def forward(self, x):
        return self.layer(x.flatten(1))


"""
STRIPES = """    if name == "stripes":
        return synthetic
"""
