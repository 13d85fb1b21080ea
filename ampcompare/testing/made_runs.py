"""Records that no training made, for tests of what reads records: reports, verdicts, gates."""

from collections.abc import Sequence
from typing import Any, Literal

from ampcompare.results.analysis.inference.terms import Terms
from ampcompare.results.analysis.summary import summarize
from ampcompare.results.records.comparison import Comparison
from ampcompare.results.records.evaluation import EpochResult
from ampcompare.results.records.run import RESULTS, RunRecord, RunSummary
from ampcompare.settings.config import RunConfig
from ampcompare.settings.recipe import Recipe

SAMPLES = 1000  # of the validation set


def make_record(
    arm: str = "fp32",
    seed: int = 0,
    *,
    top1: float = 0.5,
    seconds: float = 0.01,
    status: Literal["completed", "diverged", "failed", "interrupted"] = "completed",
    losses: str = "",
    half: str | None = None,
    device: str = "cpu",
    error: str | None = None,
    majority: int | None = None,
    **summary: Any,
) -> RunRecord:
    """Return the record of a run of one epoch of 100 steps, validated on 1,000 samples.

    Args:
        top1: share of the samples that it has right, 0 to 1, rounded to whole samples.
        seconds: of a step, in the median.
        losses: stands for all losses of its steps: runs of which it is equal have equal ones. By default no two have.
        half: how 16-bit types were computed, such as `fp16 emulated`.
        error: of a run that failed.
        majority: samples that the most frequent class would have right.
        summary: further fields of `RunSummary`, such as `peak_bytes`; without effect where no epoch was reached.

    Raises:
        ConfigError: there is no such arm.
        ValidationError: a field does not exist, or cannot have such a value.
    """
    config = RunConfig(arm=arm, recipe=Recipe(seed=seed))
    counts = {"top1_correct": round(top1 * SAMPLES), "top5_correct": SAMPLES, "majority_correct": majority}
    epoch = EpochResult.model_validate(
        {"epoch": 0, "samples": SAMPLES, "loss": 1.0, "train_seconds": 1.0, "eval_seconds": 0.1, **counts}
    )
    numbers: dict[str, Any] = {
        "metric_final": top1 if status == "completed" else None,
        "metric_best": top1,
        "step_seconds_median": seconds,
        "epoch_seconds": 100 * seconds,
        "num_steps": 100,
        "losses_sha256": losses or f"{arm} {seed}",
        "epochs": [epoch],
        "diverged_step": 7 if status == "diverged" else None,
    }
    has_run = status in RESULTS
    return RunRecord(
        cell=config.digest(),
        arm=arm,
        status=status,
        config=config,
        half=half,
        environment={"device": device},
        summary=RunSummary(**{**numbers, **summary}) if has_run else RunSummary(),
        error=error,
    )


def make_comparison(
    records: Sequence[RunRecord],
    reference: str = "",
    *,
    arms: Sequence[str] = (),
    command: str = "",
    **terms: Any,
) -> Comparison:
    """Return the comparison of these runs, as `ampcompare report` makes it from a folder of them.

    Args:
        records: of any arms and seeds.
        reference: the arm that the others are compared with; the first one by default.
        arms: rows in order, also of arms without a run; by default those of the records, as they come.
        command: what the report names as the command that made them.
        terms: margins and the preference, by the names of the options: `margin`, `time_margin`, `loss_margin`,
            `prefer`, `tag`.

    Raises:
        ConfigError: the records are of several tasks, or a margin does not apply to their metric.
    """
    rows = list(arms or dict.fromkeys(record.arm for record in records))
    return summarize(
        records, arms=rows, reference=reference or rows[0], command=command, terms=Terms(**terms)
    )
