"""Choose the kernels of O2's copies: torch's, or Triton's, which give the same bits in fewer launches.

Triton's are off by default: they have been tested in Triton's interpreter on a CPU, and on no GPU yet.
"""

from __future__ import annotations

import importlib
import os
import shutil
from types import ModuleType

import torch

from ampcompare.base.errors import BackendUnavailable

from .errors import AmpOptionError

__all__ = ["KERNELS_VARIABLE", "kernels_from_environment", "load_kernels"]

KERNELS_VARIABLE = "AMPCOMPARE_APEX_KERNELS"


def kernels_from_environment() -> str:
    """Return the name that the environment asks for; "torch" if it asks for none."""
    return os.environ.get(KERNELS_VARIABLE, "").strip().lower() or "torch"


def load_kernels(name: str) -> ModuleType | None:
    """Return the module with the kernels of this name; None for those of torch.

    Raises:
        AmpOptionError: no such kernels.
        BackendUnavailable: Triton is missing, or the C compiler that it needs, or there is no GPU to run it and
            `TRITON_INTERPRET` is not set.
    """
    if name == "torch":
        return None
    if name != "triton":
        raise AmpOptionError(f"Unexpected kernels {name!r}.  Options are 'torch' and 'triton'.")
    try:
        kernels = importlib.import_module("ampcompare.apex.amp._engine.triton_kernels")
    except ImportError as error:
        raise BackendUnavailable(f"Triton cannot be imported ({error}): pip install ampcompare[triton]") from error
    if kernels.INTERPRETED:
        return kernels
    if not torch.cuda.is_available():
        raise BackendUnavailable("Triton's kernels need a GPU; without one, TRITON_INTERPRET=1 runs them, slowly")
    if not os.environ.get("CC") and not any(map(shutil.which, ("gcc", "clang"))):
        raise BackendUnavailable("Triton compiles with gcc or clang, and neither is there; install one, or set CC")
    return kernels
