"""Scalars that a script logs are caught."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ampcompare.base import metric_log
from ampcompare.script.recording.metrics import start_logging_scalars

LIBRARIES = {
    "wandb": """
class Run:
    def log(self, data): pass
def init(): return Run()
def log(data, step=None): pass
""",
    "mlflow": "def log_metric(key, value, step=None): pass\ndef log_metrics(metrics): pass\n",
    "tensorboardX": "class SummaryWriter:\n    def add_scalar(self, tag, scalar_value, step): pass\n",
}


@pytest.fixture
def logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, float, str]]]:
    """What was logged while scalars are caught, with libraries that do nothing."""
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in LIBRARIES.items():
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    seen: list[tuple[str, float, str]] = []
    ends = [metric_log.listen_to_metrics(lambda *values: seen.append(values)), start_logging_scalars()]
    yield seen
    for end in ends:
        end()
    for name in LIBRARIES:
        sys.modules.pop(name, None)


def test_numbers_are_caught(logged: list[tuple[str, float, str]]) -> None:
    """Also nested ones of `wandb.log`, and those of a run; texts and images are no metrics."""
    wandb, mlflow, writers = map(importlib.import_module, LIBRARIES)
    wandb.init().log({"a": 1})
    wandb.log({"b": {"c": torch.tensor(2.0)}, "name": "x", "image": torch.ones(2, 2)}, step=3)
    mlflow.log_metric("d", 3.0, step=1)
    mlflow.log_metrics({"e": 4})
    # torch does not warn
    writers.SummaryWriter().add_scalar("val/acc", torch.tensor([0.5], requires_grad=True), 3)
    assert [(name, value) for name, value, _ in logged] == [
        ("a", 1),
        ("b/c", 2),
        ("d", 3),
        ("e", 4),
        ("val/acc", 0.5),
    ]
    assert {source for _, _, source in logged} == {
        "wandb.log",
        "mlflow.log_metric",
        "SummaryWriter.add_scalar",
    }
