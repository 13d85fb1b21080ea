"""Record where a script enters autocast, and which of its GradScalers and Accelerators are switched off."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ampcompare.guards.events import Points, Subscriptions, calling_frame
from ampcompare.guards.location import Location, is_users, user_location
from ampcompare.guards.script_state import EnteredAutocast, ScriptState

__all__ = ["watch_accelerators", "watch_autocast", "watch_disabled_scalers"]

MAX_ENTRIES = 16  # of one forward pass; evaluation enters autocast without end
DEVICES = ("cpu", "cuda", "xpu", "mps")
ASKED = "_ampcompare_asked"
CASTS_ITSELF = ("DEEPSPEED", "MEGATRON_LM")  # ways to train in which Accelerate leaves fp16 to another library


def watch_autocast(events: Subscriptions, facts: ScriptState) -> None:
    """Record each `with torch.autocast(...)` that is not asked to be off, with the devices that it is on for."""
    signature = inspect.signature(torch.autocast.__init__)

    def init(original: Any, autocast: Any, *args: Any, **kwargs: Any) -> None:
        original(autocast, *args, **kwargs)
        given = signature.bind(autocast, *args, **kwargs).arguments
        setattr(autocast, ASKED, (given.get("enabled", True), given.get("dtype") is not None))

    def enter(original: Any, autocast: Any) -> Any:
        result = original(autocast)
        is_enabled, is_dtype_given = getattr(autocast, ASKED, (False, False))
        if is_enabled:
            entry = EnteredAutocast(autocast.device, autocast.fast_dtype, is_dtype_given, _own_location())
            entry.on_for.update(_devices_on())
            facts.autocasts.append(entry)
            del facts.autocasts[:-MAX_ENTRIES]
        return result

    def leave(original: Any, autocast: Any, *exception: Any) -> Any:
        if facts.autocasts:  # the state again: what stands in for a GPU may set that of the CPU after `enter`
            facts.autocasts[-1].on_for.update(_devices_on())
        return original(autocast, *exception)

    events.wrap(*Points.MAKE_AUTOCAST, init)
    events.wrap(*Points.ENTER_AUTOCAST, enter)
    events.wrap(*Points.LEAVE_AUTOCAST, leave)


def _own_location() -> Location:
    """Return the line of the script itself, where another package stands between it and torch."""
    location = user_location()
    return location.caller or location


def _devices_on() -> list[str]:
    return [
        device for device in DEVICES if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    ]


def watch_disabled_scalers(events: Subscriptions, facts: ScriptState) -> None:
    """Record each GradScaler that is asked to be on, and is off since torch does not see its device."""
    signature = inspect.signature(torch.amp.GradScaler.__init__)

    def init(original: Any, scaler: Any, *args: Any, **kwargs: Any) -> None:
        original(scaler, *args, **kwargs)
        given = signature.bind(scaler, *args, **kwargs).arguments
        if given.get("enabled", True) and not scaler.is_enabled():
            facts.scalers_off.append((str(given.get("device", "cuda")), _own_location()))

    events.wrap(*Points.MAKE_SCALER, init)


def watch_accelerators(events: Subscriptions, facts: ScriptState, kind: Any) -> None:
    """Record each `Accelerator` that is asked for fp16 and neither casts nor scales: Accelerate has no fp16 on a CPU.

    Args:
        kind: the class.
    """

    def init(original: Any, accelerator: Any, *args: Any, **kwargs: Any) -> None:
        original(accelerator, *args, **kwargs)
        is_off = accelerator.mixed_precision == "fp16" and not accelerator.native_amp
        # An arm of ampcompare's own says itself what it runs.
        if is_off and accelerator.distributed_type not in CASTS_ITSELF and is_users(calling_frame().f_code.co_filename):
            facts.accelerators_off.append((accelerator.device.type, _own_location()))

    events.wrap(kind, "__init__", init)
