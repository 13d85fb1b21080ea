"""The code that a run loads: which files count, under which names, and what is found changed."""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ampcompare.base.files import loaded_code
from ampcompare.base.files.loaded_code import (
    changed_code,
    differing_files,
    digest_of,
    distributions_of,
    end_watch,
    read_loaded,
    watch_code,
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
    end_watch()
    for name in set(sys.modules) - known:
        del sys.modules[name]


def _cell(tmp_path: Path) -> Path:
    cell = tmp_path / "cell"
    cell.mkdir(exist_ok=True)
    return cell


def test_every_way_to_load_a_file_counts(project: Path, tmp_path: Path) -> None:
    """Imports of submodules, `runpy`, `exec` of a text that was read, modules by path, started scripts and settings."""
    for name in ("ran", "read", "by_path", "started"):
        (project / f"{name}.py").write_text("Y = 2\n")
    (project / "settings.yaml").write_text("lr: 0.1\n")
    cell = _cell(tmp_path)
    watch_code(cell, project)
    importlib.import_module("nets.deep.block")
    runpy.run_path("ran.py")
    exec((project / "read.py").read_text(), {})
    spec = importlib.util.spec_from_file_location("anything", project / "by_path.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    subprocess.run(["true", "started.py"], check=True)
    (project / "settings.yaml").read_text()
    expected = ["by_path.py", "nets/deep/block.py", "ran.py", "read.py", "settings.yaml", "started.py"]
    assert list(read_loaded(cell).files) == expected


def test_watches_share_one_hook_and_end(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python cannot remove a hook, so a second is never added; the file goes to the last watch alone."""
    hooks: list[Any] = []
    monkeypatch.setattr(sys, "addaudithook", hooks.append)
    monkeypatch.setattr(loaded_code, "_is_installed", False)
    seen: dict[str, list[str]] = {"a": [], "b": []}
    for events in seen.values():
        watch = watch_code(_cell(tmp_path), project)
        monkeypatch.setattr(watch, "audit", lambda event, _, events=events: events.append(event))
        for event in ("open", "builtins.id", "import", "subprocess.Popen"):
            hooks[0](event, ())
    end_watch()
    hooks[0]("open", ())
    assert len(hooks) == 1
    assert seen == {"a": ["open", "subprocess.Popen"], "b": ["open", "subprocess.Popen"]}


def test_a_forked_child_adds_its_own(project: Path, tmp_path: Path) -> None:
    """What a worker imports is on the list, though it ends without a word."""
    cell = _cell(tmp_path)
    watch_code(cell, project)
    if (child := os.fork()) == 0:
        importlib.import_module("late")
        os._exit(0)
    os.waitpid(child, 0)
    assert list(read_loaded(cell).files) == ["late.py"]


def test_installed_packages_and_python_do_not_count(project: Path, tmp_path: Path) -> None:
    """Of what `site-packages` and the standard library hold, only versions are kept."""
    cell = _cell(tmp_path)
    installed = project / "env" / "site-packages"
    installed.mkdir(parents=True)
    (installed / "library.py").write_text("")
    watch_code(cell, project)
    runpy.run_path(str(installed / "library.py"))
    (Path(json.__file__)).read_text()
    assert read_loaded(cell).files == {}


def test_a_module_leads_to_the_distribution_that_installed_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `importlib.metadata` maps them; also from a list of names, and to a module that is compiled."""
    known = metadata.packages_distributions()
    assert distributions_of(["yaml", "numpy"]) == {*known["yaml"], *known["numpy"]}
    assert distributions_of(known) == {one for names in known.values() for one in names}
    for name, file, text in (
        ("a", "RECORD", "fast.cpython-311-x86_64-linux-gnu.so,,\n"),
        ("b", "top_level.txt", "fast\n"),
    ):
        (tmp_path / f"{name}-1.dist-info").mkdir()
        (tmp_path / f"{name}-1.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        (tmp_path / f"{name}-1.dist-info" / file).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert distributions_of(["fast", "fas"]) == {"a", "b"}


def test_the_end_adds_modules_that_are_there_and_versions(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of the user that were loaded before, numpy which is, and packages that the run has loaded."""
    import numpy

    importlib.import_module("late")
    installed = project / "site-packages"
    (installed / "quick-3.dist-info").mkdir(parents=True)
    (installed / "quick-3.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: quick\nVersion: 3\n")
    (installed / "quick-3.dist-info" / "RECORD").write_text("fast.py,,\n")
    (installed / "fast.py").write_text("")
    monkeypatch.syspath_prepend(installed)
    cell = _cell(tmp_path)
    watch = watch_code(cell, project)
    importlib.import_module("fast")
    watch.end()
    found = read_loaded(cell)
    assert "late.py" in found.files
    assert (found.packages["numpy"], found.packages["quick"]) == (numpy.__version__, "3")


def test_metadata_of_packages_is_no_data(project: Path, tmp_path: Path) -> None:
    """A package that was installed from the folder of the script has its metadata there; looks for plugins read it."""
    info = project / "mine.egg-info"
    info.mkdir()
    (info / "PKG-INFO").write_text("Name: mine\nVersion: 1.0\n")
    (info / "top_level.txt").write_text("mine\n")
    cell = _cell(tmp_path)
    watch = watch_code(cell, project)
    watch._at_start.discard("yaml")
    import yaml  # noqa: F401

    (info / "top_level.txt").read_text()
    watch.end()
    assert not [name for name in read_loaded(cell).files if "mine.egg-info" in name]


def test_changed_gone_and_shadowed_files_are_found(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a module that another entry of PYTHONPATH now provides; a copy of the project elsewhere is the same."""
    for name, text in (("old", "A = 1\n"), ("new", "A = 2\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "helper.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "old"))
    monkeypatch.syspath_prepend(str(tmp_path / "old"))
    cell = _cell(tmp_path)
    watch_code(cell, project)
    importlib.import_module("helper")
    importlib.import_module("nets.deep.block")
    files = read_loaded(cell).files
    assert list(files) == ["helper.py", "nets/deep/block.py"]
    assert changed_code(files, project) == {}
    copy = tmp_path / "copy"
    (project).rename(copy)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not entry.startswith(str(tmp_path))])
    assert changed_code(files, copy) == {}
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "new"))
    (copy / "nets" / "deep" / "block.py").unlink()
    assert changed_code(files, copy) == {"helper.py": "changed", "nets/deep/block.py": "gone"}


def test_a_file_that_changes_meanwhile_equals_neither_form(project: Path, tmp_path: Path) -> None:
    """Two processes of a cell that loaded different contents leave a record that no file matches."""
    cell = _cell(tmp_path)
    for _ in range(2):
        watch_code(cell, project)
        runpy.run_path("late.py")
        (project / "late.py").touch()
        end_watch()
        (project / "late.py").write_text("X = 22\n")
    files = read_loaded(cell).files
    assert files["late.py"].count("|") == 1
    assert changed_code(files, project) == {"late.py": "changed"}


def test_only_common_files_differ() -> None:
    """An arm may load a file that another does not need."""
    assert differing_files({"a": "1", "b": "2"}, {"b": "3", "c": "4"}) == ["b"]


def test_data_counts_wherever_it_lies_and_whatever_its_name(project: Path, tmp_path: Path) -> None:
    """Arrays, archives that modules come from, and names without an ending; hidden files, trackers and pipes do not."""
    outside = tmp_path / "sets" / "far" / "deep" / "points.bin"
    outside.parent.mkdir(parents=True)
    for path in (outside, project / "size", project / ".hidden" / "x", project / "wandb" / "x"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("1")
    np.save(project / "data.npy", np.zeros(3))
    with zipfile.ZipFile(project / "lib.zip", "w") as archive:
        archive.writestr("zipped_module.py", "Q = 1\n")
    cell = _cell(tmp_path)
    watch_code(cell, project)
    np.load("data.npy")
    sys.path.insert(0, str(project / "lib.zip"))
    importlib.import_module("zipped_module")
    sys.path.remove(str(project / "lib.zip"))
    for name in (outside, "size", ".hidden/x", "wandb/x"):
        Path(name).read_text()
    files = read_loaded(cell).files
    assert set(files) == {"data.npy", "lib.zip", "size", "../sets/far/deep/points.bin"}
    np.save("data.npy", np.ones(3))
    assert changed_code(files, project) == {"data.npy": "changed"}


def test_a_large_file_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its size and its blocks count, first and last byte among them."""
    monkeypatch.setattr(loaded_code, "MAX_WHOLE_BYTES", 100)
    monkeypatch.setattr(loaded_code, "BLOCK_BYTES", 10)
    path, digests = tmp_path / "large", set()
    for content in (b"a" * 999, b"b" + b"a" * 998, b"a" * 998 + b"b", b"a" * 1000):
        path.write_bytes(content)
        digests.add(digest_of(path))
    assert len(digests) == 4


def test_variables_that_the_code_asks_for_count(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By any way to ask, without their values; secrets, copies of all, the launcher's and what libraries ask do not."""
    for name in ("ONE", "TWO", "HF_TOKEN", "RANK", "COPIED"):
        monkeypatch.setenv(name, "1e-3")
    (project / "asks.py").write_text(
        "import os\n"
        "os.environ['ONE'], os.environ.get('TWO'), os.getenv('UNSET'), 'THREE' in os.environ\n"
        "os.environ.get('HF_TOKEN'), os.environ['RANK'], dict(os.environ), os.environ.copy(), {**os.environ}\n"
    )
    cell = _cell(tmp_path)
    watch = watch_code(cell, project)
    runpy.run_path("asks.py")
    os.path.expandvars("$COPIED")
    watch.end()
    files = read_loaded(cell).files
    assert {"$ONE", "$TWO", "$UNSET", "$THREE", "asks.py"} <= set(files)  # with what the tests have loaded before
    assert not {"$HF_TOKEN", "$RANK", "$COPIED"} & set(files)
    assert files["$UNSET"] == files["$THREE"] == "unset"
    assert "1e-3" not in (cell / "loaded.jsonl").read_text()
    assert changed_code(files, project) == {}
    monkeypatch.setenv("TWO", "2")
    monkeypatch.setenv("UNSET", "")
    assert changed_code(files, project) == {"$TWO": "changed", "$UNSET": "changed"}
