"""The explanation of an arm: what it does, the arm to compare it with, and what differs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

from ampcompare.backends.arm import Arm
from ampcompare.backends.explanation import ArmExplanation, BytesPerParameter
from ampcompare.base.shown import Shown
from ampcompare.runs.report.document import Block, Code, Document, Facts, Items, Section, Text

__all__ = ["OPTIMIZER_TENSORS", "Explanation", "bytes_per_parameter", "explain_arm", "explanation_document"]

# Tensors of the size of the parameter that an optimizer keeps.
OPTIMIZER_TENSORS = {"sgd with momentum": 1, "adam": 2}
# Options that take more than the few lines of a script.
NOT_IN_SCRIPTS = ("keep_fp32", "weights", "masters", "state", "grads", "reduce", "rounding", "kahan")
BYTES = "Bytes per parameter, without activations"


@dataclass(frozen=True)
class Explanation(Shown):
    """All that is known of an arm without running it.

    Attributes:
        parts: what its backend states.
        memory: bytes per parameter; None if the backend does not state them.
    """

    arm: str
    parts: ArmExplanation
    memory: BytesPerParameter | None

    _view: ClassVar[str] = "ampcompare.runs.report.html.notebook:result_view"

    def _document(self) -> Document:
        return explanation_document(self)

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


def explanation_document(explanation: Explanation) -> Document:
    """Return the report, before it has a format; lines of a script are never wrapped."""
    arm, parts = explanation.arm, explanation.parts
    differs = f"What differs (here {arm}, there {parts.twin})"
    sections = [
        Section("summary", [Text([f"{arm}: {parts.summary}"])]),
        Section("does", [Facts([("", parts.does)], "What it does")] if parts.does else []),
        Section("memory", [Items([_memory(explanation.memory)], BYTES)] if explanation.memory is not None else []),
        Section("twin", [Items([parts.twin_is], f"Native equivalent: {parts.twin or 'none'}")]),
        Section("differs", [Items(parts.differs, differs)] if parts.differs else []),
        Section("script", _script("In a script", parts.script)),
        Section("twin's script", _script(f"The same as {parts.twin}", parts.twin_script)),
        Section("compare", _script("Compare them", [_comparison(arm, parts.twin)])),
    ]
    subtitle = [f"Native equivalent: {parts.twin or 'none'}", parts.twin_is]
    return Document("explanation", sections, explanation.data(), arm, f"{arm}: {parts.summary}", subtitle)


def _script(title: str, lines: Sequence[str]) -> list[Block]:
    return [Code("\n".join(lines), title)] if lines else []


def _comparison(arm: str, twin: str | None) -> str:
    compared = [arm, *([twin] if twin else [])]
    if "fp32" not in compared:
        compared.insert(0, "fp32")
    words = " ".join(f"--arm {shlex.quote(one)}" for one in compared)
    return f"ampcompare compare {words} --seeds 0-2"


def _memory(held: BytesPerParameter) -> str:
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
    return "; ".join([parts, *totals])
