"""Scripts with and without a mistake, run in this process under the guards."""

import runpy
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from textwrap import dedent

import pytest
import torch

import ampcompare.guards
from ampcompare.apex import amp
from ampcompare.guards import GuardWarning, Violation
from ampcompare.training.precision.cpu_half import EmulatedHalf

NATIVE = """
import warnings

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
x, y = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
batches = [(x, y)] * 6
"""

APEX = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from ampcompare.apex import amp

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
x, y = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
batches = [(x, y)] * 6
"""

Run = Callable[..., list[str]]


@pytest.fixture(autouse=True)
def fresh_session() -> Iterator[None]:
    """End the amp session of a script and its patches of torch, and restore autocast's default on a CPU."""
    dtype = torch.get_autocast_dtype("cpu")
    yield
    torch.set_autocast_dtype("cpu", dtype)
    amp._amp_state.close()


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., Path]:
    """Write a script: a beginning and a body, of whose lines those marked `# right`, or `# wrong`, are left out."""

    def write(body: str, *, apex: bool = False, helper: str = "", keep: str = "right") -> Path:
        lines = ((APEX if apex else NATIVE) + helper + dedent(body)).splitlines()
        drop = "# wrong" if keep == "right" else "# right"
        path = tmp_path / "train.py"
        path.write_text("\n".join(line for line in lines if drop not in line) + "\n", encoding="utf-8")
        return path

    return write


@pytest.fixture(params=["plain", "emulated fp16"])
def arithmetic(request: pytest.FixtureRequest) -> Iterator[None]:
    """How a CPU computes in fp16; under `exec --device cpu` all operations of a script run in a dispatch mode."""
    with EmulatedHalf() if request.param == "emulated fp16" else nullcontext():
        yield


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a script under the guards; the answer is `GUARD LINE` for each finding. A guard that fails is an error."""

    def run(path: Path, *, strict: bool = False) -> list[str]:
        found: list[Violation] = []
        monkeypatch.chdir(path.parent)
        with warnings.catch_warnings(), ampcompare.guards.install(strict=strict, say=found.append):
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", GuardWarning)
            runpy.run_path(str(path), run_name="__main__")
        assert all(finding.location.file == str(path) for finding in found)
        return [f"{finding.guard} {finding.location.line}" for finding in found]

    return run


@pytest.fixture
def marked() -> Callable[[Path], int]:
    """Find the line of a script that is to be named: the one marked `# here`."""

    def line(path: Path) -> int:
        lines = path.read_text(encoding="utf-8").splitlines()
        (found,) = [number for number, text in enumerate(lines, start=1) if "# here" in text]
        return found

    return line
