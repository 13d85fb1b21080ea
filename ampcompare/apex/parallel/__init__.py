"""Training over several processes, with the names of `apex.parallel`.

`LARC` is the module that contains the class of that name, as in Apex.
"""

from typing import Any

from torch.distributed import ReduceOp

from . import LARC
from . import sync_batchnorm as sync_batchnorm  # scripts find it after `import apex.parallel`
from .distributed import DistributedDataParallel, Reducer
from .optimized_sync_batchnorm import SyncBatchNorm, convert_syncbn_model, create_syncbn_process_group

__all__ = [
    "LARC",
    "DistributedDataParallel",
    "ReduceOp",
    "Reducer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
]


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"ampcompare.apex.parallel has no {name!r}; it has {', '.join(__all__)}; the class LARC is in the module LARC"
    )
