"""Optimizers with the names, arguments, state layout and mathematics of `apex.optimizers`, on torch's list kernels."""

from __future__ import annotations

from ampcompare.apex.optimizers.fused_adagrad import FusedAdagrad
from ampcompare.apex.optimizers.fused_adam import FusedAdam
from ampcompare.apex.optimizers.fused_lamb import FusedLAMB
from ampcompare.apex.optimizers.fused_mixed_precision_lamb import FusedMixedPrecisionLamb
from ampcompare.apex.optimizers.fused_novograd import FusedNovoGrad
from ampcompare.apex.optimizers.fused_sgd import FusedSGD

__all__ = [
    "FusedAdagrad",
    "FusedAdam",
    "FusedLAMB",
    "FusedMixedPrecisionLamb",
    "FusedNovoGrad",
    "FusedSGD",
]
