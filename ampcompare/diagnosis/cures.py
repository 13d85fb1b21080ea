"""Add a tested cure to a diagnosis. Needs no torch: candidates may be trained by other processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ampcompare.backends.arm import Arm
from ampcompare.diagnosis.advice import cure_of
from ampcompare.diagnosis.search import MAX_TRIALS, Tested, scale_to_try, search
from ampcompare.records.diagnosis import Cure, Diagnosis

__all__ = ["verdict_of", "with_cure"]

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
