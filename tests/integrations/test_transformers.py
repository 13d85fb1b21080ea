"""The callback for the `Trainer` of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers", reason="not installed: pip install transformers")

from ampcompare.integrations.transformers import AmpCompareCallback

pytestmark = pytest.mark.integration


def test_callback_notes_scales_and_skipped_steps(tmp_path: Path) -> None:
    """Steps that Accelerate's scaler skips are counted, written, and added to logs of losses."""
    callback = AmpCompareCallback(guards="off", record=tmp_path / "steps.jsonl")
    state: Any = SimpleNamespace(is_world_process_zero=True)
    callback.on_train_begin(None, state, None)
    scale = [65536.0]
    optimizer = SimpleNamespace(scaler=SimpleNamespace(get_scale=lambda: scale[0]), step_was_skipped=False)
    callback.on_step_end(None, state, None, optimizer=optimizer)
    scale[0], optimizer.step_was_skipped = 32768.0, True
    callback.on_step_end(None, state, None, optimizer=optimizer)
    logs, evaluation = {"loss": 1.0}, {"eval_loss": 1.0}
    callback.on_log(None, state, None, logs=logs)
    callback.on_log(None, state, None, logs=evaluation)
    callback.on_train_end(None, state, None)
    assert logs == {"loss": 1.0, "loss_scale": 32768.0, "skipped_steps": 1.0}
    assert evaluation == {"eval_loss": 1.0}
    rows = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [row["applied"] for row in rows if row.get("kind") == "step"] == [True, False]
