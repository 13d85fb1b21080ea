"""What stands under the name apex, told by files alone, and the fingerprint of this machine."""

import importlib.util
import sys
from pathlib import Path

import pytest

from ampcompare.base.environment.apex import probe_apex


def _package(folder: Path, *files: str) -> Path:
    for file in files:
        path = folder / "apex" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise SystemError('probing must not import this')")
    return folder


@pytest.mark.parametrize(
    ("files", "kind", "reason"),
    [
        ([], "absent", "--engine compat"),
        ([], "absent", "25.05"),
        (["setup.py"], "namespace", "a clone of the repository; install it"),
        (["text"], "namespace", "a folder without __init__.py"),
        (["../apex.py"], "impostor", "/apex.py"),
        (["__init__.py", "models.py"], "impostor", "pip uninstall apex"),
        (["__init__.py", "normalization/__init__.py"], "no_amp", "removed upstream in May 2025"),
    ],
)
def test_what_is_no_usable_apex_is_told_apart(tmp_path: Path, files: list[str], kind: str, reason: str) -> None:
    """Nothing, a clone, a bare folder, a script of the name, the other package of PyPI, and Apex without amp."""
    found = probe_apex([str(_package(tmp_path, *files))])
    assert (found.kind, found.has_amp) == (kind, False)
    assert reason in found.reason
    assert (found.path is None) == (not files)


def test_a_regular_package_wins_over_an_earlier_folder(tmp_path: Path) -> None:
    """Import takes a package on a later path before a bare folder on an earlier one, and so does the probe."""
    (tmp_path / "first" / "apex").mkdir(parents=True)
    later = _package(tmp_path / "second", "__init__.py", "amp/__init__.py")
    assert probe_apex([str(tmp_path / "first"), str(later)]).kind == "python_only"


@pytest.mark.parametrize(("kernels", "kind"), [(None, "python_only"), ("amp_C.cpython-311.so", "full")])
def test_usable_apex(tmp_path: Path, kernels: str | None, kind: str) -> None:
    _package(tmp_path, "__init__.py", "amp/__init__.py")
    if kernels:
        (tmp_path / kernels).write_bytes(b"")
    found = probe_apex([str(tmp_path)])
    assert (found.kind, found.has_amp, found.path) == (kind, True, tmp_path / "apex")


def test_version_is_that_of_the_folder_searched(tmp_path: Path) -> None:
    """The distribution beside the package tells the version, and the commit that pip wrote down."""
    _package(tmp_path, "__init__.py", "amp/__init__.py")
    info = tmp_path / "apex-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: apex\nVersion: 0.1\n")
    assert (probe_apex([str(tmp_path)]).version, probe_apex([str(tmp_path)]).commit) == ("0.1", None)
    (info / "direct_url.json").write_text('{"url": "x", "vcs_info": {"vcs": "git", "commit_id": "0123456789ab"}}')
    found = probe_apex([str(tmp_path)])
    assert found.commit == "0123456789ab"
    assert "0.1 (commit 01234567)" in found.reason


def test_editable_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Finder:
        __module__ = "__editable___apex_0_1_finder"

        @classmethod
        def find_spec(cls, name: str, path: object = None, target: object = None) -> object:
            origin = tmp_path / "apex" / "__init__.py"
            return importlib.util.spec_from_file_location(name, origin) if name == "apex" else None

    _package(tmp_path, "__init__.py", "amp/__init__.py")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    found = probe_apex()
    assert (found.kind, found.path) == ("python_only", tmp_path / "apex")
    assert "apex" not in sys.modules
