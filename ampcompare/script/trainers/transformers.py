"""The `Trainer` of transformers: its figures; it trains by Accelerate, which is followed by itself."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from ampcompare.guards.events import Subscriptions
from ampcompare.script.trainers.logged import log_numbers
from ampcompare.script.trainers.told import Told

__all__ = ["MODULES"]


def _follow(name: str, told: Told, events: Subscriptions) -> None:
    module: Any = sys.modules[name]

    def log(original: Any, trainer: Any, logs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        log_numbers(logs, "Trainer.log")
        return original(trainer, logs, *args, **kwargs)

    events.wrap(module.Trainer, "log", log)


MODULES: dict[str, Callable[[str, Told, Subscriptions], None]] = {"transformers.trainer": _follow}
