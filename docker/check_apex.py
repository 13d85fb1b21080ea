"""Fail unless `apex` here is NVIDIA's with `apex.amp`, its kernels, and every name of it that ampcompare drives.

Made for the build of an image: it needs the standard library and no GPU. The files are looked at first, because they
tell the cases apart; then a child process imports them. Exit code 0 with one line, or 1 with the reason and the remedy.
"""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NoReturn

SURFACE = {
    "apex.amp": (
        "_amp_state",
        "disable_casts",
        "initialize",
        "load_state_dict",
        "master_params",
        "scale_loss",
        "state_dict",
    ),
    "apex.normalization": ("FusedLayerNorm",),
    "apex.optimizers": ("FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedNovoGrad", "FusedSGD"),
    "apex.parallel": ("DistributedDataParallel", "Reducer", "SyncBatchNorm", "convert_syncbn_model"),
}
KERNELS = ("amp_C", "apex_C", "fused_layer_norm_cuda", "syncbn")
REMEDY = "take a BASE_IMAGE that ships Apex with apex.amp, such as release 25.03 of NVIDIA's PyTorch image"
# What an import says where the driver, and with it the GPU, is missing: true of every build, and no fault of Apex.
NO_DRIVER = ("libcuda.so.1", "NVIDIA driver")
IMPORT_SECONDS = 300


def fail(reason: str) -> NoReturn:
    """End with exit code 1 and one line on standard error."""
    sys.exit(f"check_apex: {reason}: {REMEDY}")


def find_package() -> Path:
    """Return the folder of `apex` without running any of it."""
    spec = PathFinder.find_spec("apex")
    if spec is None:
        fail("apex is not installed")
    if spec.origin is None:
        fail(
            f"apex is a folder without __init__.py ({next(iter(spec.submodule_search_locations or []), 'unknown')})"
        )
    package = Path(spec.origin).parent
    if (package / "amp" / "__init__.py").is_file():
        return package
    if any(
        (package / folder).is_dir()
        for folder in ("contrib", "multi_tensor_apply", "normalization", "optimizers")
    ):
        fail(f"NVIDIA Apex in {package} has no apex.amp, which upstream removed in May 2025")
    fail(f"apex in {package} is not NVIDIA's but an unrelated package of that name")


def imported_names() -> dict[str, list[str]]:
    """Import the surface in this process and return, by module, the names that are not there."""
    missing = {}
    for module, names in SURFACE.items():
        found = importlib.import_module(module)
        missing[module] = [name for name in names if not hasattr(found, name)]
    return missing


def written_names(package: Path) -> dict[str, list[str]]:
    """Read the sources instead, and return, by module, the names that they neither import nor bind."""
    missing = {}
    for module, names in SURFACE.items():
        file = package.joinpath(*module.split(".")[1:], "__init__.py")
        bound = set()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if file.is_file() else ():
            if isinstance(node, ast.ImportFrom | ast.Import):
                bound |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ClassDef | ast.FunctionDef):
                bound.add(node.name)
            elif isinstance(node, ast.Assign):
                bound |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        missing[module] = [name for name in names if name not in bound]
    return missing


def check() -> str:
    """Return the line that says what was found and how it was proven."""
    package = find_package()
    absent = [name for name in KERNELS if PathFinder.find_spec(name) is None]
    if absent:
        fail(f"Apex in {package} was built without its kernels {', '.join(absent)}")
    try:
        # This file again, so that the child finds modules exactly where this process does.
        child = subprocess.run(
            [sys.executable, __file__, "--import"],
            capture_output=True,
            text=True,
            timeout=IMPORT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        fail(f"importing apex from {package} took more than {IMPORT_SECONDS} s")
    if child.returncode == 0:
        missing, proof = json.loads(child.stdout.splitlines()[-1]), "imported"
    elif any(sign in child.stderr for sign in NO_DRIVER):
        missing, proof = (
            written_names(package),
            "read from its sources, as importing it needs the NVIDIA driver",
        )
    else:
        last = (child.stderr.strip().splitlines() or ["no message"])[-1]
        fail(f"importing apex from {package} failed with exit code {child.returncode}: {last}")
    gaps = [f"{module}.{name}" for module, names in missing.items() for name in names]
    if gaps:
        fail(f"Apex in {package} lacks {', '.join(gaps)}")
    count = sum(len(names) for names in SURFACE.values())
    return f"check_apex: {package} has apex.amp: {count} names {proof}; kernels {', '.join(KERNELS)}"


if __name__ == "__main__":
    if sys.argv[1:] == ["--import"]:
        sys.stdout.write("\n" + json.dumps(imported_names()) + "\n")
    else:
        sys.stdout.write(check() + "\n")
