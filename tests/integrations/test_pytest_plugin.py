"""The pytest plugin, in the test suite of a project that is not ampcompare."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ampcompare.integrations.pytest_plugin import _split_arms_of_text

PLUGIN = ("-p", "no:ampcompare", "-p", "ampcompare.integrations.pytest_plugin", "-p", "no:cacheprovider")
SUITE = """
import pytest, torch
from torch import nn
from torch.nn import functional as F

class Cube(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8)

    def forward(self, x):
        return (self.body(x) * 200.0) ** 3 * 1e-6

X = torch.ones(2, 8)

@pytest.mark.ampcompare(["bf16", "O2"])
def test_cube(holds):
    holds(Cube(), inputs=(X,))

@pytest.mark.ampcompare("fp16", rtol=1e-9)
def test_strict(holds):
    holds(nn.Linear(8, 8), inputs=(X,))

def test_default(holds):
    assert holds(F.mse_loss, inputs=(X, X * 2)).worst.error >= 0

@pytest.mark.ampcompare(["bf61"])
def test_misspelled(holds):
    holds(nn.Linear(8, 8), inputs=(X,))

@pytest.mark.ampcompare(["bf16"], device="cuda")
def test_on_a_gpu(holds):
    holds(nn.Linear(8, 8), inputs=(X,))

def test_without():
    pass
"""


def test_a_suite_is_run_for_each_arm(forked_python: Any, tmp_path: Path) -> None:
    """Each arm is a test; a failure names module, operation and line, and shows no frame of ampcompare.

    An arm that this machine cannot run is skipped with the reason. The suite runs in a process of its own: after a run
    in this one, pytester forgets what was imported in it, and torch cannot import its operators again.
    """
    (tmp_path / "test_nets.py").write_text(SUITE.lstrip())
    (tmp_path / "pytest.ini").write_text("[pytest]\nampcompare_arms = bf16 apex:O2,loss_scale=128\n")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(Path.cwd())}
    done = forked_python.run(["-m", "pytest", *PLUGIN, "-v", "-rs"], tmp_path, environment)
    text = done.stdout
    assert "3 failed, 4 passed, 1 skipped" in text, text + done.stderr
    for name, outcome in (
        ("test_cube[bf16]", "PASSED"),
        ("test_cube[O2]", "FAILED"),
        ("test_strict[fp16]", "FAILED"),
        ("test_default[bf16]", "PASSED"),
        ("test_default[apex:O2,loss_scale=128]", "PASSED"),
    ):
        assert f"{name} {outcome}" in " ".join(text.split()), name
    assert "apex:O2 does not hold: overflow at step 0: pow of Cube is the first result" in text
    assert "test_nets.py:11" in text
    assert "check.arm" not in text
    assert "bf16: " in text


def test_arms_of_a_setting() -> None:
    """Arms are divided by spaces and commas, except where a comma belongs to an option."""
    assert _split_arms_of_text("bf16, fp16 apex:O2,loss_scale=128,keep_fp32=head O1 half:bf16,kahan") == [
        *("bf16", "fp16", "apex:O2,loss_scale=128,keep_fp32=head", "O1", "half:bf16,kahan")
    ]


@pytest.mark.integration
def test_importing_the_plugin_is_light() -> None:
    """pytest imports it in every run: it loads neither torch nor pydantic."""
    code = (
        "import sys, ampcompare.integrations.pytest_plugin\n"
        "print({'torch', 'numpy', 'pydantic', 'IPython'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
