"""Files of the working directory that have the names of libraries."""

import subprocess
import sys
from pathlib import Path

import pytest

from ampcompare.base.processes.start import environment_without_working_directory, module_command

NAMES = (
    *("json", "typing", "dataclasses", "logging", "random"),
    *("queue", "socket", "statistics", "tempfile", "uuid"),
    *("torch", "numpy", "torchvision", "sklearn", "click"),
    *("pydantic", "yaml", "rich", "psutil", "tabulate", "xxhash"),
    *("pynvml", "apex", "amp_C", "triton", "sitecustomize", "PIL", "safetensors", "numba"),
)
# `python -m` itself imports these before any code of this package runs.
OF_RUNPY = ("runpy", "types", "functools", "collections", "contextlib", "warnings", "pkgutil")
TINY = [
    *("--data", "synthetic", "--train-size", "32", "--val-size", "16", "--image-size", "8", "--epochs", "1"),
    *("--batch-size", "8", "--device", "cpu", "--arch", "mlp"),
]
BY_MODULE = [sys.executable, "-m", "ampcompare"]
BY_SCRIPT = module_command("ampcompare")


def set_traps(folder: Path) -> None:
    """Let every import of a name of a library leave a trace there, except those that `python -m` itself imports."""
    for name in NAMES:
        (folder / f"{name}.py").write_text(
            f"open('SPRUNG', 'a').write({name!r} + ' ')\nraise SystemExit(99)\n"
        )


def trapped_environment() -> dict[str, str]:
    """Return an environment in which Python puts the working directory first."""
    environment = environment_without_working_directory()
    del environment["PYTHONSAFEPATH"]
    return environment


@pytest.fixture
def trapped(tmp_path: Path) -> Path:
    """A folder with traps."""
    folder = tmp_path / "trapped"
    folder.mkdir()
    set_traps(folder)
    return folder


def trap_runpy(folder: Path) -> None:
    """Put traps there for what `python -m` would import first, which a start by script must pass too."""
    for name in OF_RUNPY:
        (folder / f"{name}.py").write_text((folder / "json.py").read_text())


def start(command: list[str], words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    options = {"cwd": folder, "timeout": 300, "env": trapped_environment()}
    return subprocess.run([*command, *words], capture_output=True, text=True, check=False, **options)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (BY_MODULE, ["list"]),
        pytest.param(
            BY_SCRIPT,
            ["run", *TINY, "-o", "out", "--nproc-per-node", "2", "--launcher", "torchrun"],
            marks=[pytest.mark.slow, pytest.mark.extended],
        ),
        pytest.param(BY_MODULE, ["doctor"], marks=[pytest.mark.slow, pytest.mark.extended]),
        pytest.param(BY_MODULE, ["explain", "apex:O1", "--arch", "mlp"], marks=pytest.mark.slow),
    ],
)
def test_no_file_of_the_working_directory_is_taken_for_a_library(
    trapped: Path, command: list[str], words: list[str]
) -> None:
    """No command, and no process that it starts, imports one of them; for ranks see where they end with a command."""
    if command is BY_SCRIPT:
        trap_runpy(trapped)
    done = start(command, words, trapped)
    assert not (trapped / "SPRUNG").exists(), (trapped / "SPRUNG").read_text()
    assert done.returncode == 0 or words == ["doctor"], done.stderr  # whose verdict is that of the machine
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_factory_of_the_working_directory_and_its_neighbor(trapped: Path) -> None:
    """In a comparison a factory there is found, imports its neighbors also when called, and gets the libraries."""
    trap_runpy(trapped)
    (trapped / "mymodel.py").write_text(
        "import json, torch\n"
        "assert json.dumps\n"
        "def make(num_classes, sample_shape):\n"
        "    from neighbor import size\n"
        "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(size(sample_shape), num_classes))\n"
    )
    (trapped / "neighbor.py").write_text("import math\ndef size(shape): return math.prod(shape)\n")
    words = ["compare", "--seeds", "0", *TINY[:-2], "--arch", "mymodel:make", "--arm", "apex:O2", "-o", "out"]
    done = start(BY_SCRIPT, words, trapped)
    assert not (trapped / "SPRUNG").exists(), (trapped / "SPRUNG").read_text()
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
