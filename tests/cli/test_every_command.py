"""Every command as users start it, once: what `scripts/test-versions` runs with each pair of versions."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ampcompare.cli import COMMANDS

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = ["--device", "cpu", "--epochs", "1", "--max-steps", "3", "--arch", "mlp"]
CALLS = {
    "run": ["--arm", "half", *SMALL, "-o", "runs/run"],
    "compare": ["--arm", "fp32,O2,bf16", *SMALL, "--seeds", "0-1", "-o", "runs/compare"],
    "judge": ["--example"],
    "floor": ["--steps", "2", "-o", "floor.json", "--", str(EXAMPLES / "plain.py")],
    "replay": ["capsule.pt", "--change", "onednn=off"],
    "report": ["runs/compare"],
    "export": ["runs/compare", "--to", "tensorboard"],
    "convert": ["--help"],
    "migrate": [str(EXAMPLES / "apex_digits" / "train.py")],
    "exec": [
        "--device",
        "cpu",
        "--",
        str(EXAMPLES / "apex_digits" / "train.py"),
        "--device",
        "cpu",
        "--epochs",
        "1",
    ],
    "lint": [str(EXAMPLES / "plain.py")],
    "doctor": [],
    "diagnose": ["--arm", "half", "--device", "cpu", "--steps", "2", "--no-cures"],
    "profile": ["--arm", "fp32,bf16", "--device", "cpu", "--steps", "2", "--no-trials"],
    "find-batch": ["--arm", "fp32", "--device", "cpu", "--memory-limit", "1", "-b", "2"],
    "explain": ["O2"],
    "shim": ["status"],
    "lsp": ["--help"],  # it would wait for an editor
    "list": ["all"],
    "config": ["show", "--origin"],
}
IN_OTHER_TESTS = ("compare", "convert", "export", "replay", "report")
ARMS = ["O1", "half:bf16", "amp"]  # `compare` trains fp32, O2 and bf16, in a script too
# A deprecation of torch fails a command; that of `apex.amp` is ampcompare's own.
WARNINGS = ["-W", "error::FutureWarning", "-W", "ignore:apex.amp was removed:FutureWarning"]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all commands."""
    return tmp_path_factory.mktemp("commands")


@pytest.fixture(scope="module")
def compared(folder: Path) -> Path:
    """The folder with a comparison in it."""
    start("compare", folder)
    return folder


def start(name: str, folder: Path, *words: str) -> str:
    """Run a command, which must succeed, and return what it prints."""
    command = [sys.executable, *WARNINGS, "-m", "ampcompare", name, *(words or CALLS[name])]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=600)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", [name for name in CALLS if name not in IN_OTHER_TESTS])
def test_a_command(folder: Path, name: str) -> None:
    assert start(name, folder)


def test_the_comparison_has_a_headline(compared: Path) -> None:
    """Both other arms have a verdict, whatever it is."""
    text = (compared / "runs" / "compare" / "report.md").read_text(encoding="utf-8")
    assert len(re.findall(r"apex:O2|native:bf16", text)) >= 2


def test_report(compared: Path) -> None:
    """The comparison is shown again."""
    assert start("report", compared)


def test_export(compared: Path) -> None:
    pytest.importorskip("tensorboard")
    start("export", compared)


def test_replay(folder: Path) -> None:
    """A step that was kept is the same with other kernels."""
    start("exec", folder, "--capsule", "2", str(EXAMPLES / "plain.py"))
    assert start("replay", folder).count("noise") >= 1


def test_convert(folder: Path) -> None:
    """A checkpoint that an Apex script would save becomes one of torch.amp."""
    start(
        "run",
        folder,
        "--arm",
        "O2",
        *SMALL,
        "-o",
        "runs/apex",
        "--save-every-epochs",
        "1",
        "--save-apex-format",
    )
    (saved,) = (folder / "runs" / "apex").rglob("apex*.pt")
    start("convert", folder, str(saved), "amp.pt", "--to", "native")


@pytest.mark.parametrize("arm", ARMS)
def test_exec_under_an_arm(folder: Path, arm: str) -> None:
    """An Apex script trains under each kind of arm."""
    start("exec", folder, "--arm", arm, *CALLS["exec"])


def test_compare_a_plain_script(folder: Path) -> None:
    """A script without mixed precision trains under arms too."""
    words = ["--device", "cpu", "--arm", "fp32,O2,bf16", "--seeds", "0", "-o", "runs/plain"]
    start("compare", folder, *words, "--", str(EXAMPLES / "plain.py"))


def test_no_command_is_left_out() -> None:
    assert set(CALLS) == set(COMMANDS)
