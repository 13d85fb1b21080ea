"""Restore the former behavior of torch functions, each with one line on stderr when used.

Libraries call these functions too. Where a library may rely on the new behavior, only calls from the script's own files
are changed.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ampcompare.script.legacy.compat import local_rank, masks, removed_names, schedulers
from ampcompare.script.legacy.compat.callers import called_by_script
from ampcompare.script.legacy.jit import keep_for_jit
from ampcompare.script.legacy.process_group import gloo_for_nccl
from ampcompare.script.legacy.stderr import note

__all__ = ["patch_torch"]


def patch_torch() -> None:
    """Patch torch, and restore names that Python and numpy have removed, in this process."""
    local_rank.patch()
    removed_names.patch()
    _patch_load()
    _patch_full()
    _patch_view()
    masks.patch()
    schedulers.patch()
    _patch_loader_next()
    if not torch.backends.cuda.is_built() or torch.cuda.device_count() == 0:
        gloo_for_nccl()


def _patch_load() -> None:
    load = torch.load

    @functools.wraps(load)
    def load_anything(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("weights_only") is None:
            kwargs["weights_only"] = False
            note("torch.load runs with weights_only=False, as before torch 2.6: load only files that you trust")
        return load(*args, **kwargs)

    torch.load = load_anything


def _patch_full() -> None:
    full = torch.full

    @functools.wraps(full)
    def full_of_floats(*args: Any, **kwargs: Any) -> Any:
        value = kwargs.get("fill_value", args[1] if len(args) > 1 else None)
        plain = kwargs.get("dtype") is None and kwargs.get("out") is None
        if plain and isinstance(value, int) and called_by_script():
            note("torch.full of an integer gives floats, as before torch 1.7")
            kwargs["dtype"] = torch.get_default_dtype()
        return full(*args, **kwargs)

    torch.full = full_of_floats
    keep_for_jit(full, full_of_floats)


def _patch_view() -> None:
    view = Tensor.view

    @functools.wraps(view)
    def view_or_reshape(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        try:
            return view(self, *args, **kwargs)
        except RuntimeError:
            # Flattening only: other views are written to, which a copy would lose.
            if args not in ((-1,), ((-1,),), ([-1],)) or self.is_contiguous():
                raise
        note(".view(-1) of a tensor that is not contiguous copies it, as .reshape(-1) does")
        return self.reshape(-1)

    Tensor.view = view_or_reshape  # type: ignore[method-assign, assignment]


def _patch_loader_next() -> None:
    from torch.utils.data import dataloader

    def next_batch(self: Any) -> Any:
        note("the .next() of a DataLoader's iterator is next(iterator)")
        return next(self)

    dataloader._BaseDataLoaderIter.next = next_batch  # type: ignore[attr-defined]
