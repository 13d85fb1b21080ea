"""From the text of an arm to its backend."""

from __future__ import annotations

from typing import Any

from ampcompare.arm import Arm
from ampcompare.errors import ConfigError
from ampcompare.precision.base import Precision
from ampcompare.registry import Registry

__all__ = ["PRECISIONS", "make_precision"]

PRECISIONS = Registry[Precision](
    "ampcompare.precisions",
    {
        "fp32": "ampcompare.precision.fp32:FP32",
        "apex": "ampcompare.precision.apex:make_apex",
        "native": "ampcompare.precision.native:Native",
        "half": "ampcompare.precision.half:make_half",
        "accelerate": "ampcompare.precision.accelerate:Accelerate",
        "fabric": "ampcompare.precision.fabric:Fabric",
        "mmengine": "ampcompare.precision.mmengine:MMEngine",
        "horovod": "ampcompare.precision.horovod:Horovod",
        "actnn": "ampcompare.precision.actnn:ActNN",
    },
)


def make_precision(arm: str | Arm, *, device: str = "cpu", **options: Any) -> Precision:
    """Build the backend of an arm.

    Args:
        arm: an arm's text such as `apex:O2,loss_scale=128`, an `Arm`, or a backend's name with its options as keywords.
        device: where the models are; Apex and autocast need to know.
        options: further options of the backend.

    Raises:
        ConfigError: unknown backend or option.
        BackendUnavailable: the backend cannot work here.
    """
    arm = Arm.parse(arm) if isinstance(arm, str) else arm
    if options:
        arm = Arm.make(arm.backend, **{**arm.options, **options})
    factory = PRECISIONS.get(arm.backend)
    try:
        return factory(device=device, **arm.options)
    except TypeError as error:
        raise ConfigError(f"arm {arm} does not fit its backend: {error}") from error
