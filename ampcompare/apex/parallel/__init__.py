"""Training over several processes, with the names of `apex.parallel`.

`LARC` is in the module `ampcompare.apex.parallel.LARC`, as in Apex.
"""

from __future__ import annotations

from typing import Any

from torch.distributed import ReduceOp

__all__ = ["ReduceOp"]


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"ampcompare.apex.parallel has no {name!r}; it has {', '.join(__all__)}, and the class LARC in its module LARC"
    )
