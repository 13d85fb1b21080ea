"""What every test needs: one thread, no user settings, this checkout in child processes, `requires` and `--unit`."""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import re
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from ampcompare.api.doctor.gpu import has_nvidia_gpu

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent

# A runner started in the background ignores Ctrl-C, and so would every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Before anything imports torch, which reads the thread count once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
for variable in [name for name in os.environ if name.startswith("AMPCOMPARE_")]:
    del os.environ[variable]
# Child processes started in another folder must import this checkout too, installed or not.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))

# What a test writes need not outlive a power cut. A disk that serves other jobs too can take longer than the test.
os.fsync = lambda descriptor: None  # type: ignore[assignment]


def _missing(cuda: int = 0, apex: bool = False) -> str | None:
    """Say what this machine lacks of what a test requires, or None.

    Args:
        cuda: number of CUDA devices.
        apex: the real Apex with `apex.amp`; looked for by files, because importing it may fail.
    """
    if cuda:
        import torch

        found = torch.cuda.device_count()
        if found < cuda:
            return f"needs {cuda} CUDA device(s), {found} found"
    if apex:
        spec = importlib.util.find_spec("apex")
        folders = (spec.submodule_search_locations if spec else None) or []
        if not any(Path(folder, "amp", "__init__.py").is_file() for folder in folders):
            return "needs the real Apex with apex.amp (last in tag 25.05)"
    return None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Use half as many processes again as there are cores: tests of launchers wait for others much of the time.

    Unit tests do not wait: one process per core, as each imports torch and every test file.
    """
    cores = os.cpu_count() or 1
    return max(2, cores if config.getoption("--unit") else cores * 3 // 2)


# Fixtures of what exists once on a machine, or takes seconds to make: tests that use one run in one process, one after
# the other. So do tests of a file that use a fixture of the module.
SHARED = ("slurm", "hosts", "replayed", "chromium", "forks")


def _group(item: pytest.Item) -> str | None:
    """Return the group of a test that must not be apart from others, or None."""
    shared = sorted(set(SHARED) & set(getattr(item, "fixturenames", ())))
    if shared:
        return shared[0]
    info = getattr(item, "_fixtureinfo", None)
    made = info.name2fixturedefs.values() if info is not None else ()
    return item.nodeid.partition("::")[0] if any(fixture[-1].scope == "module" for fixture in made) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep tests that share something costly in one process of pytest-xdist; select those of `--unit`.

    Before the hook of pytest-xdist, which reads the groups. What is no unit test runs once more if it fails, since a
    busy machine can stop any of the processes that it waits for; the summary names it under RERUN.
    """
    if not config.getoption("--extended"):
        extended = [item for item in items if item.get_closest_marker("extended")]
        items[:] = [item for item in items if item not in set(extended)]
        config.hook.pytest_deselected(items=extended)
    others = [item for item in items if any(map(item.get_closest_marker, ("slow", "integration")))]
    waiting = {*others, *(item for item in items if _starts_processes(item.path))}
    reruns = config.pluginmanager.hasplugin("rerunfailures")
    for item in items:
        if item.get_closest_marker("xdist_group") is None and (group := _group(item)):
            item.add_marker(pytest.mark.xdist_group(group))
        if reruns and item in waiting:
            item.add_marker(pytest.mark.flaky(reruns=1))
    if config.getoption("--unit"):
        items[:] = [item for item in items if item not in set(others)]
        config.hook.pytest_deselected(items=others)


def pytest_collection_finish() -> None:
    """Let no garbage collection look again at modules and tests, which stay: they are a million objects."""
    gc.enable()
    gc.collect()
    gc.freeze()


# Rooms whose tests are about processes, and the words of a file that starts one. Whatever they miss fails under --unit.
PROCESS_ROOMS = (
    *("benchmarks", "cli", "distributed", "docker", "docs"),
    *("api/doctor", "experiment/launch", "script/legacy"),
)
STARTS_PROCESSES = re.compile(r"\bsubprocess\b|\bmultiprocessing\b|\bos\.fork\b|\breplayed\b")
STARTS = ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.system")
_unit_test: list[str] = []  # the test that runs


@functools.cache
def _starts_processes(path: Path) -> bool:
    """Return whether the tests of a file are about processes, by its room or its words."""
    in_room = any(path.is_relative_to(TESTS / room) for room in PROCESS_ROOMS)
    return in_room or STARTS_PROCESSES.search(path.read_text(encoding="utf-8")) is not None


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--unit`, which `scripts/test unit` gives, and `--extended`."""
    parser.addoption("--unit", action="store_true", help="only tests that are not slow and start no process")
    parser.addoption("--extended", action="store_true", help="also tests that repeat at length what others cover")


def pytest_configure(config: pytest.Config) -> None:
    """Under `--unit`, fail a test that starts a process after all; collect no garbage before tests are collected."""
    gc.disable()
    if config.getoption("--unit"):
        sys.addaudithook(_refuse_processes)


def _refuse_processes(event: str, _arguments: tuple[Any, ...]) -> None:
    if event in STARTS and _unit_test:
        pytest.fail("this is not a unit test, it starts a process: mark it `integration`", pytrace=False)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Under `--unit`, leave out files that start processes before anything of them is imported."""
    if not config.getoption("--unit"):
        return None
    if collection_path.is_dir():
        return True if collection_path in {TESTS / room for room in PROCESS_ROOMS} else None
    return True if collection_path.suffix == ".py" and _starts_processes(collection_path) else None


def may_use_gpu(item: pytest.Item) -> bool:
    """Return whether a test is for a GPU: it requires one, or takes the device that is there."""
    asks = any(mark.kwargs.get("cuda", mark.args[0] if mark.args else 0) for mark in item.iter_markers("requires"))
    return asks or "device" in getattr(item, "fixturenames", ())


def hide_gpus(patch: pytest.MonkeyPatch) -> None:
    """Let this process and those that it starts see no GPU until `patch` is undone."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.init()  # the driver looks once at what is visible, and a later test may need its GPU
    patch.setattr(torch.cuda, "is_available", lambda: False)
    patch.setattr(torch.cuda, "device_count", lambda: 0)
    patch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool, bool]:
    """Run on the CPU what is not for a GPU, whatever the machine has; fixtures of any scope with it."""
    with pytest.MonkeyPatch.context() as patch:
        if has_nvidia_gpu() and not may_use_gpu(item):
            hide_gpus(patch)
        _unit_test.append(item.nodeid)
        newest, path = next(reversed(sys.modules)), list(sys.path)
        try:
            return (yield)
        finally:
            _unit_test.clear()
            sys.path[:] = path
            forget_modules(item.config, list(takewhile(lambda name: name != newest, reversed(sys.modules))))


def forget_modules(config: pytest.Config, names: Iterable[str]) -> None:
    """Forget those of the named modules that lie in a temporary folder: another test may have others of their names."""
    temporary = str(config._tmp_path_factory.getbasetemp())  # type: ignore[attr-defined]
    for name in names:
        if str(getattr(sys.modules.get(name), "__file__", None)).startswith(temporary):
            del sys.modules[name]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose mark `requires` names what is not here."""
    for mark in item.iter_markers("requires"):
        reason = _missing(*mark.args, **mark.kwargs)
        if reason is not None:
            pytest.skip(reason)


@pytest.fixture(autouse=True)
def fresh_accelerator() -> Iterator[None]:
    """Let each test make an `Accelerator` of a precision of its own, as each run does in its own process."""
    yield
    if (state := sys.modules.get("accelerate.state")) is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


@pytest.fixture(scope="session")
def forked_python() -> Iterator[Any]:
    """Python with torch loaded, forked for each command line: a `ForkedPython`."""
    from tests.forked_process import ForkedPython

    python = ForkedPython()
    yield python
    python.close()


@pytest.fixture(scope="session")
def forking(forked_python: Any) -> types.SimpleNamespace:
    """Stands for the module `subprocess`, with a `Popen` that forks, and a `run` for commands whose stderr is read."""

    def run(command: list[str], *, env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        done = forked_python.run(command[1:], Path.cwd(), env)
        return subprocess.CompletedProcess(command, done.returncode, stderr=done.stderr.encode())

    return types.SimpleNamespace(**{**vars(subprocess), "Popen": forked_python.popen, "run": run})


@pytest.fixture
def forked_children(forking: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `call_in_child` fork its children from a process that has torch loaded."""
    monkeypatch.setattr("ampcompare.base.isolate.call.subprocess", forking)


@pytest.fixture
def forked_servers(forking: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let process servers, those of scripts too, start in milliseconds, from a process that has torch loaded."""
    monkeypatch.setattr("ampcompare.base.isolate.client.subprocess", forking)
    monkeypatch.setattr("ampcompare.experiment.launch.script.launcher.subprocess", forking)


@pytest.fixture
def forked_runs(forking: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `migrate --verify` run scripts in processes that have torch loaded."""
    monkeypatch.setattr("ampcompare.source.migrate.verify.subprocess", forking)


@pytest.fixture
def forked_ranks(forking: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let cells of several processes start their agent and their ranks in milliseconds."""
    monkeypatch.setattr("ampcompare.experiment.launch.multi_process.subprocess", forking)


@pytest.fixture(scope="session")
def make_record() -> Callable[..., Any]:
    """Build the record of one cell from its arm, seed, accuracy, step time and the like."""
    from ampcompare.runs.records.evaluation import EpochResult
    from ampcompare.runs.records.run import RunRecord, RunSummary
    from ampcompare.runs.settings.config import RunConfig
    from ampcompare.runs.settings.recipe import Recipe

    def make(
        arm: str = "fp32",
        seed: int = 0,
        *,
        top1: float = 0.5,
        seconds: float = 0.01,
        status: str = "completed",
        losses: str = "",
        half: str | None = None,
        device: str = "cpu",
        error: str | None = None,
        majority: int | None = None,
        **summary: Any,
    ) -> RunRecord:
        config = RunConfig(arm=arm, recipe=Recipe(seed=seed))
        correct = round(top1 * 1000)
        epoch = EpochResult(
            epoch=0,
            samples=1000,
            top1_correct=correct,
            top5_correct=1000,
            loss=1.0,
            majority_correct=majority,
            train_seconds=1.0,
            eval_seconds=0.1,
        )
        ran = status in ("completed", "diverged")
        numbers: dict[str, Any] = {
            "metric_final": top1 if status == "completed" else None,
            "metric_best": top1,
            "step_seconds_median": seconds,
            "epoch_seconds": 100 * seconds,
            "num_steps": 100,
            "losses_sha256": losses or f"{arm} {seed}",
            "epochs": [epoch],
            "diverged_step": 7 if status == "diverged" else None,
        }
        return RunRecord.model_validate(
            {
                "cell": config.digest(),
                "arm": arm,
                "status": status,
                "config": config,
                "half": half,
                "environment": {"device": device},
                "summary": RunSummary(**{**numbers, **summary}) if ran else RunSummary(),
                "error": error,
            }
        )

    return make
