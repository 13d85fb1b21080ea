"""Replace NVIDIA Apex 25.05: the same packages and names, on any device.

Subpackages load on first use, so importing this package costs no `import torch`.
"""

import importlib
import sys
import warnings
from typing import Any

from ampcompare.base.environment.extras import require_torch
from ampcompare.base.environment.variables import reproduces_apex_defects

require_torch(engine_alone=True)

__all__ = [
    "DeprecatedFeatureWarning",
    "__version__",
    "amp",
    "deprecated_warning",
    "fp16_utils",
    "install",
    "is_strict_by_environment",
    "multi_tensor_apply",
    "normalization",
    "optimizers",
    "parallel",
]

__version__ = "25.05+compat"

_BETWEEN = ("ampcompare.script.", "ampcompare.guards.", "ampcompare.base.patches", "ampcompare.apex.amp.amp")
_SUBPACKAGES = (
    *("_autocast_utils", "amp", "contrib", "fp16_utils", "mlp"),
    *("multi_tensor_apply", "normalization", "optimizers"),
    "parallel",
)


class DeprecatedFeatureWarning(FutureWarning):
    """A feature that Apex itself declared deprecated, and later removed."""


def deprecated_warning(msg: str) -> None:
    """Emit a `DeprecatedFeatureWarning`, on rank 0 only once a process group exists.

    The warning points at the caller of the function that calls this one, past what `ampcompare exec` puts between them.
    """
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        if distributed.get_rank() != 0:
            return
    level, frame = 3, sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_BETWEEN):
        level, frame = level + 1, frame.f_back
    warnings.warn(msg, DeprecatedFeatureWarning, stacklevel=level)


def is_strict_by_environment() -> bool:
    """Return whether the environment enables strict mode, with Apex's defects (`AMPCOMPARE_APEX_STRICT=1`)."""
    return reproduces_apex_defects()


def install() -> None:
    """Make `import apex` and `import amp_C` mean this package, from here on in this process."""
    importlib.import_module(f"{__name__}._install").install()


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
