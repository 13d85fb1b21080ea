"""A backend added by another package with a description is known to every command and to the contract tests."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SPEC = """
from ampcompare.backends.explanation import ArmExplanation
from ampcompare.backends.options import parse_positive_number
from ampcompare.backends.roles import Roles
from ampcompare.backends.spec import BackendSpec, ContractTestArm

SPEC = BackendSpec(
    summary="fp32 with gradients multiplied by a factor",
    implementation="dummy_precision:Dummy",
    explain=lambda options: ArmExplanation(
        "fp32 with a factor", (("weights", "stay fp32"),), "fp32", "equal at factor 1", (), (), ()
    ),
    roles=lambda options: Roles(),
    parsers={"factor": parse_positive_number},
    positional="factor",
    default="1",
    contract=(ContractTestArm("dummy"),),
)
"""
PRECISION = """
from ampcompare.training.precision.fp32 import FP32


class Dummy(FP32):
    def __init__(self, *, device="cpu", factor=1.0):
        super().__init__(device=device)
"""
TINY = [
    "--data",
    "synthetic",
    "--train-size",
    "32",
    "--val-size",
    "16",
    "--image-size",
    "8",
    "--max-steps",
    "2",
]
TINY += ["--batch-size", "16", "--device", "cpu", "--arch", "mlp", "--no-progress"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dummy")
    (folder / "dummy_backend.py").write_text(SPEC)
    (folder / "dummy_precision.py").write_text(PRECISION)
    metadata = folder / "dummy-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: dummy\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[ampcompare.backends]\ndummy = dummy_backend:SPEC\n")
    return folder


@pytest.fixture(scope="module")
def module(folder: Path, forked_python: Any) -> Callable[..., str]:
    """Run `python -m ARGUMENTS` in that folder, and return stdout."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ["PYTHONPATH"]])}

    def run(*words: str) -> str:
        done = forked_python.run(["-m", *words], folder, environment, 240)
        assert done.returncode == 0, done.stderr
        return str(done.stdout)

    return run


@pytest.mark.integration
def test_it_is_listed_explained_and_its_options_are_checked(module: Callable[..., str]) -> None:
    """`list` shows its summary; `explain` its bytes and the arm to compare it with; the default option is written."""
    assert "fp32 with gradients multiplied by a factor" in module("ampcompare", "list", "arms")
    explained = json.loads(module("ampcompare", "explain", "dummy:2", "--json"))
    assert (explained["arm"], explained["twin"]) == ("dummy:2", "fp32")
    assert explained["bytes_per_parameter"]["weight"] == 4


@pytest.mark.slow
def test_it_trains_is_compared_reported_and_examined(module: Callable[..., str]) -> None:
    """`compare` trains it next to fp32 with equal losses; the report has its row; `doctor` says that it can run."""
    words = ["compare", "--arm", "fp32", "--arm", "dummy", "--seeds", "0", *TINY, "-o", "out", "--json"]
    shown = json.loads(module("ampcompare", *words))
    assert [record["status"] for record in shown["records"]] == ["completed", "completed"]
    assert shown["records"][0]["summary"]["losses_sha256"] == shown["records"][1]["summary"]["losses_sha256"]
    assert "dummy" in module("ampcompare", "report", "out")
    needs = json.loads(module("ampcompare", "doctor", "--json"))
    assert "dummy" in json.dumps(needs)


@pytest.mark.slow
def test_it_converts_and_the_contract_runs_on_it(module: Callable[..., str], folder: Path) -> None:
    """A checkpoint of it becomes one of torch.amp, and the contract tests take its arms from the description."""
    words = ["run", "--arm", "dummy", "--seed", "0", *TINY, "--save-every-epochs", "1", "-o", "saved"]
    module("ampcompare", *words)
    checkpoint = sorted(folder.rglob("saved/**/*.pt"))[-1]
    module("ampcompare", "convert", str(checkpoint), "native.pt", "--to", "native")
    contract = str(ROOT / "tests" / "training" / "precision" / "test_contract.py")
    listed = module(
        "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT), "-k", "[dummy]", contract
    )
    assert "passed" in listed
