"""Let warnings of torch point at the script: torch counts frames, and functions of the guards stand in between."""

from __future__ import annotations

import sys
import warnings
from types import FrameType
from typing import Any

import torch.amp.autocast_mode
import torch.amp.grad_scaler
import torch.optim.lr_scheduler

from ampcompare.guards.events import Subscriptions
from ampcompare.guards.location import is_users

__all__ = ["point_at_script"]

MODULES = (torch.amp.autocast_mode, torch.amp.grad_scaler, torch.optim.lr_scheduler)


def point_at_script(events: Subscriptions) -> None:
    """Let what the watched modules of torch warn of name the innermost line outside torch and ampcompare."""
    for module in MODULES:
        events.put(module, "warnings", _Warnings())


class _Warnings:
    """The module `warnings`, for a module of torch."""

    def __getattr__(self, name: str) -> Any:
        return getattr(warnings, name)

    def warn(self, message: Any, category: Any = None, stacklevel: int = 1, source: Any = None) -> None:
        """Warn at the script's line; where torch says so if no script is running."""
        frame: FrameType | None = sys._getframe(1)
        level = 2  # of torch itself; 1 is this function
        while frame is not None and not is_users(frame.f_code.co_filename):
            frame, level = frame.f_back, level + 1
        warnings.warn(message, category, stacklevel + 1 if frame is None else level, source)
