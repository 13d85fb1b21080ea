"""Override the opt level that a script passes to `amp.initialize`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ampcompare.base.errors import UnsupportedCombination
from ampcompare.guards.location import user_location
from ampcompare.script.legacy.stderr import note

if TYPE_CHECKING:
    from ampcompare.guards.events import Subscriptions

__all__ = ["override"]

# Arguments that only some levels take: `initialize` refuses them at the others.
REFUSED = {
    "O1": ("cast_model_type", "keep_batchnorm_fp32", "master_weights"),
    "O0": ("patch_torch_functions",),
    "O2": ("patch_torch_functions",),
    "O3": ("patch_torch_functions",),
    "O4": ("cast_model_type", "keep_batchnorm_fp32", "master_weights"),
    "O5": ("patch_torch_functions",),
}
# What an opt level sets, and a script may override.
REPLACED = ("cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32", "master_weights", "loss_scale")


def override(
    level: str, events: Subscriptions, *, quiet: bool = False, options: Mapping[str, Any] | None = None
) -> None:
    """Make `amp.initialize` use `level` without arguments that it refuses, with one line on stderr.

    Args:
        options: further arguments to set. With them, none of the script's own that `REPLACED` lists is kept, and
            `enabled=False` is an error.
    """

    signature = inspect.signature(sys.modules["apex.amp"].initialize)

    def initialize(original: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        requested = given.get("opt_level", "O1")
        dropped = []
        if requested != level:
            dropped = [name for name in REFUSED[level] if given.get(name) is not None]
            for name in dropped:
                del given[name]
        if options is not None:
            if given.get("enabled") is False and level != "O0":
                raise UnsupportedCombination(
                    f"{user_location()}: amp.initialize has enabled=False, so apex:{level} has no effect; run the "
                    f"script with amp enabled"
                )
            for name in REPLACED:
                given.pop(name, None)
            given.update(options)
        given["opt_level"] = level
        if not quiet:
            without = f", without the script's {', '.join(dropped)}" if dropped else ""
            note(f"--opt-level {level} instead of the script's {requested}{without}")
        return original(*bound.args, **bound.kwargs)

    for name in ("apex.amp", "apex.amp.frontend"):
        events.wrap(sys.modules[name], "initialize", initialize)
