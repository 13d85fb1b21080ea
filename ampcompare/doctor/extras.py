"""Optional packages: there or not, and what they are for."""

from __future__ import annotations

from ampcompare.backends.catalog import BUILT_IN
from ampcompare.base.environment.versions import installed_version
from ampcompare.doctor.finding import Check

__all__ = ["EXTRAS", "examine_extras"]

# Extra: its distributions, and what it adds.
EXTRAS: dict[str, tuple[tuple[str, ...], str]] = {
    "html": (("jinja2",), "report.html, the report as a page"),
    "gpu": (("nvidia-ml-py",), "the GPU's clock, temperature and other processes along with times"),
    "tensorboard": (("tensorboard",), "curves as event files"),
    "wandb": (("wandb",), "records as runs of W&B: ampcompare export --to wandb"),
    "mlflow": (("mlflow-skinny",), "records as runs of MLflow: ampcompare export --to mlflow"),
    "slurm": (("submitit",), "cells as jobs of Slurm"),
    "timm": (("timm",), "its models by name: --arch timm:resnet50"),
    "hf": (("transformers",), "its language models by name: --task lm --arch hf:gpt2"),
    "triton": (("triton",), "unscaling and master copies of O2 in two kernels, on a GPU"),
    **{
        spec.library.extra: (spec.library.distributions[:1], f"the arms {name}:...")
        for name, spec in BUILT_IN.items()
        if spec.library is not None and spec.library.extra
    },
}


def examine_extras() -> list[Check]:
    """Check for each extra whether its distributions are installed."""
    findings = []
    for name, (distributions, purpose) in EXTRAS.items():
        versions = {distribution: installed_version(distribution) for distribution in distributions}
        missing = [distribution for distribution, version in versions.items() if version is None]
        if missing:
            remedy = (f"pip install {' '.join(missing)}",)
            findings.append(Check("Extras", name, "not installed", "note", purpose, remedy, {"missing": missing}))
        else:
            value = ", ".join(f"{distribution} {version}" for distribution, version in versions.items())
            findings.append(Check("Extras", name, value, "ok", purpose, facts={"missing": []}))
    return findings
