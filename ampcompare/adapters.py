"""The backends that hand training to another library: what they need, and what they run on which device.

Nothing here imports such a library. What a table says of them is what `list`, `doctor` and `explain` know beforehand; a
run asks the library itself, and its record holds the answer.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from dataclasses import dataclass
from types import ModuleType

from ampcompare.arm import Arm
from ampcompare.environment import installed_version
from ampcompare.errors import BackendUnavailable

__all__ = ["ADAPTERS", "Adapter", "Expected", "adapter_of", "expected", "load", "twin_of"]


@dataclass(frozen=True)
class Adapter:
    """What one such backend needs.

    Attributes:
        modules: names under which its library is imported; the first that is there is taken.
        distributions: names under which it is installed, in the order of `modules`.
        install: a line for a shell.
        remark: what stands in the way of the installation, if anything does.
    """

    modules: tuple[str, ...]
    distributions: tuple[str, ...]
    install: str
    remark: str = ""

    def found(self) -> tuple[str, str, str] | None:
        """Return module, distribution and version of what is installed, without importing it; None where nothing is."""
        for module, distribution in zip(self.modules, self.distributions, strict=True):
            if importlib.util.find_spec(module.partition(".")[0]) is not None:
                return module, distribution, installed_version(distribution) or "of unknown version"
        return None

    def missing(self) -> str:
        """Return why it cannot be used, with what to type; "" where it is installed."""
        if self.found() is not None:
            return ""
        return f"not installed: {self.install}" + (f" ({self.remark})" if self.remark else "")


ADAPTERS: dict[str, Adapter] = {
    "accelerate": Adapter(("accelerate",), ("accelerate",), "pip install accelerate"),
    "fabric": Adapter(
        ("lightning_fabric", "lightning.fabric"), ("lightning-fabric", "lightning"), "pip install lightning-fabric"
    ),
    "mmengine": Adapter(("mmengine.optim",), ("mmengine",), "pip install mmengine"),
    "horovod": Adapter(
        ("horovod.torch",),
        ("horovod",),
        "HOROVOD_WITH_PYTORCH=1 pip install --no-build-isolation horovod",
        "it is built on your machine; its last release, 0.28.1, compiles as C++14, and torch 2.13 needs C++17",
    ),
}


@dataclass(frozen=True)
class Expected:
    """What an arm will run.

    Attributes:
        arm: our arm of that precision; None where it cannot run.
        reason: why it is not the one asked for, or why it cannot run.
    """

    arm: str | None
    reason: str = ""


# What is asked for, in our own arms.
TWINS = {
    "accelerate": {"no": "fp32", "fp16": "native:fp16", "bf16": "native:bf16"},
    "fabric": {
        "32-true": "fp32",
        "16-mixed": "native:fp16",
        "bf16-mixed": "native:bf16",
        "16-true": "half",
        "bf16-true": "half:dtype=bf16",
    },
    "mmengine": {"float32": "fp32", "float16": "native:fp16", "bfloat16": "native:bf16"},
}


def adapter_of(arm: Arm) -> Adapter | None:
    """Return what the library behind `arm` needs; None for a backend that needs torch alone, or is not ours."""
    return ADAPTERS.get(arm.backend)


def twin_of(backend: str, asked: str) -> str:
    """Return our arm of the precision that a library was asked for."""
    return TWINS[backend][asked]


def expected(arm: Arm, device: str) -> Expected | None:
    """Return what `arm` will run on "cpu" or "cuda"; None for the backends that run what they are asked.

    Source: accelerate 1.15, lightning-fabric 2.6, mmengine 0.10; a test holds this against what they do.
    """
    options = arm.options
    if arm.backend == "actnn":
        return Expected(str(options.get("over", "fp32")).replace("+", ","))
    if arm.backend == "horovod":
        return Expected("fp32")
    if arm.backend not in TWINS:
        return None
    asked = str(next(iter(options.values())))
    twin = twin_of(arm.backend, asked)
    if device == "cpu" and twin == "native:fp16":
        if arm.backend == "accelerate":
            return Expected("fp32", "accelerate has no fp16 on a CPU, and trains in fp32 without saying so")
        if arm.backend == "fabric":
            return Expected("native:bf16", "Fabric has no 16-mixed on a CPU, and takes bf16-mixed")
    if device == "cpu" and arm.backend == "mmengine" and twin != "fp32":
        return Expected(None, "AmpOptimWrapper of mmengine runs on a GPU only; mmengine:fp32 runs here")
    return Expected(twin)


def load(backend: str) -> tuple[ModuleType, str, str]:
    """Import the library of a backend; return it with the name and version of its distribution.

    Raises:
        BackendUnavailable: it is not installed, or its import fails.
    """
    adapter = ADAPTERS[backend]
    found = adapter.found()
    if found is None:
        raise BackendUnavailable(f"{backend} is {adapter.missing()}")
    name, library, version = found
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what it imports in its turn, which is no user's affair
            return importlib.import_module(name), library, version
    except Exception as error:  # a library that is built for another torch may raise anything
        raise BackendUnavailable(
            f"{name} {version} is installed and cannot be imported: {type(error).__name__}: {error}; {adapter.install}"
        ) from error
