"""Explain an arm: the command `explain`."""

from __future__ import annotations

from ampcompare.backends.arm import Arm
from ampcompare.diagnosis.explain import Explanation
from ampcompare.diagnosis.explain import explain_arm as _explain

__all__ = ["explain_arm"]


def explain_arm(arm: Arm | str) -> Explanation:
    """Explain what an arm does to numbers, and what its torch.amp equivalent is.

    Args:
        arm: an arm such as "native:fp16", "bf16" or "O2".

    Returns:
        The explanation; `data()` is the JSON document of the command.

    Raises:
        ConfigError: there is no such arm.
    """
    return _explain(Arm.parse(arm) if isinstance(arm, str) else arm)
