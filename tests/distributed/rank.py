"""One rank of the pool of `conftest.py`: run the functions it is told to, each in a process group of its own.

Each line of standard input is a JSON object with file, function, rank, world_size, rendezvous, result and arguments.
The outcome is saved to `result`: ("returned", value) or ("raised", traceback).
"""

from __future__ import annotations

import importlib.util
import json
import os
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))  # as in pytest, for what test modules share
SECONDS = 50


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


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        job = json.loads(line)
        try:
            outcome: tuple[str, Any] = ("returned", run(job))
        except BaseException:
            outcome = ("raised", traceback.format_exc())
        torch.save(outcome, job["result"] + ".part")
        os.replace(job["result"] + ".part", job["result"])


if __name__ == "__main__":
    main()
