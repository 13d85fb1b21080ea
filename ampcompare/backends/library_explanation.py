"""The explanation shared by all backends that delegate training to another library."""

from __future__ import annotations

from ampcompare.backends.explanation import ArmExplanation
from ampcompare.backends.library import Library
from ampcompare.backends.spec import EffectiveArm

__all__ = ["explain_library"]


def explain_library(
    name: str,
    library: Library,
    does: tuple[tuple[str, str], ...],
    script: tuple[str, ...],
    *,
    on_gpu: EffectiveArm,
    on_cpu: EffectiveArm,
) -> ArmExplanation:
    """Return the explanation of an arm that a library runs.

    Args:
        name: of the library, as users know it.
        does: (what, how) pairs.
        script: lines of a training script with that library.
        on_gpu: what runs on a GPU.
        on_cpu: what runs on a CPU.
    """
    cpu = on_cpu.reason or f"the precision of {on_cpu.arm}"
    return ArmExplanation(
        summary=f"{name}; {library.missing() or 'installed'}",
        does=(*does, ("on a GPU", f"the precision of {on_gpu.arm}"), ("on a CPU", cpu)),
        twin=on_gpu.arm,
        twin_is="ampcompare's arm of the requested precision; a run names the one that was really used",
        differs=(),
        script=script,
        twin_script=(),
    )
