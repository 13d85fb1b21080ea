"""Use gloo for process groups of scripts that ask for nccl without a CUDA device."""

from __future__ import annotations

import atexit
import functools
import importlib
from typing import Any

import torch.distributed as dist

from ampcompare.script.legacy.stderr import note

__all__ = ["gloo_for_nccl"]


def gloo_for_nccl() -> None:
    """Let `init_process_group` and `new_group` use gloo if the script asks for nccl, with one line on stderr."""
    if not dist.is_available() or hasattr(dist.init_process_group, "_ampcompare_gloo"):
        return
    # Its functions have the group as a default argument: imported later, they would keep a destroyed group alive.
    importlib.import_module("torch.distributed.nn.functional")
    atexit.register(_destroy)
    init, new = dist.init_process_group, dist.new_group

    @functools.wraps(init)
    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        return init(_backend(backend), *args, **kwargs)

    @functools.wraps(new)
    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        return new(ranks, timeout, _backend(backend), *args, **kwargs)

    init_process_group._ampcompare_gloo = True  # type: ignore[attr-defined]
    for module in (dist, dist.distributed_c10d):
        module.init_process_group = init_process_group  # type: ignore[attr-defined]
        module.new_group = new_group  # type: ignore[attr-defined]


def _backend(requested: Any) -> Any:
    if isinstance(requested, str) and requested.lower() == "nccl":
        note("process groups use gloo instead of nccl: there is no CUDA device")
        return "gloo"
    return requested


def _destroy() -> None:
    """Destroy the group that a script left open: a gloo thread that outlives the interpreter can abort the process."""
    if dist.is_initialized():
        dist.destroy_process_group()
