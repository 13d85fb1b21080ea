"""Whether torch can use CUDA, as far as files tell it: torch is not imported, and no driver is started."""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

__all__ = ["torch_build", "why_no_cuda"]

# NVIDIA's driver, that of Jetson boards, and the one of WSL leave at least one of these.
DRIVER_FILES = ("dev/nvidia*", "dev/nvhost*", "dev/nvmap", "dev/dxg", "proc/driver/nvidia")
FACT = re.compile(r"""^(cuda|hip|xpu)\b[^=\n]*=\s*(None|'[^']*'|"[^"]*")\s*$""", flags=re.MULTILINE)


def torch_build(folder: Path | None = None) -> dict[str, str | None] | None:
    """Return the versions of CUDA (`cuda`), ROCm (`hip`) and XPU (`xpu`) that torch is built for; None where not known.

    Args:
        folder: of the package torch; by default where an import would find it.
    """
    if folder is None:
        spec = importlib.util.find_spec("torch")
        folders = list(spec.submodule_search_locations or []) if spec is not None else []
        if not folders:
            return None
        folder = Path(folders[0])
    try:
        text = (folder / "version.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    facts = {name: None if value == "None" else value[1:-1] for name, value in FACT.findall(text)}
    return facts if "cuda" in facts else None


def why_no_cuda(
    *,
    here: bool = True,
    build: Mapping[str, str | None] | None = None,
    root: Path = Path("/"),
    environment: Mapping[str, str] | None = None,
) -> str:
    """Return why torch certainly cannot use CUDA; "" where it may.

    Args:
        here: whether it would run on this machine, and not on one that a queue chooses.
        build: as `torch_build` returns it, which is asked by default.
        root: of the file system.
        environment: variables; those of this process by default.
    """
    build = torch_build() if build is None else build
    if build is None or build.get("hip") is not None:
        return ""
    if build["cuda"] is None:
        return "this torch is built without CUDA"
    if not here:
        return ""
    visible = (os.environ if environment is None else environment).get("CUDA_VISIBLE_DEVICES")
    if visible is not None and (not visible.strip() or visible.strip().startswith("-1")):
        return f"CUDA_VISIBLE_DEVICES={visible} hides all GPUs"
    if sys.platform != "linux" or any(next(root.glob(name), None) is not None for name in DRIVER_FILES):
        return ""
    return "" if ctypes.util.find_library("cuda") else "this machine has no NVIDIA driver"
