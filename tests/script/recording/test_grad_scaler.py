"""What is recorded of a GradScaler."""

from typing import Any

import pytest
import torch

from ampcompare.base.patches import Layer, Subscriptions
from ampcompare.script.recording.recorder import Recorder, Rows
from ampcompare.script.recording.scaled_steps import record_grad_scalers


@pytest.mark.filterwarnings("ignore::ampcompare.apex.DeprecatedFeatureWarning")
@pytest.mark.parametrize("arm", ["native:fp16", "O1", "O2"])
def test_skipped_steps_of_a_fused_optimizer(behind: Any, arm: str) -> None:
    """The host skips them under arms of Apex, and the optimizer itself under `torch.amp`."""
    torch.manual_seed(0)
    recorder, events = Recorder(None, {}), Subscriptions(Layer.RECORD)
    recorded: list[dict[str, Any]] = []
    recorder.after_row(recorded.append)
    rows = Rows(recorder)
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
    assert [row["applied"] for row in recorded if row["kind"] == "step"] == [True, False, True]
