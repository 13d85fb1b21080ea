"""The comparison as one strict JSON document, which `report` reads again."""

from __future__ import annotations

from ampcompare.records.comparison import Comparison
from ampcompare.records.run import dump_json
from ampcompare.report.base import Reporter

__all__ = ["Json"]


class Json(Reporter):
    """Everything; non-finite numbers are strings."""

    def render(self, comparison: Comparison) -> str:
        return dump_json(comparison) + "\n"
