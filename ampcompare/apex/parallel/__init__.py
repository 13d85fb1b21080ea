"""Training over several processes, with the names of `apex.parallel`.

`LARC` is in the module `ampcompare.apex.parallel.LARC`, as in Apex; `multiproc` is run as a script.
"""

from __future__ import annotations

from typing import Any

from torch.distributed import ReduceOp

from ._convert import convert_syncbn_model, create_syncbn_process_group
from .distributed import DistributedDataParallel, Reducer
from .optimized_sync_batchnorm import SyncBatchNorm

__all__ = [
    "DistributedDataParallel",
    "ReduceOp",
    "Reducer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
]


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"ampcompare.apex.parallel has no {name!r}; it has {', '.join(__all__)}, and the class LARC in its module LARC"
    )
