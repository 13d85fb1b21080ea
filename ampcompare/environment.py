"""What this machine offers, each answer with its reason. Nothing here imports torch or Apex.

`find_spec("apex.amp")` would execute `apex`, which may be broken, so an installation is told apart by its files.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from ampcompare.version import __version__

__all__ = ["ApexInstall", "fingerprint", "installed_version", "probe_apex"]

Kind = Literal["absent", "namespace", "impostor", "no_amp", "python_only", "full"]
REMEDY = "use --engine compat, or install NVIDIA Apex at tag 25.05"
NVIDIA_FOLDERS = ("normalization", "optimizers", "multi_tensor_apply", "contrib")


@dataclass(frozen=True)
class ApexInstall:
    """What stands under the name `apex` on the import path.

    Attributes:
        kind: absent; namespace (a folder without `__init__.py`, such as a clone); impostor (the unrelated package of
            PyPI); no_amp (NVIDIA's after May 2025); python_only (no compiled kernels); full.
        path: folder of the package, if any.
        version: of the installed distribution, or "unknown".
        reason: one sentence, with the remedy where `apex.amp` is not there.
    """

    kind: Kind
    path: Path | None
    version: str
    reason: str

    @property
    def has_amp(self) -> bool:
        """Whether `apex.amp` can be expected to import."""
        return self.kind in ("python_only", "full")


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def probe_apex(path: Sequence[str] | None = None) -> ApexInstall:
    """Tell what `import apex` would find, by files and metadata alone.

    Args:
        path: folders to search, `sys.path` by default.
    """
    folders = [Path(entry or ".") for entry in (sys.path if path is None else path)]
    namespace = None
    for folder in folders:
        package = folder / "apex"
        if (package / "__init__.py").is_file():
            return _describe(package, folders)
        if (folder / "apex.py").is_file():
            return ApexInstall(
                "impostor",
                folder / "apex.py",
                "unknown",
                f"{folder / 'apex.py'} is a file named apex, not NVIDIA Apex; {REMEDY}",
            )
        if package.is_dir() and namespace is None:
            namespace = package
    if namespace is not None:
        hint = (
            "a clone of the repository; install it"
            if (namespace / "setup.py").is_file()
            else "a folder without __init__.py"
        )
        return ApexInstall("namespace", namespace, "unknown", f"{namespace} is {hint}; {REMEDY}")
    return ApexInstall("absent", None, "unknown", f"apex is not installed; {REMEDY}")


def _describe(package: Path, folders: Sequence[Path]) -> ApexInstall:
    version = installed_version("apex") or "unknown"
    if (package / "amp" / "__init__.py").is_file():
        kernels = any(
            next(folder.glob("amp_C*.so"), None) or next(folder.glob("amp_C*.pyd"), None)
            for folder in folders
            if folder.is_dir()
        )
        if kernels:
            return ApexInstall("full", package, version, f"NVIDIA Apex {version} with compiled kernels in {package}")
        return ApexInstall(
            "python_only",
            package,
            version,
            f"NVIDIA Apex {version} in {package}, Python only: no compiled kernels (amp_C)",
        )
    if any((package / folder).is_dir() for folder in NVIDIA_FOLDERS):
        return ApexInstall(
            "no_amp",
            package,
            version,
            f"apex {version} is installed but has no apex.amp (removed upstream in May 2025); {REMEDY}",
        )
    return ApexInstall(
        "impostor",
        package,
        version,
        f"apex {version} in {package} is the unrelated package of PyPI: pip uninstall apex, then {REMEDY}",
    )


def fingerprint() -> dict[str, Any]:
    """Return what the result of a cell depends on outside its configuration: versions and processor."""
    return {
        "ampcompare": __version__,
        "torch": installed_version("torch"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processor": _processor(),
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
