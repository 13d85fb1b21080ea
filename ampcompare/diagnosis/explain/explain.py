"""The explanation of an arm: what it does, the arm to compare it with, and what differs."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ampcompare.backends.arm import Arm
from ampcompare.backends.explanation import ArmExplanation, BytesPerParameter
from ampcompare.base.shown import Parts, ShownParts

__all__ = ["OPTIMIZER_TENSORS", "Explanation", "bytes_per_parameter", "explain_arm", "render_explanation"]

# Tensors of the size of the parameter that an optimizer keeps.
OPTIMIZER_TENSORS = {"sgd with momentum": 1, "adam": 2}
# Options that take more than the few lines of a script.
NOT_IN_SCRIPTS = ("keep_fp32", "weights", "masters", "state", "grads", "reduce", "rounding", "kahan")
NAMED = 17
TEXT_WIDTH = 100


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
        return _explanation_parts(self)

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


def render_explanation(explanation: Explanation, *, width: int) -> str:
    """Return the explanation, wrapped to `width` columns; lines of a script are never wrapped."""
    parts = explanation.parts
    lines = [*textwrap.wrap(f"{explanation.arm}: {parts.summary}", width)]
    if parts.does:
        lines += ["", "What it does"]
        for name, text in parts.does:
            lines += _hanging(f"  {name:<{NAMED}}", text, width)
    lines += _memory(explanation, width)
    lines += ["", f"Native equivalent: {parts.twin or 'none'}", *_hanging("  ", parts.twin_is, width)]
    if parts.differs:
        lines += ["", *textwrap.wrap(f"What differs (here {explanation.arm}, there {parts.twin})", width)]
        for text in parts.differs:
            lines += _hanging("  - ", text, width)
    if parts.script:
        lines += ["", "In a script", *(f"    {line}" for line in parts.script)]
    if parts.twin_script:
        lines += ["", f"The same as {parts.twin}", *(f"    {line}" for line in parts.twin_script)]
    compared = [explanation.arm, *([parts.twin] if parts.twin else [])]
    if explanation.arm != "fp32" and "fp32" not in compared:
        compared.insert(0, "fp32")
    words = " ".join(f"--arm {shlex.quote(arm)}" for arm in compared)
    lines += ["", "Compare them", f"    ampcompare compare {words} --seeds 0-2", ""]
    return "\n".join(lines)


def _memory(explanation: Explanation, width: int) -> list[str]:
    held = explanation.memory
    if held is None:
        return []
    named = [
        ("weight", held.weight),
        ("gradient", held.gradient),
        ("master weight", held.master),
        ("its gradient", held.master_gradient),
        ("kept cast", held.cast),
        ("compensation", held.compensation),
    ]
    parts = " + ".join(f"{count} {name}" for name, count in named if count)
    totals = [
        f"{name} adds {tensors * held.state}, {held.total(tensors)} in all"
        for name, tensors in OPTIMIZER_TENSORS.items()
    ]
    return ["", "Bytes per parameter, without activations", *_hanging("  ", "; ".join([parts, *totals]), width)]


def _hanging(first: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _explanation_parts(explanation: Explanation) -> Parts:
    """Return the text of an explanation, its tables and its scripts."""
    parts, memory = explanation.parts, explanation.memory
    tables: list[tuple[str, tuple[str, ...], list[tuple[str, str]]]] = [
        ("What it does", ("part", "type and effect"), list(parts.does))
    ]
    if memory is not None:
        held = [(name, str(memory.total(tensors))) for name, tensors in OPTIMIZER_TENSORS.items()]
        tables.append(("Bytes per parameter, without activations", ("optimizer", "bytes"), held))
    scripts = [("In a script", parts.script), (f"The same as {parts.twin}", parts.twin_script)]
    return Parts(
        render_explanation(explanation, width=TEXT_WIDTH).rstrip("\n"),
        f"{explanation.arm}: {parts.summary}",
        subtitle=[f"Native equivalent: {parts.twin or 'none'}", parts.twin_is],
        tables=tables,
        lists=[(f"What differs from {parts.twin}", parts.differs)] if parts.differs else [],
        codes=[(name, "\n".join(lines)) for name, lines in scripts if lines],
    )
