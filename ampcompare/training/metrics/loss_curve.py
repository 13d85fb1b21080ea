"""The loss curve of a run in at most a hundred points, for figures that need no `steps.jsonl`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ampcompare.records.run import StepRecord
from ampcompare.records.summary import Trace

__all__ = ["Tracer"]

MAX_LENGTH = 100
QUANTILES = 20


@dataclass
class Tracer:
    """Keeps every n-th step while steps pass; n doubles when there are too many, so that memory stays bounded.

    Steps kept are multiples of n, so that runs of one length keep the same ones and can be averaged point by point.
    """

    stride: int = 1
    points: list[tuple[int, float, float | None, int]] = field(default_factory=list)
    last: tuple[int, float, float | None, int] | None = None

    def add(self, record: StepRecord, skipped: int) -> None:
        """Add a step, and the number of steps skipped so far, this one included."""
        self.last = (record.step, record.loss, record.loss_scales[0] if record.loss_scales else None, skipped)
        if record.step % self.stride == 0:
            self.points.append(self.last)
            if len(self.points) >= MAX_LENGTH:
                self.points = self.points[::2]
                self.stride *= 2

    def state_dict(self) -> dict[str, Any]:
        """Return the points: plain values."""
        return {"stride": self.stride, "points": list(self.points), "last": self.last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.stride = int(state["stride"])
        self.points = [tuple(point) for point in state["points"]]
        self.last = None if state["last"] is None else tuple(state["last"])

    def trace(self, seconds: Sequence[float]) -> Trace | None:
        """Return the points with the last step, and quantiles of step times; None before the first step."""
        if self.last is None:
            return None
        points = self.points if self.points and self.points[-1][0] == self.last[0] else [*self.points, self.last]
        scales = [scale for _, _, scale, _ in points if scale is not None]
        return Trace(
            steps=[step for step, *_ in points],
            losses=[float(f"{loss:.6g}") for _, loss, _, _ in points],
            loss_scales=scales if len(scales) == len(points) else [],
            skipped=[skipped for *_, skipped in points],
            step_seconds=_quantiles(seconds),
        )


def _quantiles(seconds: Sequence[float]) -> list[float]:
    """Return the 0, 5, ... 100 % quantiles, to four digits."""
    if len(seconds) < 2:
        return []
    inner = statistics.quantiles(seconds, n=QUANTILES, method="inclusive")
    return [float(f"{value:.4g}") for value in (min(seconds), *inner, max(seconds))]
