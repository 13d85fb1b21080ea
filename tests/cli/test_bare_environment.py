"""The commands in environments that hold little: the core alone, the core with `stats`, and next to an old torch."""

import importlib.metadata
import json
import runpy
import shutil
import subprocess
import venv
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import setuptools
from packaging.requirements import Requirement

from ampcompare.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "apex_digits" / "train.py"
TABLE = ROOT / "examples" / "gnmt.csv"
# Each command with words that make it do something, by the extra that it needs.
CORE = {
    "lint": ["lint", "train.py"],
    "migrate": ["migrate", "train.py"],
    "explain": ["explain", "O2"],
    "list": ["list"],
    "doctor": ["doctor"],
    "config": ["config", "show"],
    "shim": ["shim", "status"],
}
STATS = {
    "judge": ["judge", "gnmt.csv", "--margin", "0.5"],
    "report": ["report", "runs"],
    "export": ["export", "runs", "--to", "wandb"],
}
TORCH = {
    "run": ["run", "--arm", "O2"],
    "compare": ["compare"],
    "diagnose": ["diagnose"],
    "profile": ["profile"],
    "find-batch": ["find-batch", "--memory-limit", "1"],
    "floor": ["floor", "--", "train.py"],
    "replay": ["replay", "capsule.pt", "--change", "onednn=off"],
    "convert": ["convert", "last.pt", "--inspect"],
    "exec": ["exec", "train.py"],
}
EDITORS = {"lsp": ["lsp"]}
OTHER_WAYS = [  # that need torch
    ["run", "--", "train.py"],
    ["run", "--list-metrics", "--", "train.py"],
    ["compare", "--", "train.py"],
    ["compare", "--dry-run"],
    ["diagnose", "--ahead"],
    ["exec", "--arm", "O2", "train.py"],
    ["explain", "O2", "--arch", "mlp"],
    ["explain", "O2", "--", "train.py"],
    ["migrate", "--verify", "train.py"],
]
INSTALL = "pip install 'ampcompare[{}]'"
PYTHON = """
import ampcompare, sys
from ampcompare.errors import AmpCompareError, EnvironmentUnfit
for name, call in {
    "compare": lambda: ampcompare.compare(arms=["O2"]), "run": lambda: ampcompare.run(arm="O2"),
    "make_precision": lambda: ampcompare.make_precision("O2"), "Precision": lambda: ampcompare.Precision,
    "diagnose": lambda: ampcompare.diagnose(lambda precision: None), "profile": lambda: ampcompare.profile(print),
    "find_batch": lambda: ampcompare.find_batch(memory_limit=1), "look_ahead": lambda: ampcompare.look_ahead(),
    "convert": lambda: ampcompare.convert_checkpoint("a", "b", "native"),
    "apex": lambda: __import__("ampcompare.apex"), "holds": lambda: __import__("ampcompare.testing").testing.holds,
    "judge_table": lambda: ampcompare.judge_table("gnmt.csv", margin=0.5),
    "load_comparison": lambda: ampcompare.load_comparison("runs"),
}.items():
    try:
        call()
    except EnvironmentUnfit as error:
        assert error.exit_code == 4
        print(name, str(error).partition("ampcompare[")[2].partition("]")[0])
"""

# Runs commands one after another, and prints how each ended.
DRIVER = """
import contextlib, io, json, sys
from ampcompare.cli import main
results = []
for words in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(words)
    results.append((status, out.getvalue(), err.getvalue()))
print(json.dumps(results))
"""

Call = Callable[..., subprocess.CompletedProcess[str]]

pytestmark = pytest.mark.integration


def _files_of(names: Iterable[str]) -> set[Path]:
    """The files and folders in site-packages of distributions and of what they require."""
    waiting, seen, found = list(names), set(), set()
    while waiting:
        one = Requirement(waiting.pop())
        name = one.name.lower().replace("_", "-")
        if name in seen or (one.marker is not None and not one.marker.evaluate({"extra": ""})):
            continue
        seen.add(name)
        distribution = importlib.metadata.distribution(name)
        for file in distribution.files or ():
            if file.parts[0] not in ("..", "__pycache__"):
                found.add(Path(str(distribution.locate_file(file.parts[0]))))
        waiting += distribution.requires or []
    return found


def _call_in(folder: Path, requirements: Iterable[str]) -> Call:
    """Make an environment with this checkout and some distributions; return what runs a command in it."""
    venv.create(folder / "env", with_pip=False)
    (packages,) = (folder / "env").glob("lib/python*/site-packages")
    for file in _files_of(requirements):
        (packages / file.name).symlink_to(file)
    (packages / "checkout.pth").write_text(f"{ROOT}\n")
    for file in (SCRIPT, TABLE):
        shutil.copy(file, folder)
    (folder / "runs").mkdir()

    def call(*words: str, path: str = "") -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": "/usr/bin:/bin",
            "HOME": str(folder),
            "PYTHONPATH": path,
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        command = [str(folder / "env" / "bin" / "python"), *words]
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
        )

    return call


@pytest.fixture(scope="module")
def asked() -> dict[str, Any]:
    """The arguments of `setup`."""
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", found.update)
        runpy.run_path(str(ROOT / "setup.py"))
    return found


@pytest.fixture(scope="module")
def core(asked: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Call:
    return _call_in(tmp_path_factory.mktemp("core"), asked["install_requires"])


@pytest.fixture(scope="module")
def stats(asked: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Call:
    requirements = [*asked["install_requires"], *asked["extras_require"]["stats"]]
    return _call_in(tmp_path_factory.mktemp("stats"), requirements)


class Result(NamedTuple):
    """How a command ended."""

    status: int
    out: str
    err: str


def _run_all(call: Call, commands: Iterable[Sequence[str]], path: str = "") -> list[Result]:
    """Run commands after each other in one process, which must not have loaded what is missing."""
    done = call("-c", DRIVER, json.dumps(list(commands)), path=path)
    assert done.returncode == 0, done.stderr
    return [Result(*one) for one in json.loads(done.stdout)]


def _refused(result: Result, extra: str) -> None:
    """Check that a command ended with one line that says how to install an extra."""
    assert (result.status, result.out) == (4, ""), result
    (line,) = result.err.splitlines()
    assert line.startswith("ampcompare: ")
    assert line.endswith(INSTALL.format(extra))


def _did(command: str, result: Result) -> None:
    """Check that a command of the core has done what it is for."""
    assert result.status == (command == "lint"), result
    assert result.out
    assert "No module named" not in result.out + result.err


def test_every_command_has_a_place() -> None:
    assert CORE.keys() | STATS.keys() | TORCH.keys() | EDITORS.keys() == COMMANDS.keys()


@pytest.mark.slow
def test_the_core_alone(core: Call) -> None:
    """What it is for works, and the rest names its extra; each way of it that trains too."""
    commands = {**CORE, **STATS, **TORCH, **EDITORS}
    for command, result in zip(commands, _run_all(core, commands.values()), strict=True):
        if command in CORE:
            _did(command, result)
        else:
            _refused(result, "stats" if command in STATS else "lsp" if command in EDITORS else "torch")
    for words, result in zip(OTHER_WAYS, _run_all(core, OTHER_WAYS), strict=True):
        assert result.status == 4, words
        assert result.err.splitlines()[-1].endswith(INSTALL.format("torch")), words
    for result in _run_all(core, [[command, "--help"] for command in COMMANDS]):
        assert result.out.startswith("Usage: ")
        assert result.status == 0


def test_from_python_it_is_the_documented_error(core: Call) -> None:
    done = core("-c", PYTHON)
    assert done.returncode == 0, done.stderr
    found = dict(line.split() for line in done.stdout.splitlines())
    assert found.pop("judge_table") == found.pop("load_comparison") == "stats"
    assert len(found) == PYTHON.count("lambda:") + PYTHON.count("lambda precision") - 3
    assert set(found.values()) == {"torch"}


@pytest.mark.slow
def test_verdicts_need_numpy_and_scipy_alone(stats: Call) -> None:
    judged, reported, compared = _run_all(stats, [STATS["judge"], STATS["report"], TORCH["compare"]])
    assert (judged.status, "equivalent" in judged.out) == (0, True), judged
    assert (reported.status, "holds no records" in reported.err) == (2, True), reported
    _refused(compared, "torch")


def test_lint_and_migrate_need_click_alone(tmp_path: Path) -> None:
    linted, migrated = _run_all(_call_in(tmp_path, ["click"]), [CORE["lint"], CORE["migrate"]])
    assert (linted.status, "AMP301" in linted.out) == (1, True), linted
    assert (migrated.status, migrated.out.startswith("--- ")) == (0, True), migrated


@pytest.mark.slow
def test_next_to_an_old_torch(stats: Call, tmp_path: Path) -> None:
    """What does not train never imports it, except in a process of `doctor`; what trains says which it needs."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemError('this torch must not be imported')\n")
    (tmp_path / "torch" / "version.py").write_text("__version__ = '1.13.1+cu117'\n")
    commands = {**CORE, "judge": STATS["judge"], **TORCH}
    for command, result in zip(commands, _run_all(stats, commands.values(), str(tmp_path)), strict=True):
        if command in TORCH:
            (line,) = result.err.splitlines()
            assert result.status == 4
            assert "needs torch 2.6 or later, and 1.13.1+cu117 is installed: pip install -U torch" in line
        elif command == "doctor":
            assert result.status == 0
            assert "1.13.1" in next(
                line for line in result.out.splitlines() if line.startswith("  PROBLEM torch")
            )
        else:
            assert result.status == (command == "lint"), result
            assert "SystemError" not in result.out + result.err
    helped = _run_all(stats, [[command, "--help"] for command in COMMANDS], str(tmp_path))
    assert {result.status for result in helped} == {0}


def test_the_core_is_small(asked: dict[str, Any]) -> None:
    """Fewer than 50 MB with all that it requires, this package included."""
    size = 0
    for top in {*_files_of(asked["install_requires"]), ROOT / "ampcompare"}:
        for file in [top] if top.is_file() else top.rglob("*"):
            size += file.stat().st_size if file.is_file() and "__pycache__" not in file.parts else 0
    assert 5e6 < size < 50e6
