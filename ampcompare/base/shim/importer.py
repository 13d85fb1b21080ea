"""Who asks for a module: the user's own code, a library, or a probe that would only know whether it is there."""

import os
import re
import sys
from collections.abc import Collection
from types import FrameType
from typing import Literal

from ampcompare.base.python_folders import STANDARD_LIBRARY

Importer = Literal["own", "library", "probe"]
# They look for Apex to behave differently with it, and are also run from clones, which lie among a user's own files.
PROBING = frozenset({
    "accelerate", "deepspeed", "fairseq", "flash_attn", "lightning", "lightning_fabric", "megatron", "mmcv", "mmengine",
    "nemo", "peft", "pytorch_lightning", "timm", "transformer_engine", "transformers", "transformers_modules", "trl",
    "unsloth",
})  # fmt: skip
ROOM = os.path.dirname(os.path.abspath(__file__)) + os.sep
PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(ROOM))) + os.sep
INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]")
# They import on behalf of who called them: a name that was stored, an object of a checkpoint.
CARRIERS = ("_ampcompare_shim", "importlib", "pickle", "runpy", "torch", "unittest")
PROBES = ("importlib.util", "importlib.metadata", "pkgutil")


def importer_asking_for_apex(frame: FrameType | None, answered_libraries: Collection[str] = ()) -> Importer:
    """Return who asks for a module.

    Args:
        frame: the innermost frame, of the import system or of what called it.
        answered_libraries: libraries, by the names that they are imported by, that count as the user's own code.
    """
    while frame is not None:
        name = frame.f_globals.get("__name__") or ""
        top = name.partition(".")[0]
        file = frame.f_code.co_filename
        if name in PROBES:
            return "probe"
        if top in answered_libraries:
            return "own"
        if not (file.startswith(("<frozen ", ROOM)) or top in CARRIERS or _is_standard_library_file(file)):
            is_librarys = top in PROBING or file.startswith(PACKAGE) or INSTALLED.search(file)
            return "library" if is_librarys else "own"
        frame = frame.f_back
    return "library"


def _is_standard_library_file(file: str) -> bool:
    return os.path.realpath(file).startswith(STANDARD_LIBRARY) and not INSTALLED.search(file)


def calling_frame() -> FrameType | None:
    """Return the frame of the caller of the function that calls this."""
    return sys._getframe(2)
