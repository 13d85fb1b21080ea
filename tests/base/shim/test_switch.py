"""`shim on` and `off`: two files, and a site-packages that is afterwards what it was before, to the byte."""

import hashlib
import os
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from ampcompare.base.errors import ConfigError, EnvironmentUnfit, ExtraMissing
from ampcompare.base.shim import switch
from ampcompare.base.shim.switch import MODULE, STARTS, shim_status, switch_shim_off, switch_shim_on

ROOT = Path(__file__).resolve().parents[3]
NEW = (
    "apex/__init__.py",
    "apex/normalization/__init__.py",
    "apex/contrib/__init__.py",
    "apex/optimizers/__init__.py",
)
OLD = (*NEW, "apex/amp/__init__.py", "apex/parallel/__init__.py", "apex/fp16_utils/__init__.py")
GRAFTED = ("apex.amp", "apex.fp16_utils", "apex.parallel")
# The files of each kind of Apex, and what the shim adds; None where it refuses.
KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...] | None]] = {
    "none": ((), ("apex",)),
    "NVIDIA's of today": ((*NEW, "amp_C.cpython-0.so"), GRAFTED),
    "NVIDIA's of today, Python only": (NEW, GRAFTED),
    "with amp, without parallel": ((*NEW, "apex/amp/__init__.py"), ()),
    "25.05": ((*OLD, "amp_C.cpython-0.so"), ()),
    "25.05, Python only": (OLD, ()),
    "ROCm's": ((*OLD, "apex/amp/frontend.py", "apex/op_builder/__init__.py"), ()),
    "PyPI's": (("apex/__init__.py", "apex/models.py"), None),
    "a clone": (("apex/setup.py", "apex/apex/__init__.py"), ("apex",)),
    "a file": (("apex.py",), None),
}


def _tree(folder: Path) -> dict[str, str]:
    """Every file and folder below one, with the digest of what it holds and its mode."""
    return {
        str(path.relative_to(folder)): f"{path.stat().st_mode}"
        + (hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "")
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages, first on the path."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_off_restores_each_kind_to_the_byte(packages: Path, kind: str) -> None:
    """Only what is missing is added, and where nothing is, nothing is written."""
    files, adds = KINDS[kind]
    for name in (*files, "other.py"):
        (packages / name).parent.mkdir(parents=True, exist_ok=True)
        (packages / name).write_text("")
    before = _tree(packages)
    if adds is None:
        with pytest.raises(EnvironmentUnfit, match="not NVIDIA's"):
            switch_shim_on(folder=packages)
        assert _tree(packages) == before
        return
    status = switch_shim_on(folder=packages)
    assert (status.on, status.adds) == (bool(adds), adds)
    added = {name: text for name, text in _tree(packages).items() if before.get(name) != text}
    assert set(added) == ({STARTS, MODULE} if adds else set())
    assert switch_shim_on(["mmcv"], packages).answered == (("mmcv",) if adds else ())
    assert not switch_shim_off(packages).on
    assert _tree(packages) == before
    assert not switch_shim_off(packages).on


def test_what_cannot_be_switched_on(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no-module"):
        switch_shim_on(["no-module"], packages)
    monkeypatch.setattr(
        switch, "write_atomically", lambda path, text: (_ for _ in ()).throw(EnvironmentUnfit("full"))
    )
    with pytest.raises(EnvironmentUnfit):
        switch_shim_on(folder=packages)
    monkeypatch.setattr(
        switch, "require_torch", lambda **_: (_ for _ in ()).throw(ExtraMissing("install ampcompare[torch]"))
    )
    with pytest.raises(ExtraMissing):
        switch_shim_on(folder=packages)
    assert not _tree(packages)
    assert not shim_status(packages).on


@pytest.mark.integration
def test_the_command_in_an_environment(tmp_path: Path) -> None:
    """New processes have it from `on` to `off`; without ampcompare they start as ever, and no bytecode is left."""
    venv.create(tmp_path / "env", with_pip=False)
    (packages,) = (tmp_path / "env").glob("lib/python*/site-packages")
    (packages / "checkout.pth").write_text(
        f"{ROOT}\n{next(path for path in sys.path if path.endswith('site-packages'))}\n"
    )
    before = _tree(packages)
    run = _runner(tmp_path)
    assert run("-m", "ampcompare", "shim", "on", "--for", "mmcv").returncode == 0
    imports = "import apex, importlib.util as u, sys; print(apex.__name__, u.find_spec('apex'), 'torch' in sys.modules)"
    assert run("-c", imports).stdout == "ampcompare.apex None False\n"
    said = run("-m", "ampcompare", "shim", "status").stdout
    assert said.startswith(f"shim: on in {packages}\n")
    assert "also of mmcv" in said
    (packages / "checkout.pth").unlink()
    alone = run("-c", "import apex")
    assert (alone.returncode, alone.stderr.splitlines()[-1]) == (
        1,
        "ModuleNotFoundError: No module named 'apex'",
    )
    assert len(run("-c", "pass").stderr) == 0
    (packages / "checkout.pth").write_text(
        f"{ROOT}\n{next(path for path in sys.path if path.endswith('site-packages'))}\n"
    )
    assert run("-m", "ampcompare", "shim", "off").returncode == 0
    assert _tree(packages) == before
    assert run("-c", "import apex").returncode == 1
    assert run("-m", "ampcompare", "shim", "status", "--for", "x").returncode == 2


def _runner(folder: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [str(folder / "env" / "bin" / "python"), *words]
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
        )

    return run
