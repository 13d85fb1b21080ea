"""`--compat-torch`: mend what changed in torch since a script was written, each with one line on stderr when used.

What is written here changes results of functions that libraries call too, so where a library may rely on the new
behavior only calls from the script's own files are mended.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
from typing import Any

import torch
from torch import Tensor

from ampcompare.legacy import compat_names, local_rank
from ampcompare.legacy.notes import note
from ampcompare.legacy.process_group import gloo_for_nccl

__all__ = ["mend_torch"]

LIBRARIES = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {torch.__path__[0].rpartition("torch")[0].rstrip("/\\")}
)


def mend_torch() -> None:
    """Mend torch, and Python's own removed names, in this process."""
    local_rank.mend()
    compat_names.mend()
    _mend_load()
    _mend_full()
    _mend_view()
    _mend_bool_subtraction()
    _mend_loader_next()
    if not torch.backends.cuda.is_built() or torch.cuda.device_count() == 0:
        gloo_for_nccl()


def _called_by_script(depth: int = 2) -> bool:
    return not sys._getframe(depth).f_code.co_filename.startswith(LIBRARIES)


def _mend_load() -> None:
    load = torch.load

    @functools.wraps(load)
    def load_anything(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("weights_only") is None:
            kwargs["weights_only"] = False
            note("torch.load runs with weights_only=False, as before torch 2.6: load only files that you trust")
        return load(*args, **kwargs)

    torch.load = load_anything


def _mend_full() -> None:
    full = torch.full

    @functools.wraps(full)
    def full_of_floats(*args: Any, **kwargs: Any) -> Any:
        value = kwargs.get("fill_value", args[1] if len(args) > 1 else None)
        plain = kwargs.get("dtype") is None and kwargs.get("out") is None
        if plain and isinstance(value, int) and _called_by_script():
            note("torch.full of an integer gives floats, as before torch 1.7")
            kwargs["dtype"] = torch.get_default_dtype()
        return full(*args, **kwargs)

    torch.full = full_of_floats


def _mend_view() -> None:
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


def _mend_bool_subtraction() -> None:
    rsub = Tensor.__rsub__

    @functools.wraps(rsub)
    def rsub_mask(self: Tensor, other: Any) -> Any:
        if self.dtype is torch.bool:
            note("1 - mask counts a mask as bytes, as before torch 1.2")
            return rsub(self.to(torch.uint8), other)
        return rsub(self, other)

    Tensor.__rsub__ = rsub_mask  # type: ignore[method-assign]


def _mend_loader_next() -> None:
    from torch.utils.data import dataloader

    def next_batch(self: Any) -> Any:
        note("the .next() of a DataLoader's iterator is next(iterator)")
        return next(self)

    dataloader._BaseDataLoaderIter.next = next_batch  # type: ignore[attr-defined]
