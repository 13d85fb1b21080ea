"""Installed versions, and what the result of a cell depends on outside its configuration; torch is not imported."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from ampcompare.base.version import __version__

__all__ = ["fingerprint", "host_name", "installed_version"]


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def fingerprint() -> dict[str, Any]:
    """Return what the result of a cell depends on outside its configuration: versions and processor."""
    return {
        "ampcompare": __version__,
        "torch": installed_version("torch"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processor": _processor(),
    }


def host_name() -> str:
    """Return the name of this machine."""
    return platform.node() or "unknown"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
