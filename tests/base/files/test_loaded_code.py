"""The code that a run loads: which files count, under which names, and what is found changed."""

import importlib.util
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ampcompare.base.files import loaded_code
from ampcompare.base.files.loaded_code import (
    UsedInputsRecorder,
    changed_code_files,
    digest_of_file,
    read_loaded_code,
)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a package, as the working directory and the first entry of the search path."""
    folder = tmp_path / "project"
    (folder / "nets" / "deep").mkdir(parents=True)
    (folder / "nets" / "deep" / "block.py").write_text("WIDTH = 8\n")  # namespace packages: no __init__.py
    (folder / "late.py").write_text("X = 1\n")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    known = set(sys.modules)
    yield folder
    for name in set(sys.modules) - known:
        del sys.modules[name]


@pytest.fixture
def cell(tmp_path: Path) -> Path:
    """The folder of a cell."""
    folder = tmp_path / "cell"
    folder.mkdir()
    return folder


def _import(path: Path) -> None:
    """Import a file that no search path holds, as `__main__` and the modules of a config are."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def test_modules_and_the_files_that_they_name_count(project: Path, cell: Path) -> None:
    """Namespace packages, modules by path, texts that are executed, scripts that are started, and settings."""
    for name in ("read", "started", "unused"):
        (project / f"{name}.py").write_text("Y = 2\n")
    (project / "settings.yaml").write_text("lr: 0.1\n")
    (project / "by_path.py").write_text(
        "import subprocess\nfrom pathlib import Path\nexec(Path('read.py').read_text())\n"
        "subprocess.run(['true', 'started.py'])\nsettings = 'settings.yaml'\n"
    )
    watch = UsedInputsRecorder(cell, project)
    importlib.import_module("nets.deep.block")
    _import(project / "by_path.py")
    watch.record_used_inputs()
    expected = ["by_path.py", "nets/deep/block.py", "read.py", "settings.yaml", "started.py"]
    assert list(read_loaded_code(cell).files) == expected


def test_settings_of_the_cell_name_files_too(project: Path, cell: Path, tmp_path: Path) -> None:
    """Arguments of the script among them, as options and wherever the files lie."""
    (project / "a.txt").write_text("1")
    (tmp_path / "far.npy").write_text("1")
    (cell / "config.json").write_text(
        json.dumps({"arguments": ["--data=a.txt", str(tmp_path / "far.npy"), "b.txt"]})
    )
    UsedInputsRecorder(cell, project).record_used_inputs()
    assert list(read_loaded_code(cell).files) == ["../far.npy", "a.txt"]


def test_installed_packages_python_and_the_cell_do_not_count(project: Path, cell: Path) -> None:
    """Of what `site-packages` and the standard library hold, only versions are kept."""
    installed = project / "env" / "site-packages"
    installed.mkdir(parents=True)
    (installed / "library.py").write_text("")
    (cell / "made.py").write_text(f"NAMES = '{json.__file__}', 'made.txt'\n")
    (cell / "made.txt").write_text("1")
    watch = UsedInputsRecorder(cell, project)
    _import(installed / "library.py")
    _import(cell / "made.py")
    watch.record_used_inputs()
    assert read_loaded_code(cell).files == {}


def test_the_end_adds_modules_that_are_there_and_versions(
    project: Path, cell: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of the user that were loaded before, numpy which is, and packages that the run has loaded."""
    importlib.import_module("late")
    installed = project / "site-packages"
    (installed / "quick-3.dist-info").mkdir(parents=True)
    (installed / "quick-3.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: quick\nVersion: 3\n"
    )
    (installed / "quick-3.dist-info" / "RECORD").write_text("fast.py,,\n")
    (installed / "fast.py").write_text("")
    monkeypatch.syspath_prepend(installed)
    watch = UsedInputsRecorder(cell, project)
    importlib.import_module("fast")
    watch.record_used_inputs()
    found = read_loaded_code(cell)
    assert list(found.files) == ["late.py"]
    assert (found.packages["numpy"], found.packages["quick"]) == (np.__version__, "3")


def test_changed_gone_and_shadowed_files_are_found(
    project: Path, cell: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a module that another entry of PYTHONPATH now provides; a copy of the project elsewhere is the same."""
    for name, text in (("old", "A = 1\n"), ("new", "A = 2\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "helper.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "old"))
    monkeypatch.syspath_prepend(str(tmp_path / "old"))
    watch = UsedInputsRecorder(cell, project)
    importlib.import_module("helper")
    importlib.import_module("nets.deep.block")
    watch.record_used_inputs()
    files = read_loaded_code(cell).files
    assert list(files) == ["helper.py", "nets/deep/block.py"]
    assert changed_code_files(files, project) == {}
    copy = tmp_path / "copy"
    (project).rename(copy)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not entry.startswith(str(tmp_path))])
    assert changed_code_files(files, copy) == {}
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "new"))
    (copy / "nets" / "deep" / "block.py").unlink()
    assert changed_code_files(files, copy) == {"helper.py": "changed", "nets/deep/block.py": "gone"}


def test_a_module_that_changes_meanwhile_equals_no_form(project: Path, cell: Path) -> None:
    """What was loaded is not known then; two processes that loaded different contents leave both."""
    watches = [UsedInputsRecorder(cell, project)]
    importlib.import_module("late")
    time.sleep(0.02)  # longer than the disk's clock takes to advance
    (project / "late.py").write_text("X = 22\n")
    time.sleep(0.02)
    watches.append(UsedInputsRecorder(cell, project))
    for watch in watches:
        watch.record_used_inputs()
    files = read_loaded_code(cell).files
    assert files["late.py"] == f"changed while it ran|{digest_of_file('late.py')}"
    assert changed_code_files(files, project) == {"late.py": "changed"}


def test_named_data_counts_wherever_it_lies(project: Path, cell: Path, tmp_path: Path) -> None:
    """Names without an ending, folders; not hidden files, trackers, runs, metadata, pipes and what the run writes."""
    outside = tmp_path / "sets" / "far" / "deep" / "points.bin"
    names = (
        "size",
        ".hidden/x",
        "wandb/x",
        "out/plan.json",
        "out/x",
        "mine.egg-info/x",
        "set/b/1",
        "set/.c",
        "set/m.py",
    )
    for path in (outside, *(project / name for name in names)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("1")
    np.save(project / "data.npy", np.zeros(3))
    os.mkfifo(project / "pipe")
    named = [
        "data.npy",
        *names,
        "pipe",
        "out",
        "set",
        str(outside),
        "result.txt",
        ".",
        "",
        "/dev/null",
        "missing",
    ]
    (project / "late.py").write_text(f"NAMES = {named}\n")
    watch = UsedInputsRecorder(cell, project)
    importlib.import_module("late")
    time.sleep(0.02)
    (project / "result.txt").write_text("written by the run")
    watch.record_used_inputs()
    files = read_loaded_code(cell).files
    near = {"data.npy", "size", "out/plan.json", "out/x", "set/b/1", "set/m.py", "late.py"}
    assert set(files) == {*near, "../sets/far/deep/points.bin"}
    np.save("data.npy", np.ones(3))
    assert changed_code_files(files, project) == {"data.npy": "changed"}


def test_a_large_file_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its size and its blocks count, first and last byte among them."""
    monkeypatch.setattr(loaded_code, "MAX_WHOLE_BYTES", 100)
    monkeypatch.setattr(loaded_code, "BLOCK_BYTES", 10)
    path, digests = tmp_path / "large", set()
    for content in (b"a" * 999, b"b" + b"a" * 998, b"a" * 998 + b"b", b"a" * 1000):
        path.write_bytes(content)
        digests.add(digest_of_file(path))
    assert len(digests) == 4


def test_variables_that_the_code_asks_for_count(
    project: Path, cell: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By any way to ask, without their values; secrets, copies of all, the launcher's and what libraries ask do not."""
    for name in ("ONE", "TWO", "HF_TOKEN", "RANK", "COPIED"):
        monkeypatch.setenv(name, "1e-3")
    (project / "asks.py").write_text(
        "import os\n"
        "os.environ['ONE'], os.environ.get('TWO'), os.getenv('UNSET'), 'THREE' in os.environ\n"
        "os.environ.get('HF_TOKEN'), os.environ['RANK'], dict(os.environ), os.environ.copy(), {**os.environ}\n"
    )
    watch = UsedInputsRecorder(cell, project)
    _import(project / "asks.py")
    watch.record_used_inputs()
    files = read_loaded_code(cell).files
    assert set(files) == {"$ONE", "$TWO", "$UNSET", "$THREE", "asks.py"}
    assert files["$UNSET"] == files["$THREE"] == "unset"
    assert "1e-3" not in (cell / "loaded.jsonl").read_text()
    assert changed_code_files(files, project) == {}
    monkeypatch.setenv("TWO", "2")
    monkeypatch.setenv("UNSET", "")
    assert changed_code_files(files, project) == {"$TWO": "changed", "$UNSET": "changed"}
