"""Apex by files alone, what torch lacks, entry points, versions that are too old, and this machine's fingerprint."""

import ast
import glob
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ampcompare
from ampcompare.apex import is_strict_by_environment
from ampcompare.base.environment import gpus
from ampcompare.base.environment.apex import find_installed_apex
from ampcompare.base.environment.fingerprint import environment_fingerprint
from ampcompare.base.environment.gpus import why_no_accelerator
from ampcompare.base.environment.oldest import require_supported_python
from ampcompare.base.environment.packages import (
    distributions_of_modules,
    entry_points,
    installed_version,
    is_in_site_folder,
)
from ampcompare.base.environment.variables import APEX_STRICT

OLDEST = "base/environment/oldest.py"
# Those that pyenv keeps here.
ROOT_OF_PYENV = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
OLD_PYTHONS = sorted(
    path for minor in range(6, 11) for path in glob.glob(f"{ROOT_OF_PYENV}/versions/3.{minor}.*/bin/python")
)


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
def test_what_is_no_usable_apex_is_told_apart(
    tmp_path: Path, files: list[str], kind: str, reason: str
) -> None:
    """Nothing, a clone, a bare folder, a script of the name, the other package of PyPI, and Apex without amp."""
    found = find_installed_apex([str(_package(tmp_path, *files))])
    assert (found.kind, found.has_amp) == (kind, False)
    assert reason in found.reason
    assert (found.path is None) == (not files)


def test_a_regular_package_wins_over_an_earlier_folder(tmp_path: Path) -> None:
    """Import takes a package on a later path before a bare folder on an earlier one, and so does the probe."""
    (tmp_path / "first" / "apex").mkdir(parents=True)
    later = _package(tmp_path / "second", "__init__.py", "amp/__init__.py")
    assert find_installed_apex([str(tmp_path / "first"), str(later)]).kind == "python_only"


@pytest.mark.parametrize(("kernels", "kind"), [(None, "python_only"), ("amp_C.cpython-311.so", "full")])
def test_usable_apex(tmp_path: Path, kernels: str | None, kind: str) -> None:
    _package(tmp_path, "__init__.py", "amp/__init__.py")
    if kernels:
        (tmp_path / kernels).write_bytes(b"")
    found = find_installed_apex([str(tmp_path)])
    assert (found.kind, found.has_amp, found.path) == (kind, True, tmp_path / "apex")


def test_version_is_that_of_the_folder_searched(tmp_path: Path) -> None:
    """The distribution beside the package tells the version, and the commit that pip wrote down."""
    _package(tmp_path, "__init__.py", "amp/__init__.py")
    info = tmp_path / "apex-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: apex\nVersion: 0.1\n")
    assert (find_installed_apex([str(tmp_path)]).version, find_installed_apex([str(tmp_path)]).commit) == (
        "0.1",
        None,
    )
    (info / "direct_url.json").write_text(
        '{"url": "x", "vcs_info": {"vcs": "git", "commit_id": "0123456789ab"}}'
    )
    found = find_installed_apex([str(tmp_path)])
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
    found = find_installed_apex()
    assert (found.kind, found.path) == ("python_only", tmp_path / "apex")
    assert "apex" not in sys.modules


def test_what_the_machine_or_the_build_rules_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metal needs a Mac, XPU a build for it."""
    assert why_no_accelerator("mps", platform="linux") == "this is not a Mac"
    assert why_no_accelerator("mps", platform="darwin") == ""
    for build, why in (
        ({"cuda": None, "xpu": None}, "this torch is built without XPU"),
        ({"xpu": "2025"}, ""),
        (None, ""),
    ):
        monkeypatch.setattr(gpus, "platform_versions_of_torch", lambda build=build: build)
        assert why_no_accelerator("xpu") == why


def install(folder: Path, name: str) -> None:
    """Leave the metadata of a package that registers its name."""
    metadata = folder / f"{name}-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Name: {name}\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[some.group]\n{name} = {name}:made\n")


def test_what_is_installed_later_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder that joins the path, and in one that is there already."""
    monkeypatch.syspath_prepend(tmp_path)
    assert entry_points("some.group") == []
    assert installed_version("one") is None
    install(tmp_path, "one")
    assert installed_version("one") == "1"
    assert [entry.value for entry in entry_points("some.group")] == ["one:made"]
    (tmp_path / "more").mkdir()
    install(tmp_path / "more", "two")
    monkeypatch.syspath_prepend(tmp_path / "more")
    assert {entry.name for entry in entry_points("some.group")} == {"one", "two"}
    assert entry_points("another.group") == []


def test_a_module_leads_to_the_distribution_that_installed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `importlib.metadata` maps them; also from a list of names, and to a module that is compiled."""
    known = importlib.metadata.packages_distributions()
    assert distributions_of_modules(["yaml", "numpy"]) == {*known["yaml"], *known["numpy"]}
    assert distributions_of_modules(known) == {one for names in known.values() for one in names}
    for name, file, text in (
        ("a", "RECORD", "fast.cpython-311-x86_64-linux-gnu.so,,\n"),
        ("b", "top_level.txt", "fast\n"),
    ):
        (tmp_path / f"{name}-1.dist-info").mkdir()
        (tmp_path / f"{name}-1.dist-info" / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n"
        )
        (tmp_path / f"{name}-1.dist-info" / file).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert distributions_of_modules(["fast", "fas"]) == {"a", "b"}


def test_an_old_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command ends with its line and exit code 4, and an import fails."""
    monkeypatch.setattr(sys, "version_info", (3, 9, 18, "final", 0))
    monkeypatch.setattr(sys, "argv", ["train.py"])
    with pytest.raises(ImportError, match=r"needs Python 3\.\d+ or later, and this is 3\.9\.18"):
        require_supported_python()
    monkeypatch.setattr(sys, "argv", ["/usr/bin/ampcompare", "lint"])
    with pytest.raises(SystemExit) as ended:
        require_supported_python()
    assert ended.value.code == 4


def test_an_old_python_can_read_what_refuses_it() -> None:
    """The files up to the refusal have the syntax of Python 3.6, and no annotation that it cannot evaluate."""
    for name in (
        "__init__.py",
        "base/__init__.py",
        "base/version.py",
        "base/environment/__init__.py",
        OLDEST,
    ):
        text = (Path(ampcompare.__file__).parent / name).read_text(encoding="utf-8")
        tree = ast.parse(text, feature_version=(3, 6))
        nodes = list(ast.walk(tree))
        futures = [one for one in nodes if isinstance(one, ast.ImportFrom) and one.module == "__future__"]
        generic = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "tuple"
        ]
        assert (futures, generic) == ([], []), name


@pytest.mark.integration
@pytest.mark.parametrize("python", OLD_PYTHONS)
def test_an_old_python_says_so(python: str, tmp_path: Path) -> None:
    """As a module and as the command that pip makes; an import fails."""
    command = tmp_path / "ampcompare"
    command.write_text("import sys\nfrom ampcompare.cli import main\nsys.exit(main())\n")
    environment = {"PYTHONPATH": str(Path(ampcompare.__file__).parents[1]), "PATH": os.environ["PATH"]}
    for words in (["-m", "ampcompare", "lint", "."], [str(command), "--help"]):
        done = subprocess.run(
            [python, *words], env=environment, stderr=subprocess.PIPE, timeout=60, check=False
        )
        (line,) = done.stderr.decode().splitlines()
        assert done.returncode == 4
        assert re.fullmatch(
            r"ampcompare: .* needs Python 3\.11 or later, and this is 3\.\d+\.\d+: take .*", line
        )
    done = subprocess.run(
        [python, "-c", "import ampcompare"], env=environment, stderr=subprocess.PIPE, check=False
    )
    assert done.stderr.decode().splitlines()[-1].startswith("ImportError: ampcompare ")


def test_folders_into_which_packages_are_installed() -> None:
    """Those of pip and of Debian, in any environment; a user's folder that only begins so is none."""
    assert is_in_site_folder("/usr/lib/python3/dist-packages/apex/amp.py")
    assert is_in_site_folder("/envs/a/lib/python3.11/site-packages/timm/layers.py")
    assert not is_in_site_folder("/home/me/site-packages-old/train.py")
    assert not is_in_site_folder("/home/me/train.py")


@pytest.mark.parametrize(
    ("text", "strict"), [("1", True), (" Yes", True), ("0", False), ("", False), ("2", False)]
)
def test_one_answer_to_the_defects_of_apex(monkeypatch: pytest.MonkeyPatch, text: str, strict: bool) -> None:
    """What a record says is what the engine does."""
    monkeypatch.setenv(APEX_STRICT, text)
    assert is_strict_by_environment() is strict
    assert (APEX_STRICT in environment_fingerprint()) is strict
