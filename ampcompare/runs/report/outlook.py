"""The outlook of some arms as text: one line for each, and below it what all of them share."""

from __future__ import annotations

import textwrap

from ampcompare.base.formatting import printable
from ampcompare.runs.records.outlook import ArmOutlook, Outlook
from ampcompare.runs.report.tables import listing

__all__ = ["outlook_text"]

HEADS = ("arm", "word", "part", "why")


def outlook_text(found: Outlook, width: int) -> str:
    """Return the text.

    Args:
        width: of a line, in characters.
    """
    rows = [[printable(each.arm, 60), each.word, each.part or "-", _why(each)] for each in found.arms]
    return f"{listing(rows, HEADS, width)}\n\n{textwrap.fill(_basis(found), width)}"


def _why(each: ArmOutlook) -> str:
    return printable(f"{each.why}{f' -> {each.cure}' if each.cure else ''}", 400) or "-"


def _basis(found: Outlook) -> str:
    """Return what was run, and what it does not cover."""
    prefix = found.prefix
    words = [f"{prefix.steps} steps in fp32"]
    words.append(f"learning rates ahead: {prefix.basis}" if prefix.basis else "the learning rate stays")
    if found.twin is not None:
        words.append(f"a twin from weights changed by 1/512 differs by {100 * found.twin:.2g} %")
    sentence = "; ".join(words)
    return f"{sentence[0].upper()}{sentence[1:]}. Not covered: evaluation, and what these steps did not run."
