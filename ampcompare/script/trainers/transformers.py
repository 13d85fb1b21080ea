"""The `Trainer` of transformers: its figures; it trains by Accelerate, which is followed by itself."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from ampcompare.guards.patches import Patches
from ampcompare.script.trainers.logged import log_numbers
from ampcompare.script.trainers.told import Told

__all__ = ["MODULES"]


def _follow(name: str, told: Told, patches: Patches) -> None:
    module: Any = sys.modules[name]

    def log(original: Any, trainer: Any, logs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        log_numbers(logs, "Trainer.log")
        return original(trainer, logs, *args, **kwargs)

    patches.wrap(module.Trainer, "log", log)


MODULES: dict[str, Callable[[str, Told, Patches], None]] = {"transformers.trainer": _follow}
