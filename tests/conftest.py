"""What every test needs: one thread, no user settings, this checkout in child processes, `requires` and `--unit`."""

import functools
import gc
import os
import re
import signal
import subprocess
import sys
import types
from collections.abc import Generator, Iterable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from ampcompare.base.files import loaded_code
from ampcompare.doctor.gpu import has_nvidia_gpu

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

# The modules of tests, which a cell that runs in this process has too, are not code of a user.
loaded_code.PACKAGE = f"{ROOT}{os.sep}"

# What a test writes need not outlive a power cut. A disk that serves other jobs too can take longer than the test.
os.fsync = lambda descriptor: None  # type: ignore[assignment]


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
    left_out = () if config.getoption("--extended") else ("extended",)
    if unit := config.getoption("--unit"):
        left_out += ("slow", "integration")
    reruns = config.pluginmanager.hasplugin("rerunfailures")
    kept, deselected = [], []
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        # A property of hypothesis is looked at a hundred times.
        if not marks.isdisjoint(left_out) or (
            unit and hasattr(getattr(item, "obj", None), "is_hypothesis_test")
        ):
            deselected.append(item)
            continue
        kept.append(item)
        if "xdist_group" not in marks and (group := _group(item)):
            item.add_marker(pytest.mark.xdist_group(group))
        if reruns and ("slow" in marks or "integration" in marks or _starts_processes(item.path)):
            item.add_marker(pytest.mark.flaky(reruns=1))
    items[:] = kept
    config.hook.pytest_deselected(items=deselected)


def pytest_collection_finish() -> None:
    """Let no garbage collection look again at modules and tests, which stay: they are a million objects."""
    gc.enable()
    gc.collect()
    gc.freeze()


# Rooms whose tests are about processes, and the words of a file that starts one. Whatever they miss fails under --unit.
PROCESS_ROOMS = (
    *("benchmarks", "cli", "distributed", "docker", "docs", "integrations"),
    *("doctor", "experiment/launch", "checkpoints", "script/legacy"),
    *("script/process", "script/recording", "training/checkpoint"),
)
# A unit test starts no process, trains a few steps at most, and simulates no experiments. These files start none, but
# take half a second or more, and longer for each test than others do.
LONG = {
    "apex": "amp/_engine/device_skip_trajectories multi_tensor_apply/launches optimizers/against_torch optimizers/math",
    "base": "files/read files/run_files patches",
    "diagnosis": "diagnose holds observation ranges",
    "experiment": "experiment interim_analyses run_order",
    "guards": "mistakes no_false_alarms",
    "results/analysis": "conclusions/headline counts same_work",
    "results/analysis/inference": "sample_size verdict",
    "results/analysis/pairing": "learning record_checks scores",
    "results/analysis/effects": "loss_tail samples step_time",
    "results/records": "metric",
    "results/report": "formats html/html metric_screens",
    "script": "behind/stand_in trainers/follow",
    "script/torch_amp": "plain_script half_weights steps_with_passes",
    "source": "migrate/read/neighbors migrate/rewrite",
    "tasks": "dataloader detection imagefolder lm models",
    "training": "cuda_graph divergence ema meters optimizers other_precisions session without_float64",
    "training/precision": "actnn apex_steps contract fabric fp8 gemm keep_fp32",
}
STARTS_PROCESSES = re.compile(
    r"\bsubprocess\b|\bmultiprocessing\b|\bos\.fork\b|\breplayed\b|\bfork(ed_\w+|ing)\b"
)
STARTS = ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.system")
_unit_test: list[str] = []  # the test that runs


def long_files() -> set[Path]:
    """Return the files of `LONG`."""
    named = [Path(room, name) for room, names in LONG.items() for name in names.split()]
    return {TESTS / path.with_name(f"test_{path.name}.py") for path in named}


@functools.cache
def _starts_processes(path: Path) -> bool:
    """Return whether the tests of a file are about processes, by its room or its words."""
    in_room = f"{path}/".startswith(tuple(f"{TESTS}/{room}/" for room in PROCESS_ROOMS))
    return in_room or STARTS_PROCESSES.search(path.read_text(encoding="utf-8")) is not None


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--unit`, which `scripts/test unit` gives, and `--extended`."""
    parser.addoption(
        "--unit", action="store_true", help="only tests that start no process, nor train for long"
    )
    parser.addoption(
        "--extended", action="store_true", help="also tests that repeat at length what others cover"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Under `--unit`, fail a test that starts a process after all; collect no garbage before tests are collected."""
    gc.disable()
    if config.getoption("--unit"):
        sys.addaudithook(_refuse_processes)


def _refuse_processes(event: str, arguments: tuple[Any, ...]) -> None:
    # which the import of NumPy 1's tests starts
    if event in STARTS and _unit_test and "lscpu" not in arguments[:1]:
        pytest.fail("this is not a unit test, it starts a process: mark it `integration`", pytrace=False)


_unit_left_out = functools.cache(lambda: {*long_files(), *(TESTS / room for room in PROCESS_ROOMS)})


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Under `--unit`, leave out what starts processes or takes long before anything of it is imported."""
    if not config.getoption("--unit"):
        return None
    left_out = collection_path in _unit_left_out()
    return (
        True if left_out or (collection_path.suffix == ".py" and _starts_processes(collection_path)) else None
    )


_has_gpu = functools.cache(has_nvidia_gpu)


def may_use_gpu(item: pytest.Item) -> bool:
    """Return whether a test is for a GPU: it requires one, or takes the device that is there."""
    return item.get_closest_marker("requires") is not None or "device" in getattr(item, "fixturenames", ())


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
        if _has_gpu() and not may_use_gpu(item):
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
    """Skip a test that requires CUDA devices which are not here."""
    for mark in item.iter_markers("requires"):
        import torch

        if (found := torch.cuda.device_count()) < (cuda := mark.kwargs["cuda"]):
            pytest.skip(f"needs {cuda} CUDA device(s), {found} found")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None]:
    """Let each test make an `Accelerator` of a precision of its own, as each run does in its own process."""
    try:
        yield
    finally:
        if (state := sys.modules.get("accelerate.state")) is not None:
            state.AcceleratorState._reset_state(reset_partial_state=True)
            state.GradientState._reset_state()


@pytest.fixture(scope="session")
def forked_python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Python with torch loaded, forked for each command line: a `ForkedPython`; one for all processes of pytest."""
    from tests.forked_process import ForkedPython

    folder = tmp_path_factory.getbasetemp()
    python = ForkedPython(folder.parent if hasattr(request.config, "workerinput") else folder)
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
    monkeypatch.setattr("ampcompare.base.processes.call.subprocess", forking)


@pytest.fixture
def forked_servers(forking: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let process servers, those of scripts too, start in milliseconds, from a process that has torch loaded."""
    monkeypatch.setattr("ampcompare.base.processes.client.subprocess", forking)


@pytest.fixture
def forked_runs(forking: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `migrate --verify` run scripts in processes that have torch loaded."""
    monkeypatch.setattr("ampcompare.experiment.script_process.subprocess", forking)


@pytest.fixture
def forked_ranks(forking: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let cells of several processes start their agent and their ranks in milliseconds."""
    monkeypatch.setattr("ampcompare.experiment.launch.multi_process.subprocess", forking)
