"""No command that trains a user's script changes a file of the user, however the script writes."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from ampcompare.base.processes.sandbox import can_sandbox

# What a single process does is tried in tests/base/processes/test_sandbox.py.
WAYS = {
    "torch.save": "torch.save(model.state_dict(), 'checkpoint.pt')",
    "absolute": "torch.save(model.state_dict(), os.path.abspath('../elsewhere/best.pt'))",
    "next to itself": "open(os.path.join(os.path.dirname(os.path.abspath(__file__)), 'log.txt'), 'a').write('x')",
    "child": 'subprocess.run([sys.executable, \'-c\', \'open("checkpoint.pt", "w").write("x")\'], check=True)',
    "worker": "p = multiprocessing.get_context('fork').Process(target=os.remove, args=('input.csv',)); "
    "p.start(); p.join()",
    "killed": "open('checkpoint.pt', 'w').write('half'); os.kill(os.getpid(), 9)",
}
SCRIPT = """
import multiprocessing, os, shutil, subprocess, sys
import numpy as np
import torch
from apex import amp

model = torch.nn.Linear(4, 2).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
for step in range({steps}):
    loss = model(torch.randn(8, 4).cuda()).float().square().mean()
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    if step == 1:
        {way}
"""


@pytest.fixture
def project(tmp_path: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory, with files of the user in it, in the home and elsewhere."""
    if not can_sandbox(str(tmp_path)):
        pytest.skip("this machine allows no overlays")
    for name in ("project", "home/.cache/lib", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
    names = (
        "project/checkpoint.pt",
        "project/log.txt",
        "project/input.csv",
        "home/.cache/lib/index",
        "elsewhere/x",
    )
    for name in names:
        (tmp_path / name).write_text("the user's")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "project"


def write_script(project: Path, way: str, steps: int = 4) -> None:
    """Write the script that writes in one way."""
    (project / "train.py").write_text(SCRIPT.format(way=WAYS[way], steps=steps))


def mtime_and_size(folder: Path, *without: Path) -> dict[str, str]:
    """Return what lies in a folder, files by their hashes, except for some folders."""
    paths = [
        path for path in sorted(folder.rglob("*")) if not any(path.is_relative_to(one) for one in without)
    ]
    return {
        str(path): "" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest() for path in paths
    }


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, marks=[pytest.mark.slow] * (way in ("absolute", "next to itself", "child")))
        for way in WAYS
    ],
)
def test_compare_leaves_all_files_as_they_were(call: Any, tmp_path: Path, project: Path, way: str) -> None:
    """Both arms start from the same files, and the record says what each has written, and where it lies."""
    write_script(project, way)
    run = tmp_path / "run"
    before = mtime_and_size(tmp_path, run)
    words = ["--arm", "fp32,bf16", "--seeds", "0", "--device", "cpu", "-o", str(run)]
    words += ["--no-preflight"] * (way == "killed")  # which would end there
    done = call("compare", *words, "--", "train.py")
    assert mtime_and_size(tmp_path, run) == before
    assert done.code == (3 if way == "killed" else 0), done.err
    records = [json.loads(path.read_text()) for path in run.glob("cells/*/record.json")]
    assert len(records) == 2
    for record in records:
        files = record["script"]["files"]
        assert files
        kept = [path for path in (run / "cells" / record["cell"] / "written").rglob("*") if path.is_file()]
        assert {path.name for path in kept} <= {os.path.basename(file) for file in files}
        assert bool(kept) == (way != "worker")  # which only removes a file


def test_folders_that_are_allowed_are_really_written(call: Any, tmp_path: Path, project: Path) -> None:
    write_script(project, "absolute")
    words = ("--arm", "bf16", "--device", "cpu", "-o", str(tmp_path / "run"))
    done = call("run", *words, "--allow-writes", str(tmp_path / "nowhere"), "--", "train.py")
    assert (done.code, "there is no such folder" in done.err) == (2, True)
    assert call("run", *words, "--allow-writes", "../elsewhere", "--", "train.py").code == 0
    assert (tmp_path / "elsewhere/best.pt").is_file()


# Twenty ways to write at once; those of the last block go to full paths, which a copy of the folder does not cover.
EVERYWHERE = """
import mmap, pathlib, sqlite3

def write_everywhere():
    if pathlib.Path("done").exists():
        return
    torch.save(model.state_dict(), "checkpoint.pt")
    os.makedirs("runs/1"); open("runs/1/events", "w").write("x")
    open("log.txt").read(); open("log.txt", "a").write("x")
    with open("input.csv", "r+b") as file:
        view = mmap.mmap(file.fileno(), 0); view[0] = 65; view.flush(); view.close()
    os.truncate("input.csv", 3)
    np.savez("arrays.npz", a=np.ones(2)); np.save("array.npy", np.ones(2))
    base = sqlite3.connect("base.db"); base.execute("create table t (a)"); base.commit(); base.close()
    open("old.db", "ab").write(b"x")
    shutil.move("moved.txt", "there.txt"); os.rename("there.txt", "again.txt")
    torch.save({}, "tmp.pt"); os.replace("tmp.pt", "replaced.pt")
    os.remove("removed.txt"); shutil.rmtree("cache")
    os.link("linked.txt", "hard.txt"); open("hard.txt", "a").write("x")
    os.symlink("input.csv", "newest"); open("link", "a").write("x")
    os.chmod("log.txt", 0o600); os.utime("old.db", (0, 0))
    subprocess.run([sys.executable, "-c", "open('child.txt', 'w').write('x')"], check=True)
    os.system("echo x >> log.txt; mkdir -p shell; cp input.csv shell")
    open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "beside.txt"), "w").write("x")
    open("done", "w")
    if "--far" in sys.argv:
        open(os.path.expanduser("~/.cache/lib/index"), "a").write("x")
        os.makedirs(os.path.expanduser("~/.config/new")); open(os.path.expanduser("~/.config/new/a"), "w")
        open(os.path.join(sys.argv[-1], "x"), "w").write("x"); open("far/x", "a").write("x")
        open("/tmp/ampcompare-test-" + os.path.basename(os.path.dirname(sys.argv[-1])), "w").write("x")
"""
FILES = ("log.txt", "input.csv", "moved.txt", "replaced.pt", "removed.txt", "cache/a", "linked.txt", "old.db")
COMMANDS = {
    "compare": [
        "compare",
        "--arm",
        "fp32,bf16",
        "--seeds",
        "0",
        "--device",
        "cpu",
        "-o",
        "RUN",
        "--",
        "train.py",
    ],
    "diagnose": ["diagnose", "--arm", "O1", "--device", "cpu", "--steps", "3", "--", "train.py"],
    "profile": ["profile", "--arm", "fp32,bf16", "--device", "cpu", "--steps", "2", "--", "train.py"],
    "migrate": ["migrate", "--verify", "--steps", "6", "train.py", "--"],
}


@pytest.mark.slow
@pytest.mark.parametrize("by", ["overlays", "copies"])
@pytest.mark.parametrize("command", COMMANDS)
def test_twenty_ways_to_write_change_no_file(
    call: Any,
    tmp_path: Path,
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    forked_runs: None,
    command: str,
    by: str,
) -> None:
    """What lies outside of the run directory has equal hashes before and after."""
    for name in FILES:
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text("the user's")
    (project / "link").symlink_to("linked.txt")
    (project / "far").symlink_to("../elsewhere")
    text = SCRIPT.format(way="write_everywhere()", steps=40)
    (project / "train.py").write_text(text.replace("\nmodel = ", f"{EVERYWHERE}\nmodel = ", 1))
    if by == "copies":
        monkeypatch.setattr("ampcompare.base.processes.sandbox.can_sandbox", lambda folder: False)
    run, before = tmp_path / "run", mtime_and_size(tmp_path)
    words = [str(run) if word == "RUN" else word for word in COMMANDS[command]]
    done = call(*words, *(["--far", str(tmp_path / "elsewhere")] if by == "overlays" else []))
    assert done.code == 0, done.err
    assert mtime_and_size(tmp_path, run) == before
    assert not Path(f"/tmp/ampcompare-test-{tmp_path.name}").exists()
    records = [json.loads(path.read_text()) for path in run.glob("cells/*/record.json")]
    near = [{os.path.basename(file) for file in record["script"]["files"]} for record in records]
    assert all(
        {"checkpoint.pt", "hard.txt", "child.txt", "beside.txt", "base.db", "removed.txt"} <= one
        for one in near
    )


def test_a_factory_of_the_user_changes_no_file_either(call: Any, tmp_path: Path, here: Path) -> None:
    if not can_sandbox(str(tmp_path)):
        pytest.skip("this machine allows no overlays")
    (here / "writing_model.py").write_text(
        "import torch\n\n\ndef make(num_classes, sample_shape):\n    open('side.txt', 'w').write('x')\n"
        "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, num_classes))\n"
    )
    before = mtime_and_size(here)
    done = call("run", "--arch", "writing_model:make", "-o", str(tmp_path / "run"), tiny=True)
    assert done.code == 0, done.err
    assert mtime_and_size(here) == before
    assert [path.read_text() for path in (tmp_path / "run").glob("cells/*/written/side.txt")] == ["x"]


@pytest.mark.parametrize("way", ["torch.save", "next to itself"])
def test_without_overlays_scripts_run_in_copies(
    call: Any, tmp_path: Path, project: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """The code of a cell has the names of the user's files, so that its record is used again."""
    monkeypatch.setattr("ampcompare.base.processes.sandbox.can_sandbox", lambda folder: False)
    write_script(project, way)
    before = mtime_and_size(tmp_path, project / "run")
    words = ("run", "--arm", "fp32", "--device", "cpu", "-o", "run", "--", "train.py")
    done = call(*words)
    assert done.code == 0, done.err
    assert "this machine allows no overlays, so the script runs in a copy" in done.err
    assert mtime_and_size(tmp_path, project / "run") == before
    (path,) = project.glob("run/cells/*/record.json")
    record = json.loads(path.read_text())
    assert list(record["code"]) == ["train.py"]
    name = "log.txt" if way == "next to itself" else "checkpoint.pt"
    assert record["script"]["files"] == [str(project / name)]
    assert (path.parent / "written" / name).is_file()
    assert "runs again" not in call(*words).err
    assert json.loads(path.read_text())["started"] == record["started"]
