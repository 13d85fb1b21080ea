"""Scripts that misbehave: each cell ends with one line, and the next one runs."""

import json
import os
import subprocess
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ampcompare.experiment.launch.script.launcher import ScriptLauncher
from ampcompare.settings.config import RunConfig
from ampcompare.settings.script import script_config

pytestmark = pytest.mark.integration

START = """
import os, sys, torch
from apex import amp
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, verbosity=0)
def step():
    loss = model(torch.randn(8, 4)).float().square().mean()
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
"""
CHILDREN = """
import os, sys, torch

def work(rank):
    if "--group" in sys.argv:
        store = torch.distributed.FileStore(os.path.join(os.environ["AMPCOMPARE_CELL_DIR"], "store"), 2)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.manual_seed(rank)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.autocast("cpu"):
        model(torch.randn(8, 4)).float().square().mean().backward()
    optimizer.step()
    if "--fail" in sys.argv:
        raise OSError("full")
    if "--group" in sys.argv:
        torch.distributed.destroy_process_group()

if __name__ == "__main__":
    torch.multiprocessing.start_processes(work, nprocs=int(sys.argv[2]), start_method=sys.argv[1])
"""
FORK = "if not os.fork():\n    step()\n    os._exit(0)\nos.wait()\nstep()"


@pytest.fixture(scope="module")
def launcher(
    tmp_path_factory: pytest.TempPathFactory, forking: types.SimpleNamespace
) -> Iterator[ScriptLauncher]:
    """One server for all cells, started in a folder with a file of the package's name."""
    folder = tmp_path_factory.mktemp("here")
    (folder / "ampcompare.py").write_text("raise SystemExit(99)")
    with pytest.MonkeyPatch.context() as patch, ScriptLauncher() as one:
        patch.chdir(folder)
        patch.setattr("ampcompare.base.processes.client.subprocess", forking)
        patch.setattr("ampcompare.experiment.launch.script.launcher.POLL_SECONDS", 0.02)
        yield one


def cell(tmp_path: Path, body: str, arm: str = "bf16") -> RunConfig:
    script = tmp_path / "train.py"
    script.write_text(START + body)
    return RunConfig(arm=arm, warmup_steps=0, script=script_config([str(script)]))


def test_a_script_lies_next_to_a_file_ampcompare(launcher: ScriptLauncher, tmp_path: Path) -> None:
    """Neither the server, which was started next to one too, nor the script takes it for this package."""
    (tmp_path / "ampcompare.py").write_text("raise SystemExit(99)")
    config = cell(tmp_path, "step()\nimport ampcompare.api\nassert ampcompare.compare")
    record = launcher.launch(config, tmp_path / "cell")
    assert (record.status, record.error) == ("completed", None)


@pytest.mark.parametrize(
    ("body", "status", "why"),
    [
        (
            "input('go on? ')",
            "failed",
            "the script reads from standard input, but a cell has none; pass the answer",
        ),
        ("step(); sys.exit('no data')", "failed", "the script ended with exit code 1: no data"),
        ("print('no data\\n====='); sys.exit(1)", "failed", "the script ended with exit code 1: no data"),
        (
            "import collections; collections.Mapping",
            "failed",
            "attribute 'Mapping' (train.py:13). The script may be",
        ),
        ("step()\n{}['x']", "failed", "KeyError: 'x' (train.py:14)"),
        ("step()\nassert step is None", "failed", "AssertionError (train.py:14)"),
        (
            "from ampcompare.errors import ConfigError\nraise ConfigError.with_advice('no', 'fp32')",
            "failed",
            "no; compare fp32 (train.py:14) (this cell tried no other arm)",
        ),
        pytest.param(
            "step()\ntorch.ones(1).cuda()",
            "failed",
            "(train.py:14); this machine has no GPU: add --device cpu",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="on CUDA the script does run"),
        ),
        (
            "sys.exit(0)",
            "failed",
            "with exit code 0, but made no optimizer step (step() of SGD was not called)",
        ),
        ("os.kill(os.getpid(), 9)", "failed", "the script was killed by SIGKILL"),
        ("step(); assert os.environ['PYTHONHASHSEED']; os._exit(0)", "completed", None),
        (FORK, "completed", None),
    ],
)
def test_a_cell_ends_with_one_line(
    launcher: ScriptLauncher,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    body: str,
    status: str,
    why: str | None,
) -> None:
    """The record says why and where; what a forked child of the script does is not in it."""
    monkeypatch.chdir(tmp_path)
    record = launcher.launch(cell(tmp_path, body), tmp_path / "cell")
    assert record.status == status, record.error
    assert why is None or why in (record.error or "")
    assert status == "failed" or record.summary.num_steps == 1


def child_cell(tmp_path: Path, *arguments: str) -> RunConfig:
    script = tmp_path / "train.py"
    script.write_text(CHILDREN)
    return RunConfig(arm="bf16", warmup_steps=0, script=script_config([str(script), *arguments]))


@pytest.mark.parametrize(
    "method", ["fork", pytest.param("spawn", marks=[pytest.mark.slow, pytest.mark.extended])]
)
def test_child_processes_without_a_group_are_named(
    launcher: ScriptLauncher, tmp_path: Path, method: str
) -> None:
    """Their steps are not those of the cell; what they wrote in an earlier run does not count."""
    record = launcher.launch(child_cell(tmp_path, method, "2"), tmp_path / "cell")
    assert record.status == "failed"
    assert "trains in 2 child processes" in (record.error or "")
    assert "--nproc-per-node 2" in (record.error or "")
    again = launcher.launch(cell(tmp_path, "print(1)"), tmp_path / "cell")
    assert "made no optimizer step" in (again.error or "")


@pytest.mark.parametrize(
    ("method", "more", "note"),
    [
        ("fork", ["1"], "those of a process that the script has started"),
        pytest.param(
            "spawn", ["2", "--group"], "those of rank 0 of 2 processes that", marks=pytest.mark.slow
        ),
    ],
)
def test_child_processes_that_train_together_stand_for_the_cell(
    launcher: ScriptLauncher, tmp_path: Path, method: str, more: list[str], note: str
) -> None:
    """Rank 0 does where they are all ranks of one group, as under torchrun; a single one does so itself."""
    record = launcher.launch(child_cell(tmp_path, method, *more), tmp_path / "cell")
    assert (record.status, record.error) == ("completed", None)
    assert record.summary.num_steps == 1
    assert record.script is not None
    assert record.script.weights
    assert [note in one for one in record.script.notes] == [True]
    first = tmp_path / "cell" / "script.SpawnProcess-1.jsonl"
    if method == "spawn":
        loss = next(
            row["loss"]
            for row in map(json.loads, first.read_text().splitlines())
            if row.get("kind") == "backward"
        )
        assert record.summary.loss_tail == loss


def test_the_error_of_a_child_process_is_one_line(
    launcher: ScriptLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    record = launcher.launch(child_cell(tmp_path, "fork", "2", "--fail"), tmp_path / "cell")
    error = record.error or ""
    assert error.startswith("ProcessRaisedException: Process ")
    assert error.endswith(" terminated with the following error: OSError: full (train.py:15)")


RANKS = """
import sys, torch
from torch import distributed
distributed.init_process_group("gloo")
model = torch.nn.Linear(2, 1)
wrapped = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    wrapped(torch.ones(2, 2)).square().mean().backward()
    optimizer.step()
torch.ones(4).view(int(sys.argv[1]))
distributed.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "why"),
    [("4", ""), pytest.param("3", "invalid for input of size 4 (train.py:", marks=pytest.mark.extended)],
)
def test_ranks_of_a_launcher_stand_for_the_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: str, why: str
) -> None:
    """torchrun inside of the cell starts ranks under the arm; rank 0 is recorded, and a rank says why it failed."""
    monkeypatch.chdir(tmp_path)
    # not what `launcher` forks
    monkeypatch.setattr("ampcompare.base.processes.client.subprocess", subprocess)
    (tmp_path / "train.py").write_text(RANKS)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "train.py", size]
    config = RunConfig(arm="bf16", warmup_steps=0, script=script_config(command))
    # whose server is a process of its own, as the hook of the ranks needs one
    with ScriptLauncher() as launcher:
        record = launcher.launch(config, tmp_path / "cell")
    assert why in (record.error or "")
    assert (record.status, bool(record.error)) == (("failed", True) if why else ("completed", False))
    if not why:
        assert record.summary.num_steps == 2
        assert record.script is not None
        assert [one for one in record.script.notes if "rank 0 of 2 processes" in one]


def test_an_error_of_ampcompare_has_the_scripts_line(
    launcher: ScriptLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    body = "torch.set_default_dtype(torch.float64)\nmodel.double()\nstep()"
    error = launcher.launch(cell(tmp_path, body, "O1"), tmp_path / "cell").error or ""
    assert error.startswith("Optimizer parameters must be float16 or float32")
    assert error.endswith(" (train.py:10)")


def test_the_exit_code_of_a_script_is_not_ours(launcher: ScriptLauncher, tmp_path: Path) -> None:
    """Whatever it passes to `sys.exit`, the cell has failed; where ampcompare refuses it, the code says why."""
    record = launcher.launch(cell(tmp_path, "step(); sys.exit(4)"), tmp_path / "cell")
    assert (record.environment["exit_code"], record.error) == (3, "the script ended with exit code 4")
    refused = launcher.launch(cell(tmp_path, "step()", "bf16,keep_fp32=nothing"), tmp_path / "cell")
    assert refused.environment["exit_code"] == 2


def test_cells_share_nothing(
    launcher: ScriptLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Environment and working directory are those of the moment; what an earlier cell changed is gone."""
    launcher.launch(cell(tmp_path, "torch.left = True; step()"), tmp_path / "cell")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIVEN", "1")
    shown = "os.environ['GIVEN'], os.getcwd(), hasattr(torch, 'left'), __name__, sys.argv[0], os.getpgid(0)"
    record = launcher.launch(cell(tmp_path, f"step(); print({shown})"), tmp_path / "next")
    words = next(
        line for line in (tmp_path / "next" / "log.txt").read_text().splitlines() if line.startswith("1 ")
    )
    assert record.status == "completed"
    assert words.split()[1:5] == [os.getcwd(), "False", "__main__", str(tmp_path / "train.py")]
    assert int(words.split()[5]) != os.getpgid(0)


def test_a_cell_that_is_terminated_is_interrupted(launcher: ScriptLauncher, tmp_path: Path) -> None:
    records: list[Any] = []
    config = cell(tmp_path, "step(); import time; print('begun', flush=True); time.sleep(60)")
    thread = threading.Thread(target=lambda: records.append(launcher.launch(config, tmp_path / "cell")))
    thread.start()
    while "begun" not in (path.read_text() if (path := tmp_path / "cell" / "log.txt").exists() else ""):
        time.sleep(0.01)
    assert launcher.ask_cell_to_stop()
    thread.join()
    assert records[0].status == "interrupted"
    assert launcher.launch(cell(tmp_path, "step()"), tmp_path / "cell").status == "completed"


def test_a_script_that_does_not_exit_is_ended(
    launcher: ScriptLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record is complete: the cell has its result, or its error, and a note names the arm."""
    notes: list[str] = []
    monkeypatch.setattr("ampcompare.experiment.launch.script.launcher.EXIT_SECONDS", 0.5)
    monkeypatch.setattr(launcher, "on_note", notes.append)
    hangs = "import atexit, time\natexit.register(time.sleep, 600)\nstep()\n"
    record = launcher.launch(cell(tmp_path, hangs), tmp_path / "cell")
    assert (record.status, record.summary and record.summary.num_steps) == ("completed", 1)
    assert notes == ["native:bf16: a process still runs 0.5 s after its last row; it is ended"]
    record = launcher.launch(cell(tmp_path, f"{hangs}raise OSError('full')"), tmp_path / "other")
    assert record.status == "failed"
    assert "OSError: full" in (record.error or "")
