"""What processes in a sandbox write, and what of it reaches the user's files."""

import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from ampcompare.base.errors import ConfigError
from ampcompare.base.processes import sandbox as module
from ampcompare.base.processes import working_copy
from ampcompare.base.processes.sandbox import Sandbox, WrittenFile, can_sandbox, open_sandbox

ENTER = "from ampcompare.base.processes.overlay import enter_sandbox_if_asked; enter_sandbox_if_asked()\n"


@pytest.fixture(params=["overlays", "copies"])
def by(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return by what the user's files are protected."""
    if request.param == "copies":
        monkeypatch.setattr("ampcompare.base.processes.sandbox.can_sandbox", lambda folder: False)
    elif not can_sandbox(str(tmp_path)):
        pytest.skip("this machine allows no overlays")
    return str(request.param)


@pytest.fixture(autouse=True)
def project(by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory, a project with a checkpoint; HOME is its neighbor."""
    for name in ("project/data", "home/.cache/lib", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
    for name in (
        "project/checkpoint.pt",
        "project/data/input.csv",
        "home/.cache/lib/index",
        "elsewhere/log.txt",
    ):
        (tmp_path / name).write_text("the user's")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "project"


def mtime_and_size(folder: Path) -> dict[str, str]:
    """Return what lies in a folder: names of folders, links, and hashes of files."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        found[name] = "" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def run(sandbox: Sandbox, code: str) -> int:
    """Run Python code in a sandbox, and return its exit code."""
    environment = {**os.environ, **sandbox.environment, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run([sys.executable, "-c", ENTER + code], env=environment, check=False).returncode


WAYS = {
    "open": ("open('checkpoint.pt', 'w').write('x')", "checkpoint.pt", "changed"),
    "new folder": ("import os; os.makedirs('a/b'); open('a/b/c', 'w').write('x')", "a/b/c", "new"),
    "append": ("open('../elsewhere/log.txt', 'a').write('x')", "../elsewhere/log.txt", "changed"),
    "home": ("import os; open(os.path.expanduser('~/.cache/lib/index'), 'w')", "../home/.cache/lib/index", "changed"),
    "os.replace": (
        "import os; open('tmp', 'w').write('x'); os.replace('tmp', 'checkpoint.pt')", "checkpoint.pt", "changed",
    ),
    "os.remove": ("import os; os.remove('checkpoint.pt')", "checkpoint.pt", "removed"),
    "rmtree": ("import shutil; shutil.rmtree('data'); open('data', 'w').write('x')", "data", "changed"),
    "chmod": ("import os; os.chmod('checkpoint.pt', 0o600)", "checkpoint.pt", "changed"),
    "link to a folder": ("import os; os.symlink('data', 'newest')", "newest", "new"),
    "symlink": ("import os; os.symlink('checkpoint.pt', 'latest')", "latest", "new"),
    "mmap": (
        "import mmap; f = open('data/input.csv', 'r+b'); m = mmap.mmap(f.fileno(), 0); m[0] = 65; m.flush()",
        "data/input.csv", "changed",
    ),
    "child": (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'open(\"data/input.csv\", \"w\")'])",
        "data/input.csv", "changed",
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_whatever_way_a_process_writes_the_users_files_stay(
    way: str, by: str, tmp_path: Path, project: Path
) -> None:
    code, name, how = WAYS[way]
    if by == "copies" and name.startswith(".."):
        pytest.skip("a copy holds for the working directory alone")
    path = os.path.normpath(project / name)
    before = mtime_and_size(tmp_path)
    with open_sandbox(tmp_path / "store") as sandbox:
        assert run(sandbox, code) == 0
    assert mtime_and_size(tmp_path) == before
    assert (path, how) in [(one.path, one.how) for one in sandbox.written]


@pytest.mark.parametrize("by", ["overlays"], indirect=True)
def test_what_was_written_lies_in_the_target_under_the_same_relative_path(
    tmp_path: Path, project: Path
) -> None:
    code = (
        "import os; os.makedirs('out'); open('out/a', 'w').write('A'); open('../elsewhere/b', 'w').write('B')"
    )
    target = tmp_path / "written"
    with open_sandbox(tmp_path / "store", target=target) as sandbox:
        run(sandbox, code)
    near, far = project / "out/a", tmp_path / "elsewhere/b"
    assert sandbox.written == [
        WrittenFile(str(far), "new", str(target / str(far).lstrip("/"))),
        WrittenFile(str(near), "new", str(target / "out/a")),
    ]
    assert [Path(one.place).read_text() for one in sandbox.written] == ["B", "A"]


def test_a_process_reads_its_own_version_and_none_of_another_sandbox(tmp_path: Path, project: Path) -> None:
    code = (
        "assert open('checkpoint.pt').read() == \"the user's\"; open('checkpoint.pt', 'w').write('mine')\n"
        "import subprocess, sys; assert subprocess.check_output(['cat', 'checkpoint.pt']) == b'mine'"
    )
    for _ in range(2):
        with open_sandbox(tmp_path / "store") as sandbox:
            assert run(sandbox, code) == 0


def test_shared_paths_are_the_real_ones(tmp_path: Path, project: Path) -> None:
    with open_sandbox(
        tmp_path / "store", shared_paths=[project / "data", project / "checkpoint.pt"]
    ) as sandbox:
        run(sandbox, "open('data/input.csv', 'w').write('x'); open('checkpoint.pt', 'w').write('y')")
    assert (project / "data/input.csv").read_text() == "x"
    assert (project / "checkpoint.pt").read_text() == "y"
    assert not sandbox.written


def test_a_killed_process_has_changed_nothing(tmp_path: Path, project: Path) -> None:
    before = mtime_and_size(tmp_path)
    with open_sandbox(tmp_path / "store", target=tmp_path / "written") as sandbox:
        code = "import os; open('checkpoint.pt', 'w').write('half'); os.kill(os.getpid(), 9)"
        assert run(sandbox, code) == -signal.SIGKILL
    assert sandbox.written[0].how == "changed"
    assert Path(sandbox.written[0].place).read_text() == "half"
    (tmp_path / "written/checkpoint.pt").unlink()
    (tmp_path / "written").rmdir()
    assert mtime_and_size(tmp_path) == before


def test_bytecode_and_temporary_files_are_not_listed(tmp_path: Path, project: Path) -> None:
    (project / "helper.py").write_text("")
    before = mtime_and_size(tmp_path)
    with open_sandbox(tmp_path / "store") as sandbox:
        run(sandbox, "import sys, tempfile; sys.path.insert(0, ''); import helper; tempfile.mkstemp()")
    assert mtime_and_size(tmp_path) == before
    assert not sandbox.written


@pytest.mark.parametrize("by", ["overlays"], indirect=True)
def test_a_process_that_removes_the_temporary_folder_of_another_one_writes_nothing(tmp_path: Path) -> None:
    """A fork removes, at its end, what `tempfile` gave to the process that it was forked from, as torch has one."""
    with tempfile.TemporaryDirectory() as folder, open_sandbox(tmp_path / "store") as sandbox:
        assert run(sandbox, f"import os; os.rmdir({folder!r})") == 0
        assert os.path.isdir(folder)
    assert not sandbox.written


# Mount points that are gone when an overlay is laid on them, and one that stays.
VANISHED = """
import os, sys
from ampcompare.base.processes import overlay
mount_points = overlay._file_system_kinds_by_mount_point
gone = {os.path.join(os.getcwd(), "gone"): "overlay", "/gone/merged": "ext4"}
overlay._file_system_kinds_by_mount_point = lambda: mount_points() | gone
overlay.enter_sandbox_if_asked()
open("checkpoint.pt", "w").write("x")
"""


@pytest.mark.parametrize("by", ["overlays"], indirect=True)
def test_a_mount_that_vanishes_meanwhile_is_left_out(tmp_path: Path, project: Path) -> None:
    """As those of containers that other processes build and remove."""
    with open_sandbox(tmp_path / "store", target=tmp_path / "target") as sandbox:
        environment = {**os.environ, **sandbox.environment, "PYTHONPATH": os.pathsep.join(sys.path)}
        assert subprocess.run([sys.executable, "-c", VANISHED], env=environment, check=False).returncode == 0
    assert [one.how for one in sandbox.written] == ["changed"]
    assert (project / "checkpoint.pt").read_text() == "the user's"


@pytest.mark.parametrize("by", ["copies"], indirect=True)
def test_a_file_system_that_does_not_answer_allows_no_overlays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PROBE_SECONDS", 0.2)
    monkeypatch.setattr(module, "module_command", lambda name: ["sleep", "60"])
    begun = time.monotonic()
    assert not module._is_sandbox_possible(str(tmp_path))
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize("by", ["copies"], indirect=True)
def test_a_file_too_large_for_a_copy_is_named_before_the_start(
    tmp_path: Path, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(working_copy, "MAX_FILE_BYTES", 5)
    before = mtime_and_size(tmp_path)
    with pytest.raises(ConfigError, match=r"checkpoint.pt .* is too large to protect.*--allow-writes"):
        with open_sandbox(tmp_path / "store"):
            pass
    with open_sandbox(
        tmp_path / "store", shared_paths=[project / "checkpoint.pt", project / "data"]
    ) as sandbox:
        assert run(sandbox, "assert open('checkpoint.pt').read()") == 0
    assert mtime_and_size(tmp_path) == before


@pytest.mark.parametrize("by", ["copies"], indirect=True)
def test_a_copy_has_links_to_environments_and_runs_and_to_what_lies_elsewhere(
    tmp_path: Path, project: Path
) -> None:
    for name in (".git/HEAD", ".venv/pyvenv.cfg", "runs/compare-1/plan.json"):
        (project / name).parent.mkdir(parents=True)
        (project / name).write_text("x")
    (project / "far").symlink_to("../elsewhere")
    (project / "latest").symlink_to("checkpoint.pt")
    with open_sandbox(tmp_path / "store") as sandbox:
        code = (
            "import os; links = [name for name in os.listdir() if os.path.islink(name)]\n"
            "assert sorted(links) == ['.git', '.venv', 'far', 'latest'], links\n"
            "assert os.path.islink('runs/compare-1') and open('far/log.txt').read()\n"
            "open('latest', 'w').write('x')"
        )
        assert run(sandbox, code) == 0
        assert sandbox.path_seen_in_sandbox(str(project / "data/input.csv")) != str(
            project / "data/input.csv"
        )
        assert sandbox.path_seen_in_sandbox("data") == "data"
    assert [(Path(one.path).name, one.how) for one in sandbox.written] == [("checkpoint.pt", "changed")]
    assert [(project / name).stat().st_mode & 0o777 for name in (".git", ".venv", "far")] == [
        0o755,
        0o755,
        0o755,
    ]
    assert (project / "checkpoint.pt").read_text() == "the user's"
