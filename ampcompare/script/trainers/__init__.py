"""Libraries that train for a script, each followed from its import on.

Some of their own precision an arm replaces; what it cannot replace it refuses.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ampcompare.backends.arm import Arm
from ampcompare.guards.events import Subscriptions
from ampcompare.guards.import_hook import ImportHook
from ampcompare.script.legacy.record.recorder import Rows
from ampcompare.script.trainers import accelerate, lightning, mmengine
from ampcompare.script.trainers.arm import Through, Told

__all__ = ["Trainers"]

LIBRARIES = (accelerate, lightning, mmengine)


class Trainers:
    """Lets an arm decide where a library has a precision of its own.

    Args:
        arm: under `script` libraries keep theirs; what they log is noted all the same.
        half: the 16-bit type of the arm's autocast; None if it has none.
        rows: get a note of each precision that the arm replaces; None records nothing.
        through: of `PlainScript`.
    """

    def __init__(self, arm: Arm, half: torch.dtype | None, rows: Rows | None, through: Through) -> None:
        self._told = Told(arm, half, rows, through)

    def install(self, events: Subscriptions) -> None:
        """Follow from now on."""
        awaited: dict[str, Any] = {}
        for library in LIBRARIES:
            for name, follow in library.MODULES.items():
                awaited[name] = functools.partial(follow, name, self._told, events)
        imports = ImportHook(awaited)
        events.at_end(imports.end)
        imports.begin()
