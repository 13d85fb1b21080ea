"""An explanation as text for a terminal."""

from __future__ import annotations

import shlex
import textwrap

from ampcompare.diagnosis.explain.explain import OPTIMIZER_TENSORS, Explanation

__all__ = ["render_explanation"]

NAMED = 17


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
