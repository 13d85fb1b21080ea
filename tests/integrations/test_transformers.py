"""The callback for the `Trainer` of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers", reason="not installed: pip install transformers")

import torch
import transformers

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


class _FusedScaler:
    """Accelerate's optimizer with a fused step, which it takes for one that was applied."""

    step_was_skipped = False

    def __init__(self) -> None:
        self.scale = 65536.0
        self.scaler = SimpleNamespace(get_scale=lambda: self.scale)


def test_skipped_steps_of_a_fused_optimizer(tmp_path: Path) -> None:
    """The default of transformers skips on the device: the loss scale that falls shows it."""
    callback, optimizer = AmpCompareCallback(guards="off"), _FusedScaler()
    state: Any = SimpleNamespace(is_world_process_zero=True)
    callback.on_train_begin(None, state, None)
    for scale in (32768.0, 32768.0, 65536.0):
        callback.on_step_begin(None, state, None, optimizer=optimizer)
        optimizer.scale = scale
        callback.on_step_end(None, state, None, optimizer=optimizer)
    assert (callback.steps.total, callback.steps.skipped) == (3, 1)


class _Logs(transformers.TrainerCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))


@pytest.mark.filterwarnings("ignore")
def test_callback_in_a_trainer(tmp_path: Path) -> None:
    """A `Trainer` calls it: steps are counted, and the log of losses has the figures."""
    callback, seen = AmpCompareCallback(guards="strict", record=tmp_path / "steps.jsonl"), _Logs()

    class Model(torch.nn.Linear):
        def forward(self, x: Any, labels: Any) -> Any:
            return {"loss": torch.nn.functional.cross_entropy(super().forward(x), labels)}

    data = [{"x": torch.ones(4), "labels": torch.tensor(number % 2)} for number in range(4)]
    options: Any = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "logging_steps": 2}
    arguments = transformers.TrainingArguments(str(tmp_path), max_steps=2, per_device_train_batch_size=2, **options)
    transformers.Trainer(Model(4, 2), arguments, train_dataset=data, callbacks=[callback, seen]).train()
    assert (callback.steps.total, callback.steps.skipped) == (2, 0)
    assert seen.logs[0]["skipped_steps"] == 0
    rows = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [row["applied"] for row in rows if row.get("kind") == "step"] == [True, True]
