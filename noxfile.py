"""The versions that ampcompare claims, each in an environment of its own: `scripts/test-versions` runs them."""

from __future__ import annotations

import glob
import os
import shutil
import sys

import nox

# Python, torch and torchvision. docs/versions.md says what each pair is for, and what ran.
PAIRS = {
    "lowest": ("3.11", "2.6.0", "0.21.0"),
    "between": ("3.13", "2.8.0", "0.23.0"),
    "gpu-machine": ("3.12", "2.11.0", "0.26.0"),
    "newest": ("3.14", "2.13.0", "0.28.0"),
    "newest-torch": ("3.11", "2.14.1", "0.29.1"),
}
# Python and torch of stacks in which the recorder runs, which ampcompare itself cannot.
STACKS = {
    "oldest-stack": ("3.7", "1.8.1"),
    "old-stack": ("3.8", "1.13.1"),
    "middle-stack": ("3.10", "2.1.2"),
}
RECORDER = "tests/script/recording/test_portable_recorder.py"
SMOKE = "tests/cli/test_every_command.py"
GIGABYTES = 6  # of an environment, with the CUDA libraries of torch

nox.options.reuse_venv = "yes"
nox.options.default_venv_backend = "virtualenv"  # a `uv` on the path would not read the settings of pip


def interpreter(version: str) -> str:
    """Return a Python of this version: on the path, or one that pyenv keeps; else its name, which nox reports."""
    root = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
    kept = sorted(glob.glob(f"{root}/versions/{version}.*/bin/python"))
    found = shutil.which(f"python{version}")
    return kept[-1] if kept else found or version


def make_session(name: str) -> None:
    """Register the session of a pair: install it, then run the unit tests and every command."""
    python, torch, torchvision = PAIRS[name]
    lowest = ["-c", "constraints/lowest.txt"]
    pins = lowest if name == "lowest" else [f"torch=={torch}", f"torchvision=={torchvision}"]

    @nox.session(name=name, python=interpreter(python))
    def test(session: nox.Session) -> None:
        free = shutil.disk_usage(".").free / 1e9
        if free < GIGABYTES and not glob.glob(
            f"{session.virtualenv.location}/lib/python*/site-packages/torch"
        ):
            session.error(
                f"{free:.1f} GB are free here, and an environment takes {GIGABYTES} GB: free some space"
            )
        session.install("-e", ".[torch,html,test]", *pins)
        session.env.update(OMP_NUM_THREADS="1")
        pytest = ["python", "-m", "pytest", "-n", "2", "-q", "-p", "no:cacheprovider"]
        session.run(*pytest, "--unit", "--dist", "worksteal", *session.posargs)
        session.run(*pytest, SMOKE, *session.posargs)


def make_stack_session(name: str) -> None:
    """Register the session of a stack: install its torch alone, then test the recorder there from the Python of nox."""
    python, torch = STACKS[name]

    # virtualenv knows no Python that old
    @nox.session(name=name, python=interpreter(python), venv_backend="venv")
    def test(session: nox.Session) -> None:
        session.install(f"torch=={torch}", "numpy<2")
        there = f"{session.virtualenv.bin}/python"
        words = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", RECORDER]
        session.run(*words, *session.posargs, external=True, env={"AMPCOMPARE_STACK_PYTHON": there})


for pair in PAIRS:
    make_session(pair)
for stack in STACKS:
    make_stack_session(stack)
