"""Files that several processes examine together."""

import os
import sys
from pathlib import Path

import pytest

from ampcompare.source.lint import share_work
from ampcompare.source.lint.run import LintSelection, lint_files
from ampcompare.source.lint.share_work import map_files

OWN = os.getpid()


@pytest.fixture(autouse=True)
def _shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let two processes share any work, whatever this machine has and these tests have imported."""
    monkeypatch.setattr(share_work, "WORTH_SHARING", 1)
    monkeypatch.setattr(share_work, "_can_fork_safely", lambda: sys.platform == "linux")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1}, raising=False)


def where(path: Path) -> tuple[str, int]:
    return path.name, os.getpid()


def dies_elsewhere(path: Path) -> tuple[str, int]:
    if os.getpid() != OWN and path.name == "20.py":
        os._exit(1)
    return where(path)


def make_files(folder: Path, count: int = 40) -> list[Path]:
    files = [folder / f"{number}.py" for number in range(count)]
    for number, file in enumerate(files):
        file.write_text(f"from apex import amp\nm, o = amp.initialize(m, o, opt_level='0{number % 4}')\n")
    return files


@pytest.mark.integration
def test_other_processes_examine_files_in_their_order(tmp_path: Path) -> None:
    files = make_files(tmp_path)
    found = list(map_files(where, files))
    assert [name for name, _ in found] == [file.name for file in files]
    if sys.platform == "linux":
        assert OWN not in {process for _, process in found}


@pytest.mark.integration
def test_a_process_that_is_killed_leaves_its_files_to_this_one(tmp_path: Path) -> None:
    files = make_files(tmp_path)
    assert [name for name, _ in map_files(dies_elsewhere, files)] == [file.name for file in files]


@pytest.mark.integration
def test_a_report_is_the_same_however_many_processes_make_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = make_files(tmp_path)
    files[3].write_text("from apex import amp\nprint 'x'\n")
    files[5].unlink()
    shared = lint_files(files, LintSelection())
    monkeypatch.setattr(share_work, "WORTH_SHARING", 10**9)
    alone = lint_files(files, LintSelection())
    assert shared == alone
    assert len(alone.findings) > len(files)
    assert len(alone.unread) == 2


def test_a_process_with_torch_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "torch", sys)
    assert not share_work._can_fork_safely()
