"""Add a tested cure to a diagnosis, as code and as an arm. Needs no torch: other processes may train candidates."""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Callable, Iterable, Sequence

from ampcompare.backends.arm import Arm
from ampcompare.diagnosis.search import MAX_TRIALS, Change, Tested, scale_to_try, search
from ampcompare.records.diagnosis import Cure, Diagnosis

__all__ = ["cure_of", "verdict_of", "with_cure"]

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
    is_file = name not in linecache.cache and not os.path.exists(name)
    source = linecache.getline(os.path.abspath(name) if is_file else name, int(number)).strip()
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


UNCURED = "none of the tested modules, functions and options removes it"


def with_cure(
    found: Diagnosis,
    arm: Arm,
    run: Callable[[Arm, Sequence[str]], Tested],
    *,
    device_type: str = "cpu",
    most: int = MAX_TRIALS,
) -> Diagnosis:
    """Return a diagnosis with the smallest change that removes its faults; as it is, if it has none.

    Args:
        run: trains for some steps under an arm, with lines in fp32.
        device_type: "cpu" or "cuda", for code to paste.
        most: runs that are allowed.
    """
    if not found.faults:
        return found
    result = search(arm, found.faults, scale_to_try(found.headroom), run, found.modules, most=most)
    cure = None
    if result.change is not None:
        cure = cure_of(arm, result.change, result.functions, device_type)
    verdict = verdict_of(arm, found, cure, tested=bool(result.trials))
    return found.model_copy(update={"verdict": verdict, "trials": result.trials, "cure": cure})


def verdict_of(arm: Arm, found: Diagnosis, cure: Cure | None = None, *, tested: bool = False) -> str:
    """Return the result in one sentence.

    Args:
        tested: whether candidates of a cure were trained.
    """
    if not found.faults:
        steps = f"{found.steps} {'step' if found.steps == 1 else 'steps'}"
        skipped = f", {found.skipped} of them skipped while the loss scale settled" if found.skipped else ""
        failure = f"; then the script failed: {found.failure}" if found.failure else ""
        return f"{arm}: no fault in {steps}{skipped}{failure}"
    first = found.faults[0]
    where = f" ({first.place.where})" if first.place.where else ""
    if first.kind == "not precision":
        return f"{arm}: no fault of precision: at step {first.step} {first.text}{where}"
    why = f", as {first.reason}" if first.reason else ""
    verdict = f"{arm}: {first.kind} at step {first.step}: {first.text}{where}{why}"
    if cure is None:
        return f"{verdict}; {UNCURED}" if tested else verdict
    return f"{verdict}; {' and '.join([*cure.keeps, *([cure.option] if cure.option else [])])} {_verb(cure)} it"


def _verb(cure: Cure) -> str:
    return "in fp32 cures" if cure.keeps and not cure.option else "cures"
