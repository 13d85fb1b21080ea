"""The optimizers of 2018 that scale losses themselves, with the names of `apex.contrib.optimizers`."""

from ampcompare.apex.contrib.optimizers.fp16_optimizer import FP16_Optimizer
from ampcompare.apex.contrib.optimizers.fused_adam import FusedAdam

__all__ = ["FP16_Optimizer", "FusedAdam"]
