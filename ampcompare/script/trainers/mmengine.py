"""MMEngine: `AmpOptimWrapper` casts by `torch.autocast` and has a `GradScaler`, so the arm acts there."""

from __future__ import annotations

import sys
from typing import Any

from ampcompare.base.patches import Subscriptions
from ampcompare.script.trainers.arm import Follow, TrainerContext, log_numbers

__all__ = ["MODULES"]


def _follow_amp(name: str, context: TrainerContext, events: Subscriptions) -> None:
    module: Any = sys.modules[name]

    def init(original: Any, wrapper: Any, *args: Any, **kwargs: Any) -> None:
        original(wrapper, *args, **kwargs)
        context.replaces("AmpOptimWrapper of MMEngine")

    events.wrap(module.AmpOptimWrapper, "__init__", init)


def _follow_hub(name: str, context: TrainerContext, events: Subscriptions) -> None:
    module: Any = sys.modules[name]

    def update(original: Any, hub: Any, key: str, value: Any, *args: Any, **kwargs: Any) -> None:
        log_numbers({key: value}, "MessageHub.update_scalar")
        original(hub, key, value, *args, **kwargs)

    events.wrap(module.MessageHub, "update_scalar", update)


MODULES: dict[str, Follow] = {
    "mmengine.optim.optimizer.amp_optimizer_wrapper": _follow_amp,
    "mmengine.logging.message_hub": _follow_hub,
}
