"""`docker/check_apex.py` on packages made for it: what passes, and each way to fail with its reason."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "docker" / "check_apex.py"
STANDIN = Path(__file__).parent / "standin"
REMEDY = "take a BASE_IMAGE that ships Apex with apex.amp"


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A folder of packages that holds the stand-in for Apex and its kernels."""
    folder = tmp_path / "packages"
    shutil.copytree(STANDIN, folder, ignore=shutil.ignore_patterns("Dockerfile", "__pycache__"))
    return folder


def check(packages: Path) -> subprocess.CompletedProcess[str]:
    """Run the script with these packages alone on the path."""
    environment = {**os.environ, "PYTHONPATH": str(packages)}
    return subprocess.run(
        [sys.executable, "-S", str(SCRIPT)],
        env=environment,
        cwd=packages.parent,
        capture_output=True,
        text=True,
        check=False,
    )


def refusal(packages: Path) -> str:
    """Return the reason for which the script refuses them."""
    done = check(packages)
    assert done.returncode == 1
    assert done.stdout == ""
    assert REMEDY in done.stderr
    return done.stderr


def test_apex_with_amp_passes(packages: Path) -> None:
    """A package with every name and kernel passes, by being imported."""
    done = check(packages)
    assert (done.returncode, done.stderr) == (0, "")
    assert "has apex.amp: 17 names imported; kernels amp_C" in done.stdout


def test_missing_names_are_named(packages: Path) -> None:
    """Without functions of `apex.amp` that ampcompare calls, the check fails and names each."""
    file = packages / "apex" / "amp" / "__init__.py"
    names = ["initialize", "load_state_dict", "master_params", "scale_loss", "state_dict"]
    for name in names:
        file.write_text(file.read_text().replace(f"\n{name} = None", ""))
    assert f"lacks {', '.join(f'apex.amp.{name}' for name in names)}:" in refusal(packages)


def test_apex_after_may_2025(packages: Path) -> None:
    """NVIDIA's package without the folder amp is told apart, with the date."""
    shutil.rmtree(packages / "apex" / "amp")
    assert "has no apex.amp, which upstream removed in May 2025" in refusal(packages)


def test_import_that_fails(packages: Path) -> None:
    """An installation that does not import is refused with its own last line."""
    (packages / "apex" / "__init__.py").write_text("raise ImportError('undefined symbol: _ZN3c10')\n")
    assert "ImportError: undefined symbol: _ZN3c10" in refusal(packages)


def test_build_without_driver(packages: Path) -> None:
    """Where importing stops at the missing driver, the sources are read instead, and the line says so."""
    crash = "raise ImportError('libcuda.so.1: cannot open shared object file')\n"
    (packages / "apex" / "__init__.py").write_text(crash)
    with_names = (
        "from .frontend import initialize, load_state_dict, state_dict\nfrom .x import "
        "_amp_state, master_params\n"
    )
    file = packages / "apex" / "amp" / "__init__.py"
    file.write_text(f"{with_names}class scale_loss: pass\ndef disable_casts(): pass\n_amp_state = 1\n")
    for module in ("normalization", "optimizers", "parallel"):
        source = packages / "apex" / module / "__init__.py"
        names = [line.partition(" = ")[0] for line in source.read_text().splitlines() if " = None" in line]
        source.write_text("".join(f"from .somewhere import {name}\n" for name in names))
    done = check(packages)
    assert done.returncode == 0, done.stderr
    assert "read from its sources" in done.stdout
    file.write_text(f"{with_names}_amp_state = 1\n")
    assert "lacks apex.amp.disable_casts, apex.amp.scale_loss" in refusal(packages)
