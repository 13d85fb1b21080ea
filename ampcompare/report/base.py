"""The contract of a report format."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence

from ampcompare.records.comparison import Comparison

__all__ = ["MAX_LINE", "Reporter"]

MAX_LINE = 100_000  # a conclusion names every arm, and there may be hundreds


class Reporter(abc.ABC):
    """Turns a comparison into text.

    Args:
        width: of the terminal that the text is for; None for files, in which lines may have any length. Only formats
            for terminals use it.

    Attributes:
        logs: relative address of the log of each cell, by the name of the cell, for formats with links.
        columns: heads of further columns of the one table that a report begins with, for formats that have it.
    """

    def __init__(self, width: int | None = None) -> None:
        self.width = width
        self.logs: Mapping[str, str] = {}
        self.columns: Sequence[str] = ()

    @abc.abstractmethod
    def render(self, comparison: Comparison) -> str:
        """Return the report; it ends with a newline."""
