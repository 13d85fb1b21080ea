"""What `torch.autocast` of the installed torch casts on a GPU, run in a process of its own: it imports torch."""

from __future__ import annotations

import os
from typing import Any

import torch

from ampcompare.base.tensors.cuda_casts import (
    RECURRENT,
    CastKind,
    cast_of_operation,
    operations_with_autocast_kernel,
)
from ampcompare.settings.examination import return_user_errors

# Between torch 2.6 and 2.14: the version, and what it changed.
CHANGES = (
    ((2, 8), "rms_norm, which no list has, returns the type of its input, not that of its weight"),
    ((2, 12), "rms_norm is computed in fp32"),
    ((2, 13), "seven overloads for named dimensions are gone"),
)


@return_user_errors
def explain_casts() -> dict[str, Any]:
    """Return the names of operations by what is done with them, the version of torch, and what changed since 2.6."""
    casts: dict[str, set[str]] = {}
    with _StderrOfTorchHidden():
        for name in operations_with_autocast_kernel("CUDA"):
            operation = name.partition("::")[2].partition(".")[0]
            if not operation.startswith(("_", "cudnn")):
                casts.setdefault(cast_of_operation(name).value, set()).add(operation)
    casts.setdefault(CastKind.LOWER.value, set()).update(name.partition(".")[0] for name in RECURRENT)
    here = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return {
        "torch": torch.__version__,
        "casts": {cast.value: sorted(casts[cast.value]) for cast in CastKind if cast.value in casts},
        "changes": [f"{'.'.join(map(str, version))}: {text}" for version, text in CHANGES if version <= here],
    }


class _StderrOfTorchHidden:
    """Keeps what torch itself writes to stderr, that some operations are deprecated, from the terminal."""

    def __enter__(self) -> None:
        self._kept = os.dup(2)
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)

    def __exit__(self, *exception: object) -> None:
        os.dup2(self._kept, 2)
        os.close(self._kept)
