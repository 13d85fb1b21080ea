"""Which files below a path are source."""

import errno
import os
from pathlib import Path

import pytest

from ampcompare.source.find import find_sources


def write(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n", encoding="utf-8")


def found(folder: Path, **options: object) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in find_sources([folder], **options)]  # type: ignore[arg-type]


def test_order_and_suffixes(tmp_path: Path) -> None:
    """Files come before folders, each sorted; other suffixes, hidden folders and environments are left out."""
    write(
        tmp_path,
        "b/c.py",
        "b/a.ipynb",
        "z.py",
        "a.txt",
        ".git/x.py",
        "__pycache__/y.py",
        "env/lib/q.py",
        "a/t.pyi",
    )
    (tmp_path / "env" / "pyvenv.cfg").touch()

    assert found(tmp_path) == ["z.py", "a/t.pyi", "b/a.ipynb", "b/c.py"]


def test_copies_of_apex_are_left_out(tmp_path: Path) -> None:
    """The package and the repository of Apex are left out, and the project that has a copy of the package is not."""
    write(tmp_path, "project/train.py", "project/apex/amp/_amp_state.py", "project/apex/optimizers/fused.py")
    write(tmp_path, "apex-master/csrc/amp_C_frontend.cpp", "apex-master/tests/test_amp.py")

    assert found(tmp_path) == ["project/train.py"]
    assert len(found(tmp_path / "project" / "apex")) == 2


def test_named_files_are_read_whatever_their_name(tmp_path: Path) -> None:
    """A script without a suffix is read if it is named, and once if it is named twice."""
    write(tmp_path, "train")

    assert list(find_sources([tmp_path / "train", tmp_path / "train"])) == [tmp_path / "train"]


def test_links(tmp_path: Path) -> None:
    """A circle of links ends, and a file with two names is yielded once."""
    write(tmp_path, "a/x.py")
    (tmp_path / "a" / "up").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "a" / "y.py").symlink_to("x.py")
    (tmp_path / "a" / "nothing.py").symlink_to("missing.py")

    assert found(tmp_path) == ["a/x.py", "a/nothing.py"]


def test_a_link_to_a_file_that_is_found_stands_for_nothing(tmp_path: Path) -> None:
    """Where a file lies says from where it imports."""
    write(tmp_path, "pkg/run.py", "elsewhere/tool.py")
    (tmp_path / "pkg" / "a.py").symlink_to("run.py")
    (tmp_path / "run.py").symlink_to("pkg/run.py")
    (tmp_path / "pkg" / "tool.py").symlink_to("../elsewhere/tool.py")
    assert found(tmp_path) == ["elsewhere/tool.py", "pkg/run.py"]
    assert [each.name for each in find_sources([tmp_path / "pkg"])] == ["run.py", "tool.py"]


@pytest.mark.parametrize("pattern", ["old", "old/", "*_old.py", "a/old", "*/old/*"])
def test_exclude(tmp_path: Path, pattern: str) -> None:
    """Patterns are held against names and paths."""
    write(tmp_path, "a/old/x.py", "a/y_old.py", "a/z.py")

    assert ("a/old/x.py" in found(tmp_path, exclude=[pattern])) == (pattern == "*_old.py")
    assert "a/z.py" in found(tmp_path, exclude=[pattern])


def test_a_folder_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "a/x.py", "b/y.py")
    notes: list[tuple[Path, str]] = []
    scandir = os.scandir

    def refuse(folder: Path) -> object:  # the superuser may read any folder
        if folder == tmp_path / "a":
            raise PermissionError(errno.EACCES, "Permission denied")
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    assert found(tmp_path, unreadable=lambda path, why: notes.append((path, why))) == ["b/y.py"]
    assert notes == [(tmp_path / "a", "Permission denied")]
