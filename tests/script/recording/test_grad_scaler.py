"""What is recorded of a GradScaler."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ampcompare.base.patches import Layer, Subscriptions
from ampcompare.script.recording.recorder import Rows
from ampcompare.script.recording.scaled_steps import record_grad_scalers


class Recorder:
    """Keeps rows."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add_row(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def add(self, row: dict[str, Any], _now: float) -> None:
        self.rows.append(row)

    def before_close(self, close: Any) -> None:
        pass


@pytest.mark.filterwarnings("ignore::ampcompare.apex.DeprecatedFeatureWarning")
@pytest.mark.parametrize("arm", ["native:fp16", "O1", "O2"])
def test_skipped_steps_of_a_fused_optimizer(behind: Any, arm: str) -> None:
    """The host skips them under arms of Apex, and the optimizer itself under `torch.amp`."""
    torch.manual_seed(0)
    recorder, events = Recorder(), Subscriptions(Layer.RECORD)
    rows: Any = Rows(recorder)  # type: ignore[arg-type]
    behind(arm, rows)
    record_grad_scalers(rows, events)
    model = torch.nn.Linear(6, 3)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    try:
        for factor in (1.0, float("inf"), 1.0):
            (model(torch.ones(2, 6)).float().square().mean() * factor).backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        events.end()
    assert [row["applied"] for row in recorder.rows if row["kind"] == "step"] == [True, False, True]
