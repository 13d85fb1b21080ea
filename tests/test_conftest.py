"""What `conftest.py` does to tests: groups and reruns of pytest-xdist, GPUs that are hidden, what tests require."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

TESTS = """
import os
import time
from pathlib import Path
import pytest

@pytest.fixture(autouse=True)
def both():
    "Wait until each of the two processes has a test."
    Path(f"ran-{os.getpid()}").touch()
    deadline = time.monotonic() + 60
    while len(list(Path.cwd().glob("ran-*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)

@pytest.fixture(scope="module")
def costly():
    Path(f"made-{os.getpid()}").touch()

@pytest.mark.parametrize("number", range(4))
def test_with(number, costly):
    pass

@pytest.mark.parametrize("number", range(4))
def test_without(number):
    pass

def fails_at_first(name):
    path = Path(name)
    known = path.exists()
    path.touch()
    assert known

@pytest.mark.integration
def test_waits():
    fails_at_first("waits")

@pytest.mark.slow
def test_never_passes():
    assert False

def test_is_not_repeated():
    fails_at_first("computes")
"""


@pytest.fixture
def conftest(request: pytest.FixtureRequest) -> Any:
    """The module."""
    return request.config.pluginmanager.get_plugin(str(request.config.rootpath / "tests" / "conftest.py"))


@pytest.mark.integration
def test_groups_and_reruns(tmp_path: Path) -> None:
    """A fixture of a module is made in one process; what waits for others runs once more where it fails."""
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_both.py").write_text(TESTS)
    plugins = ["-p", "xdist", "-p", "rerunfailures"]
    command = [sys.executable, "-m", "pytest", *plugins, "-q", "-raR", "-n", "2", "--dist", "loadgroup"]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # each plugin is imported in three processes
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert len(list(tmp_path.glob("made-*"))) == 1
    assert len(list(tmp_path.glob("ran-*"))) == 2
    assert "RERUN test_both.py::test_waits" in done.stdout
    assert "2 failed, 9 passed" in done.stdout
    assert "2 rerun" in done.stdout
    assert done.returncode == 1


def test_what_is_no_unit_test_exists(conftest: Any) -> None:
    """The rooms and files that `--unit` leaves out are there: none was renamed, and would come back unnoticed."""
    rooms = [conftest.TESTS / room for room in conftest.PROCESS_ROOMS]
    assert [path for path in (*rooms, *conftest.long_files()) if not path.exists()] == []


@pytest.mark.parametrize(
    ("option", "names"),
    [
        (None, ["plain", "integration", "slow", "property"]),
        ("--unit", ["plain"]),
        ("--extended", ["plain", "integration", "slow", "extended", "property"]),
    ],
)
def test_what_is_selected(conftest: Any, option: str | None, names: list[str]) -> None:
    """Without options all but the tests marked `extended`; under `--unit` no mark and no property of hypothesis."""
    marks = {"plain": [], "integration": ["integration"], "slow": ["slow"], "extended": ["slow", "extended"]}
    found: list[Any] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: found.extend(items))
    config: Any = SimpleNamespace(
        getoption=lambda name: name == option, pluginmanager=SimpleNamespace(hasplugin=lambda _: False), hook=hook
    )
    items: list[Any] = [
        SimpleNamespace(name=name, nodeid="", iter_markers=lambda marks=marks: [SimpleNamespace(name=m) for m in marks])
        for name, marks in marks.items()
    ]
    items.append(
        SimpleNamespace(
            name="property", nodeid="", iter_markers=lambda: [], obj=SimpleNamespace(is_hypothesis_test=True)
        )
    )
    every = {*map(id, items)}
    conftest.pytest_collection_modifyitems(config, items)
    assert [item.name for item in items] == names
    assert {*map(id, items), *map(id, found)} == every


def test_a_unit_test_starts_no_process(conftest: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The events of Python differ in their arguments; that of a fork has none."""
    monkeypatch.setattr(conftest, "_unit_test", ["a test"])
    started: list[tuple[str, tuple[Any, ...]]] = [("os.fork", ()), ("subprocess.Popen", ("git", ["git"], None, None))]
    for event, arguments in started:
        with pytest.raises(pytest.fail.Exception, match="it starts a process"):
            conftest._refuse_processes(event, arguments)
    conftest._refuse_processes("subprocess.Popen", ("lscpu", ["lscpu"], None, None))


def test_a_hidden_gpu_is_seen_by_nobody(conftest: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither this process nor one that it starts has a GPU, until the patch is undone."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    started: list[bool] = []
    monkeypatch.setattr(torch.cuda, "init", lambda: started.append(True))
    with pytest.MonkeyPatch.context() as patch:
        conftest.hide_gpus(patch)
        assert (torch.cuda.is_available(), torch.cuda.device_count()) == (False, 0)
        asked = "import os; print(repr(os.environ['CUDA_VISIBLE_DEVICES']))"
        told = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
        assert told.stdout == "''\n"
    assert (torch.cuda.is_available(), torch.cuda.device_count(), started) == (True, 1, [True])


def item(*marks: pytest.MarkDecorator, fixtures: list[str] | None = None) -> Any:
    """Return what stands for a test with these marks and fixtures."""
    return SimpleNamespace(
        fixturenames=fixtures or [], iter_markers=lambda name: [mark.mark for mark in marks if mark.name == name]
    )


@pytest.mark.parametrize(
    ("test", "asks"),
    [
        (item(), False),
        (item(fixtures=["tmp_path", "device"]), True),
        (item(pytest.mark.requires(cuda=1)), True),
        (item(pytest.mark.requires(2)), True),
        (item(pytest.mark.requires(apex=True)), False),
    ],
)
def test_what_is_for_a_gpu_is_known_by_mark_and_fixture(conftest: Any, test: Any, asks: bool) -> None:
    """A test that requires CUDA, or takes the device that is there, keeps its GPU."""
    assert conftest.may_use_gpu(test) is asks


def test_requires_skips_with_its_reason(conftest: Any) -> None:
    """The mark `requires` skips what the machine cannot run and says what is missing; zero requirements run."""
    with pytest.raises(pytest.skip.Exception, match=r"needs 99 CUDA device\(s\)"):
        conftest.pytest_runtest_setup(item(pytest.mark.slow, pytest.mark.requires(cuda=99)))
    conftest.pytest_runtest_setup(item(pytest.mark.requires(cuda=0, apex=False)))
