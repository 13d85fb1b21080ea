"""Process groups of scripts that ask for nccl where there is no CUDA device."""

from __future__ import annotations

import atexit
import functools
import importlib
from typing import Any

import torch.distributed as dist

from ampcompare.legacy.notes import note

__all__ = ["gloo_for_nccl"]


def gloo_for_nccl() -> None:
    """Let `init_process_group` and `new_group` take gloo where the script says nccl, and say so once."""
    if not dist.is_available() or hasattr(dist.init_process_group, "_ampcompare_gloo"):
        return
    # Its functions have the group as a default argument: imported later, they would keep a destroyed group alive.
    importlib.import_module("torch.distributed.nn.functional")
    atexit.register(_leave)
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


def _backend(asked: Any) -> Any:
    if isinstance(asked, str) and asked.lower() == "nccl":
        note("process groups use gloo in place of nccl: there is no CUDA device")
        return "gloo"
    return asked


def _leave() -> None:
    """Destroy the group that a script left open: a thread of gloo that outlives the interpreter can abort it."""
    if dist.is_initialized():
        dist.destroy_process_group()
