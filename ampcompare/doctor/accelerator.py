"""The accelerators besides CUDA that torch sees, and the arms that train on them."""

from __future__ import annotations

from ampcompare.backends.catalog import BUILT_IN
from ampcompare.base.environment.accelerators import ACCELERATORS, accelerator_of, why_no_accelerator
from ampcompare.base.isolate.call import Answer
from ampcompare.doctor.finding import Check

__all__ = ["examine_accelerators", "kinds_to_ask_for"]


def kinds_to_ask_for() -> list[str]:
    """Return the types that torch may have here; asking torch for them costs a process."""
    return [kind for kind in ACCELERATORS if not why_no_accelerator(kind)]


def examine_accelerators(answer: Answer | None) -> list[Check]:
    """Return a finding for each accelerator.

    Args:
        answer: of the probe `accelerators`; None where torch certainly has none.
    """
    if answer is None:
        return []
    if not answer.done:
        return [Check("GPU", "accelerators", "unknown", "warning", f"querying torch failed: {answer.failure}")]
    arms = [name for name, spec in BUILT_IN.items() if not spec.elsewhere({})]
    findings = []
    for device in answer.value["devices"]:
        name, failure = device["name"], device["failure"]
        reason = f"--device {name} trains {', '.join(arms)} in one process; other backends know CPUs and CUDA only"
        if failure:
            reason = f"a small fp16 product fails: {failure}"
        title = ACCELERATORS[accelerator_of(name)].title
        findings.append(Check("GPU", name, title, "problem" if failure else "ok", reason, facts=device))
    return findings
