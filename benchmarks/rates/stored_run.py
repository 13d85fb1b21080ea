"""Records of runs that did not train: a final value of one metric, as a cell or a script would have left it."""

from __future__ import annotations

from typing import Any

from ampcompare.runs.records.evaluation import EpochResult
from ampcompare.runs.records.run import RunRecord, RunSummary

__all__ = ["with_value"]


def with_value(run: RunRecord, name: str, value: float, samples: int, **more: Any) -> RunRecord:
    """Return the run with a final value; nothing is validated, as a study makes millions of these.

    Args:
        more: further fields of the summary.
    """
    epoch = EpochResult.model_construct(
        epoch=0, samples=samples, values={name: value}, counts={}, chance=None, loss=None, ema_values=None,
        ema_counts={}, ema_loss=None, train_seconds=1.0, eval_seconds=0.1, per_sample=None,
    )  # fmt: skip
    summary = RunSummary.model_construct(metric_final=value, epochs=[epoch], num_steps=10, **more)
    return run.model_copy(update={"summary": summary})
