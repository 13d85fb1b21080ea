"""`FusedLAMB` of `apex.contrib.optimizers`: that of `apex.optimizers` without `use_nvlamb`."""

from __future__ import annotations

from typing import Any

from ampcompare.apex.optimizers.fused_lamb import FusedLAMB as _FusedLAMB

__all__ = ["FusedLAMB"]


class FusedLAMB(_FusedLAMB):
    """LAMB with the signature of `apex.contrib.optimizers.FusedLAMB`; see `ampcompare.apex.optimizers.FusedLAMB`."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
    ) -> None:
        super().__init__(
            params,
            lr,
            bias_correction,
            betas,
            eps,
            weight_decay,
            amsgrad,
            adam_w_mode,
            grad_averaging,
            set_grad_none,
            max_grad_norm,
        )
