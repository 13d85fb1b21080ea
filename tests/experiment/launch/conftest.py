"""One launcher for all cells of these tests, started in a folder with a user's module, and a Slurm of this machine."""

import os
import shutil
import subprocess
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ampcompare.experiment.launch.forked import ForkedLauncher
from ampcompare.settings.config import RunConfig

SLURM_DEV = Path(__file__).resolve().parents[3] / "scripts" / "slurm-dev"
MODULE = '''
"""Models of a user, each with its own way to go wrong."""

import os, signal, sys, time, torch
from ampcompare.experiment.launch.worker import stall


class Net(torch.nn.Module):
    def __init__(self, num_classes, act):
        super().__init__()
        self.layer, self.act = torch.nn.LazyLinear(num_classes), act

    def forward(self, x):
        self.act(x)
        return self.layer(x.flatten(1))


def make(num_classes, sample_shape, act):
    net = Net(num_classes, lambda x: None)
    net(torch.zeros(2, *sample_shape))
    net.act = act
    return net


def talking(num_classes, sample_shape):
    print("pid", os.getpid(), "parent", os.getppid(), "dynamo", "torch._dynamo" in sys.modules)
    print("stdin", repr(sys.stdin.read()))
    print("to stderr", file=sys.stderr)
    return make(num_classes, sample_shape, lambda x: None)


def exits(num_classes, sample_shape, code):
    os._exit(code)


def killed(num_classes, sample_shape):
    print("about to be killed", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def crashes_in_forward(num_classes, sample_shape):
    return make(num_classes, sample_shape, lambda x: os.kill(os.getpid(), signal.SIGSEGV))


def raises_in_forward(num_classes, sample_shape):
    def act(x):
        raise RuntimeError("the forward pass\\nhas failed")
    return make(num_classes, sample_shape, act)


def rank():
    return int(os.environ.get("RANK") or os.environ["SLURM_PROCID"])


def first_try():
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


def kills_rank_1(num_classes, sample_shape, tries):
    print(f"rank {rank()} is about to train", flush=True)
    dies = rank() == 1 and (first_try() or tries > 1)
    return make(num_classes, sample_shape, lambda x: dies and os.kill(os.getpid(), signal.SIGKILL))


def rank_1_dies_at(num_classes, sample_shape, forward):
    calls = []

    def act(x):
        calls.append(x)
        if rank() == 1 and first_try() and len(calls) == forward:
            os.kill(os.getpid(), signal.SIGKILL)
    return make(num_classes, sample_shape, act)


def hang_here():
    while True:
        time.sleep(0.1)


def rank_1_hangs(num_classes, sample_shape):
    stall.ANSWER_SECONDS = 0.5
    return make(num_classes, sample_shape, lambda x: rank() == 1 and hang_here())


def rank_1_raises(num_classes, sample_shape):
    def act(x):
        if rank() == 1:
            raise RuntimeError("the forward pass of one rank\\nhas failed")
    return make(num_classes, sample_shape, act)


def waits_for(num_classes, sample_shape, file):
    print("waiting for a file", flush=True)
    deadline = time.monotonic() + 120
    while not os.path.exists(file) and time.monotonic() < deadline:
        time.sleep(0.1)
    return make(num_classes, sample_shape, lambda x: None)


def waits_at_the_third_step(num_classes, sample_shape, file):
    calls = []

    def act(x):
        calls.append(x)
        while len(calls) == 3 and not os.path.exists(file):
            time.sleep(0.1)
    return make(num_classes, sample_shape, act)


def out_of_memory(num_classes, sample_shape):
    def act(x):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    return make(num_classes, sample_shape, act)
'''


@pytest.fixture(scope="session")
def user_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a module of models."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "launched.py").write_text(MODULE)
    return folder


@pytest.fixture(scope="session")
def shared_launcher(forking: types.SimpleNamespace) -> Iterator[ForkedLauncher]:
    """A launcher with a server."""
    with ForkedLauncher() as launcher:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ampcompare.base.processes.client.subprocess", forking)
            launcher._ensure_server()
        yield launcher


@pytest.fixture
def launcher(
    shared_launcher: ForkedLauncher, user_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> ForkedLauncher:
    """A launcher whose cells run in the user's folder: in that of this process."""
    monkeypatch.chdir(user_folder)
    return shared_launcher


@pytest.fixture
def wait_until() -> Callable[[Callable[[], object], float], bool]:
    """Wait for a condition so many seconds at most, and return whether it came true."""

    def wait(condition: Callable[[], object], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if condition():
                return True
            time.sleep(0.1)
        return bool(condition())

    return wait


@pytest.fixture
def make_config() -> Callable[..., RunConfig]:
    """Build the smallest cell: 4 steps of 16 tiny images."""

    def make(
        arch: str = "mlp", *, args: dict[str, Any] | None = None, arm: str = "fp32", **options: Any
    ) -> RunConfig:
        recipe = {
            "data": {"name": "synthetic", "train_size": 64, "val_size": 32, "image_size": 8},
            "model": {"arch": arch, "args": args or {}},
            "epochs": 1,
            "batch_size": 16,
            **options.pop("recipe", {}),
        }
        return RunConfig.model_validate({"recipe": recipe, "arm": arm, **options})

    return make


def _missing() -> str | None:
    """Say why no Slurm can be started here, or None."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "slurmd needs root"
    path = f"{os.environ.get('PATH', '')}{os.pathsep}/usr/sbin"
    missing = [
        name for name in ("slurmctld", "slurmd", "munged", "srun") if shutil.which(name, path=path) is None
    ]
    return f"{', '.join(missing)} missing (Debian: slurm-wlm, munge)" if missing else None


@pytest.fixture(scope="session")
def slurm() -> Iterator[dict[str, str]]:
    """A private Slurm with two virtual nodes; gives the environment of its users."""
    if (reason := _missing()) is not None:
        pytest.skip(reason)
    done = subprocess.run([SLURM_DEV, "start"], capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        pytest.skip(f"no Slurm can be started here: {done.stderr.strip()[-300:]}")
    environment = {**os.environ, "SLURM_CONF": done.stdout.strip().partition("=")[2]}
    yield environment
    subprocess.run([SLURM_DEV, "stop"], env=environment, check=True, timeout=60)
