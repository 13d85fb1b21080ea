"""Watch a training script for the usual mistakes in mixed precision, with file and line of the script.

    import ampcompare.guards

    ampcompare.guards.install()

`ampcompare exec` does this itself. `docs/guards.md` lists the guards and what they cannot detect.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ampcompare.base.guard_modes import GuardMode
from ampcompare.base.import_hook import ImportHook
from ampcompare.guards.checks import GUARDS
from ampcompare.guards.detection.detector import Guard
from ampcompare.guards.detection.reporting import GuardWarning, Violation, ViolationSink, warn_of_violation

if TYPE_CHECKING:
    from ampcompare.guards.hooks import GuardHooks

__all__ = ["GUARDS", "Guard", "GuardWarning", "Guards", "Violation", "install"]

AMP_MODULES = ("ampcompare.apex.amp", "apex.amp")
ACCELERATE = "accelerate.accelerator"


class Guards:
    """The active guards. As a context manager they are removed at the end of the block."""

    def __init__(self, sink: ViolationSink, passes: int | None) -> None:
        self._sink = sink
        self._passes = passes
        self._hooks: GuardHooks | None = None
        amps = {name: functools.partial(self._watch_amp, name) for name in AMP_MODULES}
        self._imports = ImportHook({"torch": self._watch_torch, ACCELERATE: self._watch_accelerate, **amps})
        self._imports.begin()

    def _watch_torch(self) -> None:
        importlib.import_module("torch")  # `apex.amp` may be imported before it
        if self._hooks is None:
            self._hooks = importlib.import_module("ampcompare.guards.hooks").GuardHooks(
                self._sink, self._passes
            )

    def _watch_amp(self, name: str) -> None:
        self._watch_torch()
        assert self._hooks is not None
        self._hooks.watch_amp(sys.modules[name])

    def _watch_accelerate(self) -> None:
        self._watch_torch()
        assert self._hooks is not None
        self._hooks.watch_accelerate(sys.modules[ACCELERATE].Accelerator)

    def remove(self) -> None:
        self._imports.end()
        if self._hooks is not None:
            self._hooks.end()
            self._hooks = None

    def __enter__(self) -> Guards:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.remove()


def install(
    *, strict: bool = False, say: Callable[[Violation], None] = warn_of_violation, passes: int | None = None
) -> Guards:
    """Watch torch, and Apex's or ampcompare's `amp`, in this process; this does not import torch.

    Args:
        strict: raise `ampcompare.base.errors.GuardError` instead of warning.
        say: receives each violation; by default a `GuardWarning` at the user's line.
        passes: the guards remove themselves at the step that follows this many backward passes; None for never.

    Returns:
        The guards, whose `remove()` restores everything.
    """
    return Guards(ViolationSink(say, strict=strict), passes)


def install_in_mode(
    mode: GuardMode, *, say: Callable[[Violation], None] = warn_of_violation, passes: int | None = None
) -> Guards | None:
    """Do as `install` in a mode that a user has chosen: strict in that of its name, and nothing if it is "off".

    Returns:
        The guards; None if there are none.
    """
    return None if mode == "off" else install(strict=mode == "strict", say=say, passes=passes)
