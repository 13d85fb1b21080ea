"""Validate a record: it belongs to its cell, is consistent with itself and its steps, and is one run.

A fault is one sentence: what was read, and what was expected. A record with a fault is named and not used. Nothing
here needs torch.
"""

from __future__ import annotations

import hashlib
import math
import statistics
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ampcompare.base.errors import RecordError
from ampcompare.base.files.run_files import CellFile, RunFile
from ampcompare.runs.records.document import read_with_source, record_checksum
from ampcompare.runs.records.evaluation import EpochResult, PrecisionResult
from ampcompare.runs.records.metric import TOP1, TOP5, Metric
from ampcompare.runs.records.run import RunRecord, Trace, loss_tail
from ampcompare.runs.records.step import iter_steps
from ampcompare.runs.settings.config import settings_digest

__all__ = ["SEEDS_ITSELF", "check_record", "contradiction", "implausible", "read_checked", "unique_runs"]

MAX_CHECKED_BYTES = 2**26  # of a steps.jsonl, about 300,000 steps; beyond that the record stands alone
SEEDS_ITSELF = "the script seeds itself, so pass the seed on with --seed-arg, or as {seed}"
ROUNDING = 1e-9  # of the same arithmetic in another order
TRACE_DIGITS = 1e-4  # of losses that the trace rounds to six digits
SHOWN_DIGITS = 1e-3  # of values that the trace rounds to four digits


def read_checked(path: Path) -> RunRecord:
    """Read the record of a cell, and check it against its folder, itself, its checksum, and `steps.jsonl` next to it.

    Raises:
        RecordError: it cannot be read, or has a fault; the message names the file, what was read and what was expected.
    """
    record, raw = read_with_source(path, RunRecord, "run record")
    check_record(path, raw, record)
    return record


def check_record(path: Path, raw: Mapping[str, Any], record: RunRecord) -> None:
    """Check a record against its folder, itself, its checksum, and `steps.jsonl` next to it.

    Args:
        raw: what its file holds.

    Raises:
        RecordError: it has a fault.
    """
    first = next(filter(None, _faults_of_file(path, raw, record)), "")
    if first:
        raise RecordError(f"{path}: {first}")


def _faults_of_file(path: Path, raw: Mapping[str, Any], record: RunRecord) -> Iterator[str]:
    yield _foreign(path, raw, record)
    yield implausible(record)
    yield contradiction(record)
    yield _steps_fault(path.with_name(CellFile.STEPS), record)
    yield _edited(raw, record)


def _foreign(path: Path, raw: Mapping[str, Any], record: RunRecord) -> str:
    """Return why a file is not the record of the cell in whose folder it is."""
    own = settings_digest(raw["config"])
    whose = f"{record.config.arm}, seed {record.config.recipe.seed}"
    if record.cell != own:
        return f"it calls itself cell {record.cell}, but its settings ({whose}) are those of cell {own}"
    folder = path.absolute().parent
    if folder.parent.name == RunFile.CELLS and folder.name != own:
        return f"it is the record of cell {own} ({whose}), but is in the folder of cell {folder.name}"
    if record.arm != record.config.arm:
        return f"it calls its arm {record.arm}, but its settings say {record.config.arm}"
    return ""


def _edited(raw: Mapping[str, Any], record: RunRecord) -> str:
    if raw.get("checksum") is None:  # an old record has neither
        return "it has no checksum, which every record with a host has" if record.host is not None else ""
    if raw["checksum"] != record_checksum(raw):
        return "it was changed after it was written: its checksum does not match"
    return ""


def implausible(record: RunRecord) -> str:
    """Return a value that is impossible for a run; "" if there is none."""
    summary = record.summary
    for name, metric, value in _figures(record):
        if metric.over_samples == "share" and not 0 <= value <= 1:  # not for NaN either
            return f"{name} is {value}, and a share is 0 to 1"
        if metric.highest is not None and value > metric.highest:
            return f"{name} is {value}, and {metric.name} is at most {metric.highest:g}"
    times = ("step_seconds_median", "samples_per_second", "epoch_seconds")
    for name in times:
        value = getattr(summary, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            return f"{name} is {value}, and a time or rate is finite and above 0"
    for name in ("step_seconds_iqr", "data_seconds_median", "wall_seconds", "peak_bytes", "num_steps", "skipped_steps"):
        value = getattr(summary, name)
        if value is not None and not (math.isfinite(value) and value >= 0):
            return f"{name} is {value}, and it cannot be below 0"
    if summary.skipped_steps > summary.num_steps:
        return f"{summary.skipped_steps} of {summary.num_steps} steps were skipped"
    if record.jobs < 1:
        return f"{record.jobs} cells ran at the same time, this one included"
    for epoch in summary.epochs:
        if fault := _evaluation_fault(record, epoch):
            return f"epoch {epoch.epoch} has {fault}"
    return next(filter(None, (_precision_fault(record, result) for result in summary.in_precisions)), "")


def _precision_fault(record: RunRecord, result: PrecisionResult) -> str:
    """Return what an evaluation in another precision cannot have; "" if there is nothing."""
    if (result.differing or 0) > (result.answers or 0):
        return f"{result.differing} of {result.answers} answers differ in {result.precision}"
    for metric in record.metrics:
        value = result.values.get(metric.name)
        if value is not None and metric.over_samples == "share" and not 0 <= value <= 1:
            return f"{metric.name} in {result.precision} is {value}, and a share is 0 to 1"
    return ""


def _figures(record: RunRecord) -> Iterator[tuple[str, Metric, float]]:
    """Yield what the summary says of each metric: the name of the field, the metric and the value."""
    summary = record.summary
    names = ("metric_final", "metric_best", "metric_last_mean", "ema_metric_final", "ema_metric_best")
    for name in names:
        value = getattr(summary, name)
        if value is not None:
            yield name, record.metric, value
    for metric in record.metrics[1:]:
        if metric.name in summary.others_final:
            yield metric.name, metric, summary.others_final[metric.name]


def _evaluation_fault(record: RunRecord, epoch: EpochResult) -> str:
    """Return a value that is impossible for an evaluation; "" if there is none."""
    chance = epoch.chance
    if chance is not None and record.metric.counts and not 0 < chance <= 1:
        return f"{round(chance * epoch.samples)} of {epoch.samples} samples in the largest class"
    counts = [*epoch.counts.values(), *epoch.ema_counts.values()]
    if any(count > epoch.samples for count in counts):
        return f"{max(counts)} right of {epoch.samples} samples"
    names = [metric.name for metric in record.metrics]
    for values in (epoch.values, epoch.ema_values or {}):
        if values and (next(iter(values)) != names[0] or not set(values) <= set(names)):
            return f"values of {', '.join(values)}, and its metrics are {', '.join(names)}"
    for counts_of, values in ((epoch.counts, epoch.values), (epoch.ema_counts, epoch.ema_values or {})):
        for name, count in counts_of.items():
            stored, share = values.get(name), count / epoch.samples
            if not _equal(stored, share):
                return f"{name} {stored}, and its counts ({count} of {epoch.samples}) give {share}"
    return ""


def contradiction(record: RunRecord) -> str:
    """Return two values of a record that cannot both be true; "" if there are none."""
    summary, epochs = record.summary, record.summary.epochs
    numbers = [epoch.epoch for epoch in epochs]
    if numbers != sorted(set(numbers)) or len(numbers) > record.config.recipe.epochs:
        return f"its epochs are {numbers}, of {record.config.recipe.epochs} in its settings"
    if len({epoch.samples for epoch in epochs}) > 1:
        return f"its epochs were evaluated on {sorted({epoch.samples for epoch in epochs})} samples"
    if any(epoch.counts.get(TOP1.name, 0) > epoch.counts.get(TOP5.name, epoch.samples) for epoch in epochs):
        return "its top-1 count is higher than its top-5 count"
    if len({epoch.chance for epoch in epochs}) > 1:
        return "its epochs differ in how many samples the largest class has"
    unlike = _outcome_contradiction(record)
    if unlike:
        return unlike
    for name, stored, expected in _derived(record):
        if not _equal(stored, expected):
            return f"{name} is {stored}, and {_source(name, epochs)} {expected}"
    trace = record.trace
    if trace is not None and len(trace.step_seconds) == 21 and summary.step_seconds_median is not None:
        middle = trace.step_seconds[10]
        if not math.isclose(middle, summary.step_seconds_median, rel_tol=SHOWN_DIGITS):
            return f"step_seconds_median is {summary.step_seconds_median}, and the median of its trace is {middle}"
    choice = record.config.cpu_half
    if record.half is not None and str(record.environment.get("device", "")).startswith("cpu") and choice != "auto":
        # cpu_half is about 16-bit types; fp8 is emulated on every CPU.
        if not record.half.startswith("fp8") and not record.half.endswith(choice):
            return f"it says {record.half}, but its settings say cpu_half {choice}"
    return ""


def _outcome_contradiction(record: RunRecord) -> str:
    """Return why a run cannot have ended so: as its status says, and as its settings allow."""
    summary, config = record.summary, record.config
    if record.status == "completed" and summary.diverged_step is not None:
        return f"it is marked as completed, but diverged at step {summary.diverged_step}"
    if record.status == "completed" and summary.epochs and not summary.num_steps:
        return "it is marked as completed, but counts no steps"
    if summary.ended and config.recipe.early_stop is None and config.recipe.target is None:
        return f"it ended early ({summary.ended}), but its settings have neither early_stop nor target"
    if summary.rollbacks and config.on_nan != "rollback":
        return f"it rolled back at {summary.rollbacks}, but its settings say on_nan {config.on_nan}"
    return ""


def _derived(record: RunRecord) -> Iterator[tuple[str, float | None, float | None]]:
    """Yield what the summary repeats of its epochs and settings: name, value, and what it follows to be."""
    summary, epochs = record.summary, record.summary.epochs
    if epochs:
        values, metric = [epoch.value for epoch in epochs], record.metric
        if record.status == "completed":
            yield "metric_final", summary.metric_final, values[-1]
        for name, other in summary.others_final.items():
            yield name, other, epochs[-1].values.get(name)
        if summary.loss_final is not None:
            yield "loss_final", summary.loss_final, epochs[-1].loss
        if summary.ema_metric_final is not None:
            yield "ema_metric_final", summary.ema_metric_final, epochs[-1].ema_value
        if summary.metric_last_mean is not None and summary.last_epochs:
            yield "metric_last_mean", summary.metric_last_mean, statistics.fmean(values[-summary.last_epochs :])
        if summary.metric_best is not None:
            yield "metric_best", summary.metric_best, metric.best(values)
        if summary.epoch_seconds is not None:
            yield "epoch_seconds", summary.epoch_seconds, statistics.median(epoch.train_seconds for epoch in epochs)
    elif summary.metric_final is not None:
        yield "metric_final", summary.metric_final, None
    median, rate = summary.step_seconds_median, summary.samples_per_second
    if median is not None and rate is not None and record.unit in ("images", "samples"):
        processes = record.processes.world_size if record.processes else 1
        yield "samples_per_second", rate, record.config.recipe.batch_size * processes / median


def _source(name: str, epochs: Sequence[EpochResult]) -> str:
    if name == "samples_per_second":
        return "batch size over step_seconds_median gives"
    if name == "metric_final" and epochs and epochs[-1].counts:
        return f"its counts ({next(iter(epochs[-1].counts.values()))} of {epochs[-1].samples}) give"
    return "its epochs give"


def _equal(stored: float | None, expected: float | None) -> bool:
    if stored is None or expected is None:
        return stored is expected
    if math.isnan(stored) or math.isnan(expected):
        return math.isnan(stored) and math.isnan(expected)
    return math.isclose(stored, expected, rel_tol=ROUNDING, abs_tol=ROUNDING)


def _steps_fault(path: Path, record: RunRecord) -> str:
    """Return how the steps of a run contradict its record; "" too where there are none, or not from the first on."""
    summary = record.summary
    if record.status not in ("completed", "diverged") or summary.losses_sha256 is None or summary.rollbacks:
        return ""
    try:
        if path.stat().st_size > MAX_CHECKED_BYTES:
            return ""
        steps = list(iter_steps(path))
    except (OSError, RecordError):
        return ""  # what cannot be read contradicts nothing
    if not steps or steps[0].step != 0:
        return ""
    if len(steps) != summary.num_steps:
        return f"it counts {summary.num_steps} steps, but steps.jsonl has {len(steps)}"
    losses = [step.loss for step in steps]
    if fault := _losses_fault(losses, record):
        return fault
    skipped = sum(not all(step.applied) for step in steps)
    if skipped != summary.skipped_steps:
        return f"it counts {summary.skipped_steps} skipped steps, but steps.jsonl has {skipped}"
    if fault := _trace_fault(losses, record.trace):
        return fault
    seconds = [step.seconds for step in steps if step.step >= summary.warmup_steps]
    median = statistics.median(seconds) if seconds else None
    if median is not None and not _equal(summary.step_seconds_median, median):
        return f"step_seconds_median is {summary.step_seconds_median}, and the median of steps.jsonl is {median}"
    return ""


def _losses_fault(losses: Sequence[float], record: RunRecord) -> str:
    summary = record.summary
    # JSON has one NaN, and the hash is over the bits of each.
    if summary.losses_sha256 and not any(map(math.isnan, losses)):
        digest = hashlib.sha256(struct.pack(f"<{len(losses)}d", *losses)).hexdigest()
        if digest != summary.losses_sha256:
            return f"losses_sha256 is {summary.losses_sha256[:12]}, and the losses of steps.jsonl give {digest[:12]}"
    tail = loss_tail(losses)["loss_tail"]
    if summary.loss_tail is not None and not _equal(summary.loss_tail, tail):
        return f"loss_tail is {summary.loss_tail}, and the last losses of steps.jsonl give {tail}"
    return ""


def _trace_fault(losses: Sequence[float], trace: Trace | None) -> str:
    if trace is None:
        return ""
    for number, loss in zip(trace.steps, trace.losses, strict=False):
        own = losses[number] if number < len(losses) else math.nan
        if not (math.isnan(loss) and math.isnan(own)) and not math.isclose(loss, own, rel_tol=TRACE_DIGITS):
            return f"its trace has a loss of {loss} at step {number}, but steps.jsonl has {own}"
    return ""


def unique_runs(records: Sequence[RunRecord]) -> tuple[list[RunRecord], list[str]]:
    """Return the records that are one run each, and a sentence for each that is not used.

    A cell counts once: a second record of an arm and seed is a copy or another run of it, and a completed run whose
    losses equal those of a lower seed of its arm to the last bit is not another run. Neither is one of a script that
    began from the weights and batches of a lower seed, whatever its losses: then they differ by what the seed does not
    determine, such as the order of additions on a GPU.
    """
    faults: dict[int, str] = {}
    cells: set[tuple[str, int]] = set()
    losses: dict[tuple[str, str], int] = {}
    starts: dict[tuple[str, tuple[str, ...], tuple[str, ...]], int] = {}
    for number, record in sorted(enumerate(records), key=lambda item: item[1].config.recipe.seed):
        seed, digest = record.config.recipe.seed, record.summary.losses_sha256
        fault = implausible(record)
        if not fault and (record.arm, seed) in cells:
            fault = "a second record of this cell"
        if not fault and record.status == "completed" and digest is not None:
            other = losses.setdefault((record.arm, digest), seed)
            if other != seed:
                fault = f"its losses are those of seed {other} to the last bit, so it is not an independent run"
                if record.script is not None:
                    fault += f"; {SEEDS_ITSELF}"
        script = record.script if record.status in ("completed", "diverged") else None
        if not fault and script is not None and script.weights and script.batches:
            start = record.arm, tuple(script.weights), tuple(script.batches)
            other = starts.setdefault(start, seed)
            if other != seed:
                fault = (
                    f"its first weights and batches are those of seed {other}, so it is not an independent run; "
                    f"{SEEDS_ITSELF}"
                )
        if fault:
            faults[number] = f"{record.arm}, seed {seed}: {fault}"
        else:
            cells.add((record.arm, seed))
    kept = [record for number, record in enumerate(records) if number not in faults]
    return kept, [faults[number] for number in sorted(faults)]
