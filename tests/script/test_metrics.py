"""Scalars that a script logs are caught."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator

import pytest
import torch

from ampcompare.base import metric_log
from ampcompare.script.metrics import LIBRARIES, catch_scalars


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, float, str]]]:
    """What was logged while scalars are caught, and no library for them is installed."""
    monkeypatch.setattr("ampcompare.script.metrics._is_installed", lambda name: False)
    seen: list[tuple[str, float, str]] = []
    kept = {name: sys.modules.pop(name) for name in LIBRARIES if name in sys.modules}
    ends = [metric_log.listen(lambda *values: seen.append(values)), catch_scalars()]
    yield seen
    for end in ends:
        end()
    for name in LIBRARIES:
        sys.modules.pop(name, None)
    sys.modules.update(kept)


def test_wandb_and_mlflow_are_caught_where_absent(logged: list[tuple[str, float, str]]) -> None:
    """Numbers of `wandb.log`, also nested and of a run, and of mlflow; texts and images are no metrics."""
    wandb, mlflow = importlib.import_module("wandb"), importlib.import_module("mlflow")
    with wandb.init(project="x") as run:
        run.log({"a": 1})
    wandb.log({"b": {"c": torch.tensor(2.0)}, "name": "x", "image": torch.ones(2, 2)}, step=3)
    wandb.config.update({"lr": 1})
    mlflow.set_experiment("x")
    mlflow.log_metric("d", 3.0, step=1)
    mlflow.log_metrics({"e": 4})
    wandb.finish()
    assert [(name, value) for name, value, _ in logged] == [("a", 1), ("b/c", 2), ("d", 3), ("e", 4)]
    assert logged[0][2] == "wandb.log"


def test_a_summary_writer_is_caught_where_absent(logged: list[tuple[str, float, str]]) -> None:
    """tensorboardX stands for the writers; what else it writes is ignored."""
    writer = importlib.import_module("tensorboardX").SummaryWriter("folder")
    writer.add_scalar("val/acc", torch.tensor([0.5], requires_grad=True), 3)  # without a warning of torch
    writer.add_histogram("weights", [1, 2])
    writer.close()
    assert logged == [("val/acc", 0.5, "SummaryWriter.add_scalar")]


def test_log_metric_without_a_listener_does_nothing() -> None:
    """A script may call it under plain Python."""
    metric_log.log_metric("top1", 93.2)
