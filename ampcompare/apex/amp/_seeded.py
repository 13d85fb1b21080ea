"""Run a backward pass that starts from the loss scale, in place of one that starts from a scaled loss."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from ._run_backward import run_from
from ._scaled_loss import ScaledLoss

__all__ = ["backward"]


def backward(loss: Any, optimizers: Any, loss_id: int = 0, delay_unscale: bool = False) -> None:
    """Do what `with scale_loss(...) as scaled: scaled.backward()` does, without the product and its node.

    The derivative of the product is the scale itself, so every gradient has the same bits.

    Args:
        loss: a scalar tensor; any other goes the long way.
        optimizers, loss_id, delay_unscale: as for `scale_loss`.
    """
    block = ScaledLoss(loss, optimizers, loss_id, delay_unscale, False)
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        with block as scaled_loss:
            scaled_loss.backward()
        return
    scale = block.prepare()
    try:
        if scale is None:
            loss.backward()
        else:
            seed = block.seed(scale, loss.device)
            if seed is None and scale != 1.0:
                (loss.float() * scale).backward()
            else:
                run_from(loss.float(), seed)
    except BaseException:
        block.__exit__(*sys.exc_info())
        raise
    block.__exit__(None, None, None)
