"""The explanation of an arm: what it does, the arm to compare it with, and what differs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from typing import Any

from ampcompare.backends.arm import Arm
from ampcompare.backends.explanation import ArmExplanation, BytesPerParameter
from ampcompare.base.shown import Parts, ShownParts

__all__ = ["OPTIMIZER_TENSORS", "Explanation", "bytes_per_parameter", "explain_arm"]

# Tensors of the size of the parameter that an optimizer keeps.
OPTIMIZER_TENSORS = {"sgd with momentum": 1, "adam": 2}
# Options that take more than the few lines of a script.
NOT_IN_SCRIPTS = ("keep_fp32", "weights", "masters", "state", "grads", "reduce", "rounding", "kahan")


@dataclass(frozen=True)
class Explanation(ShownParts):
    """All that is known of an arm without running it.

    Attributes:
        parts: what its backend states.
        memory: bytes per parameter; None if the backend does not state them.
    """

    arm: str
    parts: ArmExplanation
    memory: BytesPerParameter | None

    def _parts(self) -> Parts:
        # By name: that module imports this one.
        parts: Parts = import_module("ampcompare.diagnosis.explain.view").explanation_parts(self)
        return parts

    def data(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        held: Mapping[str, Any] | None = None
        if self.memory is not None:
            totals = {name: self.memory.total(tensors) for name, tensors in OPTIMIZER_TENSORS.items()}
            held = {**asdict(self.memory), "total": totals}
        return {"arm": self.arm, **asdict(self.parts), "bytes_per_parameter": held}


def explain_arm(arm: Arm) -> Explanation:
    """Explain `arm` from its backend's description; torch is not needed."""
    parts = arm.spec.explain(arm.options)
    if parts.twin is not None:
        parts = replace(parts, twin=str(Arm.parse(parts.twin)))
    missing = [name for name in NOT_IN_SCRIPTS if name in arm.options]
    if missing and parts.script:
        note = f'# all but {", ".join(missing)}, which ampcompare.make_precision("{arm}") does'
        parts = replace(parts, script=(note, *parts.script))
    return Explanation(str(arm), parts, bytes_per_parameter(arm))


def bytes_per_parameter(arm: Arm) -> BytesPerParameter | None:
    """Return what `arm` holds per parameter on a GPU; None if its backend does not state it."""
    if arm.spec.memory is not None:
        return arm.spec.memory(arm.options)
    runs = arm.effective("cuda")
    return bytes_per_parameter(Arm.parse(runs.arm)) if runs is not None and runs.arm is not None else None
