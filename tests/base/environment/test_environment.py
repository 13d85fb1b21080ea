"""What stands under the name apex, told by files alone, and the fingerprint of this machine."""

from __future__ import annotations

import importlib.util
import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from ampcompare import __version__
from ampcompare.base.environment.apex import probe_apex
from ampcompare.base.environment.fingerprint import fingerprint
from ampcompare.base.environment.packages import installed_version


def _package(folder: Path, *files: str) -> Path:
    for file in files:
        path = folder / "apex" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise SystemError('probing must not import this')")
    return folder


def test_absent(tmp_path: Path) -> None:
    """Nothing there is said with both remedies."""
    found = probe_apex([str(tmp_path)])
    assert (found.kind, found.has_amp, found.path) == ("absent", False, None)
    assert "--engine compat" in found.reason
    assert "25.05" in found.reason


def test_clone_without_installation(tmp_path: Path) -> None:
    """A clone of the repository beside the script is no installation."""
    found = probe_apex([str(_package(tmp_path, "setup.py"))])
    assert (found.kind, found.has_amp) == ("namespace", False)
    assert "a clone of the repository; install it" in found.reason


def test_empty_folder_of_the_name(tmp_path: Path) -> None:
    """A folder without `__init__.py` is told apart from a package."""
    (tmp_path / "apex").mkdir()
    assert "a folder without __init__.py" in probe_apex([str(tmp_path)]).reason


def test_a_regular_package_wins_over_an_earlier_folder(tmp_path: Path) -> None:
    """Import takes a package on a later path before a bare folder on an earlier one, and so does the probe."""
    (tmp_path / "first" / "apex").mkdir(parents=True)
    later = _package(tmp_path / "second", "__init__.py", "amp/__init__.py")
    assert probe_apex([str(tmp_path / "first"), str(later)]).kind == "python_only"


def test_a_file_of_the_name(tmp_path: Path) -> None:
    """A script called apex.py hides the real package, and is named."""
    (tmp_path / "apex.py").write_text("")
    found = probe_apex([str(tmp_path)])
    assert (found.kind, found.has_amp) == ("impostor", False)
    assert str(tmp_path / "apex.py") in found.reason


def test_the_unrelated_package_of_pypi(tmp_path: Path) -> None:
    """A package without any part of NVIDIA's is the other one, to be uninstalled."""
    found = probe_apex([str(_package(tmp_path, "__init__.py", "models.py"))])
    assert (found.kind, found.has_amp) == ("impostor", False)
    assert "pip uninstall apex" in found.reason


def test_nvidia_apex_after_amp_was_removed(tmp_path: Path) -> None:
    """An Apex of after May 2025 is recognized, with the tag that still has amp."""
    found = probe_apex([str(_package(tmp_path, "__init__.py", "normalization/__init__.py"))])
    assert (found.kind, found.has_amp) == ("no_amp", False)
    assert "removed upstream in May 2025" in found.reason


@pytest.mark.parametrize(("kernels", "kind"), [(None, "python_only"), ("amp_C.cpython-311.so", "full")])
def test_usable_apex(tmp_path: Path, kernels: str | None, kind: str) -> None:
    """An Apex with amp is usable, and it is said whether its kernels are compiled."""
    _package(tmp_path, "__init__.py", "amp/__init__.py")
    if kernels:
        (tmp_path / kernels).write_bytes(b"")
    found = probe_apex([str(tmp_path)])
    assert (found.kind, found.has_amp, found.path) == (kind, True, tmp_path / "apex")


def test_version_of_a_distribution() -> None:
    """A version is that of the installed distribution, or None."""
    assert installed_version("pytest") == pytest.__version__
    assert installed_version("no-such-distribution-here") is None


def test_fingerprint_is_what_results_depend_on() -> None:
    """Versions and processor are plain JSON, and equal from call to call."""
    seen = fingerprint()
    assert seen["ampcompare"] == __version__
    assert seen["python"] == platform.python_version()
    assert seen["torch"] == installed_version("torch")
    assert seen["processor"]
    assert json.loads(json.dumps(seen)) == fingerprint()


def test_nothing_is_imported_to_find_out() -> None:
    """Probe and fingerprint run without torch, numpy or apex being imported."""
    code = (
        "import sys; from ampcompare.base.environment.apex import probe_apex; "
        "from ampcompare.base.environment.fingerprint import fingerprint; fingerprint(); probe_apex();"
        "print(*{'torch', 'numpy', 'apex'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


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


@pytest.mark.parametrize("text", ["", "not json", "[]", '{"vcs_info": null}', '{"vcs_info": {"commit_id": 3}}'])
def test_odd_metadata_is_no_commit(tmp_path: Path, text: str) -> None:
    """What pip left half written or in another form is not a commit, and no error."""
    _package(tmp_path, "__init__.py", "amp/__init__.py")
    info = tmp_path / "apex-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: apex\nVersion: 0.1\n")
    (info / "direct_url.json").write_text(text)
    assert probe_apex([str(tmp_path)]).commit is None


def test_editable_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An editable installation is on no folder of the path, and is found without being imported."""

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
