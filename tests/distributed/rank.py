"""Ranks of the pool of `conftest.py`, forked from one process: each runs functions, in a process group of its own.

Each line that a rank gets is a JSON object with file, function, rank, world_size, rendezvous, result and arguments.
The outcome is saved to `result`: ("returned", value) or ("raised", traceback).
"""

import contextlib
import importlib.util
import json
import os
import socket
import sys
import traceback
import warnings
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from ampcompare.apex import DeprecatedFeatureWarning
from ampcompare.apex.amp import _amp_state
from ampcompare.training.precision.base import make_precision

# as in pytest, for what test modules share
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
SECONDS = 50
# What ranks import, here once for all of them.
WARM = (
    *("pytest", "torch._dynamo.repro.after_dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp"),
    *("torchao.optim", "torchao.float8", "ampcompare.cli.run_command"),
    *("ampcompare.experiment.launch.worker.rank",),
    *("ampcompare.training.session", "ampcompare.training.precision.fsdp", "ampcompare.tasks.lm"),
)


@cache
def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"ranks_{abs(hash(path))}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def run(job: dict[str, Any]) -> Any:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job['rendezvous']}",
        rank=job["rank"],
        world_size=job["world_size"],
        timeout=timedelta(seconds=SECONDS),
    )
    try:
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", DeprecatedFeatureWarning)
            return getattr(load(job["file"]), job["function"])(**job["arguments"])
    finally:
        _amp_state.close()
        os.environ.pop("AMPCOMPARE_APEX_STRICT", None)
        dist.destroy_process_group()


def serve(jobs: socket.socket) -> None:
    """Be a rank until the other end of the socket is closed."""
    with jobs.makefile() as lines:
        for line in lines:
            job = json.loads(line)
            try:
                outcome: tuple[str, Any] = ("returned", run(job))
            except BaseException:
                outcome = ("raised", traceback.format_exc())
            torch.save(outcome, job["result"])
            jobs.sendall(b".")


def main(requests: socket.socket) -> None:
    """Fork a rank for each request with its socket and its log; a request with a process id asks for its exit code."""
    for name in WARM:
        with contextlib.suppress(ImportError):  # only saves time
            importlib.import_module(name)
    torch.set_num_threads(1)
    make_precision("fp32", device="cpu")  # reads what other packages register
    torch.optim.SGD([torch.zeros(1)], lr=1.0)  # imports more
    while True:
        request, files, _, _ = socket.recv_fds(requests, 64, 2)
        if not request:
            return
        if not files:
            requests.send(str(os.waitstatus_to_exitcode(os.waitpid(int(request), 0)[1])).encode())
            continue
        child = os.fork()
        if not child:
            requests.close()
            os.dup2(files[1], 1)
            os.dup2(files[1], 2)
            serve(socket.socket(fileno=files[0]))
            os._exit(0)
        requests.send(str(child).encode())
        for file in files:
            os.close(file)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
