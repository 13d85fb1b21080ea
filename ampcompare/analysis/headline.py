"""The answer in a few sentences: what to use, what it costs, and what these runs cannot say."""

from __future__ import annotations

from collections.abc import Sequence

from ampcompare.records.comparison import Comparison

__all__ = ["headline"]


def headline(comparison: Comparison, warnings: Sequence[str] = ()) -> list[str]:
    """Return one sentence for each thing that is known, the most important first.

    Args:
        comparison: with its rows; its own headline is not used.
        warnings: what weakens every claim, such as terms that were changed after runs were seen.
    """
    kept = [
        row.arm
        for row in comparison.arms
        if row.accuracy_verdict.startswith(("identical", "equivalent", "non-inferior", "better"))
    ]
    sentences = [f"{', '.join(kept)}: accuracy of {comparison.reference} kept."] if kept else []
    diverged = [
        f"{row.arm} diverged in {row.diverged} of {row.completed + row.diverged} seeds"
        for row in comparison.arms
        if row.diverged
    ]
    sentences += [f"{'; '.join(diverged)}."] if diverged else []
    return [*warnings, *sentences]
