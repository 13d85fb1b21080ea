"""Cells as tasks of Ray: the same records bit for bit, with a shared folder and without, and nothing left running."""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ampcompare.experiment.launch.cell_files import write_cell_inputs
from ampcompare.experiment.launch.dispatch.ray import train_cell_and_read_files_in_ray_task
from ampcompare.results.records.run import read_record
from ampcompare.settings.config import RunConfig

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

PATIENCE = 600.0  # on a machine with other work
WORDS = (
    "compare",
    "--seeds",
    "0",
    "--train-size",
    "128",
    "--val-size",
    "64",
    "--device",
    "cpu",
    "--no-progress",
)
# On a busy machine Ray gives up what has not started after half a minute.
BUSY = {"RAY_agent_register_timeout_ms": "240000", "RAY_worker_register_timeout_seconds": "240"}
NODE = "RAY_OVERRIDE_NODE_ID_FOR_TESTING"
SMALL = {"epochs": 1, "data": {"train_size": 64, "val_size": 32}}


@pytest.fixture(autouse=True)
def _folder_of_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give Ray a folder with a short path, since sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        yield


def _start(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "ampcompare", *WORDS, *words]
    node = secrets.token_hex(28)
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {**BUSY, NODE: node}
    process = subprocess.Popen(
        command, cwd=folder, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    if "ray" in words:
        threading.Thread(target=_write_port, args=(node, process), daemon=True).start()
    return process


def _write_port(node: str, process: subprocess.Popen[bytes]) -> None:
    """Write for a raylet that is about to start which port its dashboard agent has: none.

    It waits for this file, and ends after less than half a minute without it; no option changes that, and on a busy
    machine the agent has not imported Ray by then.
    """
    sessions = Path(os.environ["RAY_TMPDIR"]) / "ray"
    while process.poll() is None:
        for session in sessions.glob("session_2*"):
            with contextlib.suppress(OSError):
                (session / f"dashboard_agent_listen_port_{node}").write_text("-1")
                return
        time.sleep(0.1)


def _run(folder: Path, *words: str) -> tuple[int, str]:
    """Run a comparison and return its exit code, and what it says."""
    process = _start(folder, *words)
    _, errors = process.communicate(timeout=PATIENCE)
    return process.returncode, errors.decode()


def _compare(folder: Path, *words: str) -> dict[str, tuple[Any, ...]]:
    """Run a comparison and return for each arm what must not depend on where it ran."""
    folder.mkdir()
    code, text = _run(folder, *words)
    assert code == 0, text
    found = {}
    for path in folder.glob("out/cells/*/record.json"):
        record = read_record(path)
        assert record.status == "completed", record.error
        steps = [json.loads(line)["loss"] for line in (path.parent / "steps.jsonl").read_text().splitlines()]
        found[record.arm] = (record.summary.weights_sha256, record.summary.metric_final, tuple(steps))
    return found


SAME = ("--epochs", "1", "--arm", "fp32,native:bf16,apex:O2", "-o", "out")


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, ...]]:
    """Three arms on the digits, trained on this machine."""
    return _compare(tmp_path_factory.mktemp("local") / "run", *SAME)


def test_arms_as_on_this_machine(local: dict[str, tuple[Any, ...]], tmp_path: Path) -> None:
    """Ray that the command starts trains arms on the digits to the same weights and losses."""
    assert len(local) == 3
    assert _compare(tmp_path / "ray", *SAME, "--launcher", "ray") == local


def _wait_for(condition: Callable[[], object], process: Any) -> None:
    """Wait until a condition comes true, while a process runs."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.stderr and process.stderr.read().decode()
        time.sleep(0.1)


def test_without_a_shared_folder(tmp_path: Path) -> None:
    """A task that does not find the cell in the folder returns its files; else it writes there."""
    config = RunConfig.model_validate({"recipe": SMALL, "device": "cpu", "launcher": "ray"})
    files = train_cell_and_read_files_in_ray_task(config.model_dump_json(), str(tmp_path / "elsewhere"), {})
    assert {"record.json", "steps.jsonl", "log.txt"} <= set(files)
    assert not (tmp_path / "elsewhere").exists()
    assert json.loads(files["record.json"])["status"] == "completed"
    write_cell_inputs(config, tmp_path)
    assert train_cell_and_read_files_in_ray_task(config.model_dump_json(), str(tmp_path), {}) == {}
    record = read_record(tmp_path / "record.json")
    assert record.config == config
    assert record.summary.weights_sha256 == json.loads(files["record.json"])["summary"]["weights_sha256"]


def test_nothing_is_left_running(tmp_path: Path) -> None:
    """A command that is stopped ends its tasks, their cells, and the Ray that it started."""
    process = _start(tmp_path, "--epochs", "9000", "--arm", "fp32", "--launcher", "ray", "-o", "out")
    _wait_for(lambda: any(path.stat().st_size for path in tmp_path.glob("out/cells/*/steps.jsonl")), process)
    family = psutil.Process(process.pid).children(recursive=True)
    assert family
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert psutil.wait_procs(family, timeout=30)[1] == []


def _stops_at_step_3(go: Path, out: Path) -> list[str]:
    """Return words for a cell that saves each of its four steps, and waits in the third one for a file."""
    return [
        *("--arm", "fp32", "--epochs", "1", "--batch-size"),
        *("32", "--save-every-steps", "1", "--drain-every", "1"),
        *("--resume", "auto", "--arch", "launched:waits_at_the_third_step", "--model-arg", f"file={go}"),
        *("-o", str(out)),
    ]


def _waiting(out: Path) -> list[Path]:
    """Return the folders of cells that have saved their second step and have no record."""
    saved = [path.parents[1] for path in out.glob("cells/*/checkpoints/step-00000002.pt")]
    return [folder for folder in saved if not (folder / "record.json").exists()]


@pytest.mark.extended
@pytest.mark.parametrize("part", ["ray::train", "raylet"])
def test_a_part_of_ray_that_is_killed(part: str, user_folder: Path, tmp_path: Path) -> None:
    """A worker is replaced, and its cell resumes; a cell outlives the raylet. The cell that had
    ended keeps its record, and no process is left."""
    go, out = tmp_path / "go", tmp_path / "out"
    words = _stops_at_step_3(go, out)
    go.touch()
    assert _run(user_folder, *words)[0] == 0
    (ended,) = out.glob("cells/*/record.json")
    kept = ended.read_bytes()
    go.unlink()
    words += ["--seeds", "0-1", "--launcher", "ray"]
    process = _start(user_folder, *words)
    _wait_for(lambda: _waiting(out), process)
    family = psutil.Process(process.pid).children(recursive=True)
    (killed,) = (each for each in family if part in (each.name(), *each.cmdline()[:1]))
    cell = killed.children(recursive=True) if part == "ray::train" else []
    killed.kill()
    assert psutil.wait_procs(cell, timeout=30)[1] == []
    go.touch()
    _, errors = process.communicate(timeout=PATIENCE)
    assert psutil.wait_procs(family, timeout=30)[1] == []
    assert process.returncode == 0, errors.decode()
    assert ended.read_bytes() == kept
    (other,) = (read_record(path) for path in out.glob("cells/*/record.json") if path != ended)
    assert (other.status, [each.step for each in other.resumed]) == ("completed", [2] * (part != "raylet"))
