"""Optimizers with the names, arguments, state layout and mathematics of `apex.optimizers`, on torch's list kernels."""

from typing import Any

from ampcompare.apex.optimizers.fused_adagrad import FusedAdagrad
from ampcompare.apex.optimizers.fused_adam import FusedAdam
from ampcompare.apex.optimizers.fused_lamb import FusedLAMB
from ampcompare.apex.optimizers.fused_novograd import FusedNovoGrad
from ampcompare.apex.optimizers.fused_sgd import FusedSGD

__all__ = [
    "FusedAdagrad",
    "FusedAdam",
    "FusedLAMB",
    "FusedNovoGrad",
    "FusedSGD",
]


def __getattr__(name: str) -> Any:
    if name == "FP16_Optimizer":  # here until 2019, and not in Apex 25.05
        # Only now: the package with the optimizers of 2018 is built on this one.
        from ampcompare.apex.contrib.optimizers import FP16_Optimizer

        return FP16_Optimizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
