"""Wrap an optimizer as Apex's API before `initialize` did: `amp.init().wrap_optimizer(optimizer)`.

Source: Apex 25.05, `apex/amp/opt.py`, whose `scale_loss` raises since `unscale` took other arguments.
"""

from contextlib import AbstractContextManager
from typing import Any

from ._engine.errors import AmpScalingError
from .scaler import LossScaler


class OptimWrapper:
    """Scale losses for the wrapped optimizer, and forward everything else to it."""

    def __init__(self, optimizer: Any, amp_handle: Any, num_loss: int) -> None:
        self._optimizer = optimizer
        self._amp_handle = amp_handle
        self._num_loss = num_loss
        self._loss_idx = 0
        self._loss_scaler = [LossScaler("dynamic") for _ in range(num_loss)]

    def scale_loss(self, loss: Any) -> AbstractContextManager[Any]:
        """Yield the scaled loss; on exit unscale the gradients of this pass, and skip the step if they overflowed.

        Raises:
            AmpScalingError: more calls since the last step than `num_loss`, or strict mode (a RuntimeError).
        """
        if self._loss_idx >= self._num_loss:
            raise AmpScalingError(
                f"optimizer.scale_loss was called more than num_loss={self._num_loss} times since the last step; "
                "pass wrap_optimizer the number of losses."
            )
        scaler = self._loss_scaler[self._loss_idx]
        self._loss_idx += 1
        block: AbstractContextManager[Any] = self._amp_handle._scale_block(loss, self._optimizer, scaler)
        return block

    def step(self, closure: Any = None) -> Any:
        """Step the wrapped optimizer."""
        if closure is not None:
            raise NotImplementedError("The optimizer wrapper of the old amp API does not take a closure.")
        self._loss_idx = 0
        return self._optimizer.step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_optimizer"], name)

    def __repr__(self) -> str:
        return repr(self._optimizer)
