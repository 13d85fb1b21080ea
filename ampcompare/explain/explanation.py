"""The explanation of an arm: what it does, its twin on the other side, and what differs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ampcompare.adapters import ADAPTERS
from ampcompare.arm import BACKENDS, Arm
from ampcompare.explain.apex import explain_apex
from ampcompare.explain.libraries import explain_actnn, explain_library
from ampcompare.explain.memory import OPTIMIZER_TENSORS, PerParameter, bytes_per_parameter
from ampcompare.explain.others import explain_fp32, explain_half, explain_native, explain_other
from ampcompare.explain.parts import Parts

__all__ = ["Explanation", "explain_arm"]

EXPLAINERS = {
    "apex": explain_apex,
    "fp32": explain_fp32,
    "native": explain_native,
    "half": explain_half,
    "actnn": explain_actnn,
    **dict.fromkeys(ADAPTERS, explain_library),
}


@dataclass(frozen=True)
class Explanation:
    """All that is known of an arm without running it.

    Attributes:
        parts: what its backend says.
        memory: bytes per parameter; None for a backend of another package.
    """

    arm: str
    parts: Parts
    memory: PerParameter | None

    def data(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        held: Mapping[str, Any] | None = None
        if self.memory is not None:
            totals = {name: self.memory.total(tensors) for name, tensors in OPTIMIZER_TENSORS.items()}
            held = {**asdict(self.memory), "total": totals}
        return {"arm": self.arm, **asdict(self.parts), "bytes_per_parameter": held}


def explain_arm(arm: Arm) -> Explanation:
    """Explain `arm` from tables; torch is not needed."""
    explain = EXPLAINERS[arm.backend] if arm.backend in BACKENDS else explain_other
    return Explanation(str(arm), explain(arm), bytes_per_parameter(arm))
