"""Import torchvision, also next to a torch without CUDA.

A torchvision built for CUDA cannot load its compiled operators with a CPU build of torch. Two of them, `nms` and
`qnms`, are expected at import, so the whole package fails although classifiers, data sets and transforms need none.
Detectors need `nms` only, as torchvision aligns regions in Python where it has no operators.
"""

import functools
import importlib
import inspect
import sys
import warnings
from types import ModuleType

import torch

from ampcompare.base.errors import BackendUnavailable
from ampcompare.tasks.boxes import nms

_INSTALL_HINT = (
    "install the version that matches torch (2.13 takes torchvision 0.28): pip install torchvision"
)


def load_torchvision() -> ModuleType:
    """Import torchvision and return it, defining the two operators that its import needs if they are missing.

    A torchvision that imports normally is not changed. Without compiled operators its `nms` is ours.

    Raises:
        BackendUnavailable: torchvision is not installed, or cannot be imported for another reason.
    """
    try:
        return _import_torchvision()
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise _torchvision_unavailable_error(error) from error
    except ImportError as error:
        raise _torchvision_unavailable_error(error) from error
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    try:
        _define_missing_operators()
        vision = _import_torchvision()
    except (RuntimeError, ImportError) as error:
        raise _torchvision_unavailable_error(error) from error
    _replace_operators_of_detectors()
    return vision


def _import_torchvision() -> ModuleType:
    with warnings.catch_warnings():
        # Some versions warn that their image decoders cannot be loaded; images are decoded by PIL here.
        warnings.simplefilter("ignore", UserWarning)
        return importlib.import_module("torchvision")


@functools.cache
def _define_missing_operators() -> torch.library.Library:
    """Declare the schemas of `nms` and `qnms`; the cache keeps the library alive, which is what keeps them declared."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, operator):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def _replace_operators_of_detectors() -> None:
    """Give torchvision's detectors operators that run without compiled ones."""
    modules = [sys.modules.get(f"torchvision.ops.{name}") for name in ("boxes", "roi_align")]
    if None in modules:  # a version that arranges them in another way
        return
    boxes, align = modules
    boxes.nms = nms  # type: ignore[union-attr]
    # torchvision compiles its version in Python, which takes minutes for each type of input.
    align._roi_align = inspect.unwrap(align._roi_align)  # type: ignore[union-attr]


def _torchvision_unavailable_error(error: Exception) -> BackendUnavailable:
    text = str(error).partition("\n")[0]
    return BackendUnavailable(
        f"torchvision cannot be imported ({type(error).__name__}: {text}); {_INSTALL_HINT}"
    )
