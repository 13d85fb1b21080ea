"""What to do after a comparison: commands to paste, built from the command that made it."""

from __future__ import annotations

from ampcompare.records.comparison import Comparison, NextStep

__all__ = ["next_steps"]


def next_steps(comparison: Comparison, next_error_rate: float) -> list[NextStep]:
    """Return what to do next, the most useful first.

    Args:
        next_error_rate: of one more look at the same run directory; 0 where none is left.
    """
    if not comparison.command or not next_error_rate or len(comparison.seeds) >= 3:
        return []
    return [NextStep(command=f"{comparison.command} --seeds 0-4", why="Fewer than 3 seeds give no verdict.")]
