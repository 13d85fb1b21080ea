"""Systems that are not POSIX: every module is imported without what only POSIX has, and what needs it says so."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from ampcompare.base.errors import EnvironmentUnfit
from ampcompare.base.processes.start import kill_process_group
from ampcompare.experiment.option_checks import check_cells
from ampcompare.settings.config import RunConfig

# Libraries first: what they import is theirs. Then the names that Windows lacks are gone, and each module must load.
HIDDEN = """
import importlib, os, pkgutil, select, signal, socket, subprocess, sys
import click, numpy, psutil, pydantic, rich.console, rich.live, scipy.stats, sklearn.datasets, torch, yaml
import torch.distributed, torch.distributed.run, torch.utils.data

for name in ("fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty"):
    sys.modules[name] = None
absent = {
    os: ["fork", "forkpty", "getloadavg", "getpgid", "getuid", "geteuid", "killpg", "mkfifo", "nice",
         "register_at_fork", "sched_getaffinity", "sched_setaffinity", "setsid", "sync", "uname", "O_NONBLOCK"],
    signal: ["SIGKILL", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGCONT", "SIGALRM", "SIGRTMIN", "alarm", "pthread_sigmask"],
    select: ["poll", "epoll"],
    socket: ["AF_UNIX"],
}
for module, names in absent.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)

import ampcompare
from ampcompare.base.errors import BackendUnavailable
# Not imported: programs of child processes, and what runs a script as its main module.
count = 0
for found in pkgutil.walk_packages(ampcompare.__path__, "ampcompare."):
    if found.name.endswith("__main__") or found.name in SKIPPED:
        continue
    try:
        importlib.import_module(found.name)
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in EXTRAS:
            raise
    except BackendUnavailable:  # what plugs into a library that is not installed says so
        if not found.name.startswith("ampcompare.integrations."):
            raise
    count += 1
print(count)
"""
SKIPPED = ("ampcompare.base.processes.child",)
EXTRAS = ("accelerate", "jinja2", "lightning_fabric", "mlflow", "mmengine", "pynvml", "ray", "submitit", "tensorboard",
          "timm", "torchao", "transformers", "triton", "wandb")  # fmt: skip


def test_every_module_loads_without_posix(tmp_path: Path, forked_python: Any) -> None:
    """No module needs fcntl, fork, SIGKILL or process groups when it is imported, and no name of an extra."""
    script = tmp_path / "script.py"
    script.write_text(f"SKIPPED, EXTRAS = {SKIPPED!r}, {EXTRAS!r}\n{HIDDEN}", encoding="utf-8")
    done = forked_python.run([str(script)], tmp_path, dict(os.environ))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 300


def test_training_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without os.fork a run is refused in one sentence before anything starts, except as a job on another machine."""
    monkeypatch.delattr(os, "fork")
    monkeypatch.setattr("platform.system", lambda: "Windows")
    with pytest.raises(
        EnvironmentUnfit, match=r"os\.fork, which Windows lacks; use Linux, macOS, WSL 2 or a container"
    ):
        check_cells([RunConfig()])
    monkeypatch.setattr("ampcompare.experiment.option_checks.require_slurm", lambda: None)
    check_cells([RunConfig(launcher="slurm", device="cpu")])


def test_a_group_ends_without_process_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where os.killpg is missing, a process and what it has started are killed one by one; a gone one is no error."""
    monkeypatch.delattr(os, "killpg")
    code = (
        "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        kill_process_group(parent.pid)
        assert parent.wait(timeout=20) != 0
        psutil.wait_procs([child], timeout=20)
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    kill_process_group(parent.pid)
