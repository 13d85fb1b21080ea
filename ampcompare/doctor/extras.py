"""Optional packages: there or not, and what they are for."""

from __future__ import annotations

from ampcompare.doctor.finding import Finding
from ampcompare.environment import installed_version

__all__ = ["EXTRAS", "examine_extras"]

# Extra: its distributions, and what it adds.
EXTRAS: dict[str, tuple[tuple[str, ...], str]] = {
    "html": (("jinja2", "plotly"), "report.html with figures"),
    "gpu": (("nvidia-ml-py",), "the GPU's clock, temperature and other processes beside times"),
    "tensorboard": (("tensorboard",), "curves as event files"),
    "slurm": (("submitit",), "cells as jobs of Slurm"),
    "accelerate": (("accelerate",), "the arms accelerate:..."),
    "fabric": (("lightning-fabric",), "the arms fabric:..."),
    "mmengine": (("mmengine",), "the arms mmengine:..."),
}


def examine_extras() -> list[Finding]:
    """Tell of each extra whether its distributions are installed."""
    findings = []
    for name, (distributions, purpose) in EXTRAS.items():
        versions = {distribution: installed_version(distribution) for distribution in distributions}
        missing = [distribution for distribution, version in versions.items() if version is None]
        if missing:
            remedy = (f"pip install {' '.join(missing)}",)
            findings.append(Finding("Extras", name, "not installed", "note", purpose, remedy, {"missing": missing}))
        else:
            value = ", ".join(f"{distribution} {version}" for distribution, version in versions.items())
            findings.append(Finding("Extras", name, value, "ok", purpose, facts={"missing": []}))
    return findings
