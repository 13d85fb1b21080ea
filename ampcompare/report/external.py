"""The table of figures that someone else measured, with its verdicts."""

from __future__ import annotations

from collections.abc import Iterable

from ampcompare.records.comparison import Comparison
from ampcompare.report.terminal import Terminal

__all__ = ["Judged"]


class Judged(Terminal):
    """As `Terminal`, in the unit of the table; there are no further measurements, so details are the conclusions."""

    def _details(self, comparison: Comparison) -> Iterable[str]:
        if comparison.headline:
            yield self._text(comparison.reading)
