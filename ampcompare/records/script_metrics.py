"""The metrics of a user's script, as records describe them."""

from __future__ import annotations

from ampcompare.records.metric import Metric
from ampcompare.settings.script import LOSS, ScriptConfig

__all__ = ["metrics_of"]


def metrics_of(script: ScriptConfig) -> list[Metric]:
    """Return the metrics of a script's cells, as records describe them."""
    if not script.metrics:
        return [Metric(name=LOSS, better="lower", decimals=4, difference="ratio", margin=0.02)]
    return [
        Metric(
            name=one.name,
            better="higher" if one.goal == "max" else "lower",
            decimals=4,
            difference=one.difference,
            margin=0.02 if one.difference == "ratio" else None,
        )
        for one in script.metrics
    ]
