"""What an error means if torch lacks a name which the package uses: some are private, and no version promises them."""

import os
import types
from pathlib import Path
from traceback import walk_tb

from ampcompare.base.errors import EnvironmentUnfit
from ampcompare.base.version import NEWEST_TORCH, __version__

PACKAGE = str(Path(__file__).parents[2]) + os.sep


def own_missing_torch_name_error(error: BaseException) -> EnvironmentUnfit | None:
    """Return what an error means if this package asked a module of torch for a name that is not there; else None."""
    name = ""
    if isinstance(error, AttributeError) and isinstance(error.obj, types.ModuleType):
        name = f"{error.obj.__name__}.{error.name}"
    elif isinstance(error, ImportError):
        parts = (error.name, getattr(error, "name_from", None))  # the second from Python 3.12 on
        name = ".".join(filter(None, parts))
    # A module may look for names itself, by a function of this name.
    places = [
        frame.f_code for frame, _ in walk_tb(error.__traceback__) if frame.f_code.co_name != "__getattr__"
    ]
    if not name.startswith("torch.") or not places or not places[-1].co_filename.startswith(PACKAGE):
        return None
    import torch

    newest = "{}.{}".format(*NEWEST_TORCH)
    return EnvironmentUnfit(
        f"torch {torch.__version__} lacks {name}, which ampcompare {__version__} needs; the newest version that was "
        f'run is {newest}: pip install "torch=={newest}.*" torchvision'
    )
