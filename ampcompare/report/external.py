"""The table of figures that someone else measured, with its verdicts."""

from __future__ import annotations

from collections.abc import Iterable

from ampcompare.records.comparison import Comparison
from ampcompare.report.overview import make_overview
from ampcompare.report.tables import grid
from ampcompare.report.terminal import Terminal

__all__ = ["Judged"]


class Judged(Terminal):
    """As `Terminal`, in the unit of the table; its details are every column, in parts below each other."""

    def _details(self, comparison: Comparison) -> Iterable[str]:
        overview = make_overview(comparison)
        yield grid([[cell.text for cell in row] for row in overview.rows], overview.columns, self.width)
        if comparison.headline:
            yield self._text(comparison.reading)
