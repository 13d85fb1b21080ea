"""A cure as code to paste, and as an arm that `compare` takes."""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Iterable, Sequence

from ampcompare.backends.arm import Arm
from ampcompare.diagnosis.search import Change
from ampcompare.records.diagnosis import Cure

__all__ = ["cure_of"]

NARROWING = re.compile(r"\.(half|bfloat16)\(|torch\.(b?float16|half)\b")


def cure_of(arm: Arm, change: Change, functions: Sequence[str], device: str) -> Cure:
    """Return the cure that a change is.

    Args:
        functions: names such as torch.exp that its lines call.
    """
    changed = change.applied_to(arm)
    lines = [*_arm_code(arm, changed, change), *(code for line in change.lines for code in _line_code(line, device))]
    if change.lines and arm.options.get("opt_level") == "O1":
        lines += ["# or, before amp.initialize, everywhere:", *_registered(functions)]
    return Cure(
        keeps=[*change.modules, *change.lines],
        option=", ".join(f"{name}={value}" for name, value in change.options),
        arm=str(changed) if changed != arm and not change.lines else None,
        code="\n".join(lines),
    )


def _arm_code(arm: Arm, changed: Arm, change: Change) -> list[str]:
    if changed == arm:
        return []
    lines = [f"# as an arm: {changed}"]
    if arm.backend == "native":
        for name in change.modules:
            lines += [
                f"# around the call of {name}:",
                "with torch.autocast(device_type, enabled=False):",
                f"    output = {_attribute(name)}(input.float())",
            ]
    elif change.modules:
        lines += [f"{_attribute(name)}.float()  # and cast its inputs with .float()" for name in change.modules]
    return lines


def _attribute(name: str) -> str:
    """Return a dotted name as code: "layers.0.norm" as model.layers[0].norm, "Net:norm" as net.norm."""
    model, _, inner = name.rpartition(":")
    parts = (f"[{part}]" if part.isdigit() else f".{part}" for part in inner.split("."))
    return "".join([model.lower() or "model", *parts])


def _line_code(place: str, device: str) -> list[str]:
    """Return a line of the user's code in a block without casts."""
    name, _, number = place.rpartition(":")
    source = linecache.getline(name if os.path.exists(name) else os.path.abspath(name), int(number)).strip()
    without = " and without its cast to 16 bits" if NARROWING.search(source) else ""
    return [
        f"# {place}, with .float() on its 16-bit inputs{without}:",
        f'with torch.autocast("{device}", enabled=False):',
        f"    {source or '...'}",
    ]


def _registered(functions: Iterable[str]) -> list[str]:
    """Return the registrations of functions; a method is one of torch.Tensor."""
    return [
        f'amp.register_float_function({owner}, "{name}")'
        for owner, _, name in (function.rpartition(".") for function in functions)
        if owner
    ]
