"""Wrap an optimizer as Apex's API before `initialize` did; kept for scripts that only pass it through.

Source: Apex 25.05, `apex/amp/opt.py`.
"""

from __future__ import annotations

from typing import Any

from ._engine.errors import AmpScalingError

__all__ = ["OptimWrapper"]


class OptimWrapper:
    """Forward everything to the wrapped optimizer."""

    def __init__(self, optimizer: Any, amp_handle: Any, num_loss: int) -> None:
        self._optimizer = optimizer
        self._amp_handle = amp_handle
        self._num_loss = num_loss

    def scale_loss(self, loss: Any) -> Any:
        """Raise: this form of the API is gone.

        Raises:
            AmpScalingError: always (a RuntimeError).
        """
        raise AmpScalingError(
            "optimizer.scale_loss of the old amp API is gone.  Use amp.initialize and amp.scale_loss(loss, optimizer)."
        )

    def step(self, closure: Any = None) -> Any:
        """Step the wrapped optimizer."""
        if closure is not None:
            raise NotImplementedError("The optimizer wrapper of the old amp API does not take a closure.")
        return self._optimizer.step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_optimizer"], name)

    def __repr__(self) -> str:
        return repr(self._optimizer)
