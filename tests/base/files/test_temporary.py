"""Which files are temporary."""

import os
import sys
import tempfile
from pathlib import Path

import pytest

from ampcompare.base.files.temporary import is_bytecode, temporary_root


def test_what_tempfile_makes_is_temporary_with_all_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tempfile.mkdtemp()
    handle, file = tempfile.mkstemp()
    os.close(handle)
    assert [temporary_root(folder), temporary_root(file)] == [folder, file]
    assert temporary_root(os.path.join(folder, "part", "a.bin")) == folder


@pytest.mark.parametrize("name", ["model.pt", "run/tmp1", "apymp-", "../tmp1"])
def test_what_a_user_names_is_not_temporary(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert temporary_root(os.path.normpath(tmp_path / name)) == ""


def test_compiled_modules_are_known_in_both_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `.pyc` that a user has elsewhere is a file like any other."""
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "cache"))
    assert is_bytecode(str(tmp_path / "cache" / "home" / "helper.cpython-311.pyc"))
    assert is_bytecode(str(tmp_path / "cache" / "home" / "helper.cpython-311.pyc.140"))
    assert is_bytecode(str(tmp_path / "__pycache__" / "helper.cpython-311.pyc"))
    assert not is_bytecode(str(tmp_path / "helper.pyc"))
    assert not is_bytecode(str(tmp_path / "cache" / "home" / "table.csv"))
    monkeypatch.setattr(sys, "pycache_prefix", None)
    assert not is_bytecode(str(tmp_path / "cache" / "home" / "helper.cpython-311.pyc"))
