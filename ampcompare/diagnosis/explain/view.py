"""An explanation as the parts that a notebook shows."""

from __future__ import annotations

from ampcompare.base.shown import Parts
from ampcompare.diagnosis.explain.explain import OPTIMIZER_TENSORS, Explanation
from ampcompare.diagnosis.explain.render import render_explanation

__all__ = ["explanation_parts"]

TEXT_WIDTH = 100


def explanation_parts(explanation: Explanation) -> Parts:
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
