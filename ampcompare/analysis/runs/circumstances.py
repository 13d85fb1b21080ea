"""What differed between cells that are compared anyway, such as hosts and days, and what was not checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ampcompare.analysis.runs.comparability import device_kind, foreign_steps, resumed_elsewhere
from ampcompare.analysis.runs.pairs import conditional_on, finished, pairs_by_seed
from ampcompare.records.run import RunRecord

__all__ = ["circumstances"]

MAX_NAMED = 4
MIN_SKIPPED = 0.01  # share of steps above which skipped steps affect the median step time


def _of_environment(name: str) -> Callable[[RunRecord], object]:
    return lambda record: record.environment.get(name)


def _samples(record: RunRecord) -> object:
    recipe = record.config.recipe
    return recipe.batch_size // recipe.grad_accum_steps


DIFFERENCES: dict[str, Callable[[RunRecord], object]] = {
    "hosts": lambda record: record.host,
    "days (UTC)": lambda record: record.started and record.started[:10],
    "devices": device_kind,
    "GPUs": _of_environment("device_name"),
    "processors": _of_environment("processor"),
    "versions of torch": _of_environment("torch"),
    "versions of CUDA": _of_environment("cuda"),
    "versions of Python": _of_environment("python"),
    "versions of ampcompare": _of_environment("ampcompare"),
    "numbers of processes": lambda record: record.config.processes,
    "micro-batches (samples that batch norm sees at once)": _samples,
    "numbers of threads": lambda record: record.config.threads,
    "numbers of loader workers": lambda record: record.config.workers,
    "deterministic modes": lambda record: record.config.deterministic,
    "on_nan policies": lambda record: record.config.on_nan,
    "TF32 settings": lambda record: record.config.tf32,
}


def circumstances(records: Sequence[RunRecord], reference: str) -> Iterator[str]:
    """Yield a line for each difference between the cells of a comparison, except arm, seed and recipe."""
    rows: dict[str, list[RunRecord]] = {}
    for record in sorted(finished(records), key=lambda record: record.arm != reference):
        rows.setdefault(record.arm, []).append(record)
    for what, value_of in DIFFERENCES.items():
        yield from _difference(what, rows, value_of)
    for arm, runs in rows.items():
        for text, count in _counted(filter(None, map(foreign_steps, runs))):
            yield f"{arm}: {count} of {len(runs)} runs {text}, so its results are not those of {arm} alone."
        for text, count in _counted(filter(None, map(resumed_elsewhere, runs))):
            yield f"{arm}: {count} of {len(runs)} runs {text}."
    yield from _survivors(records, reference)
    yield from _lighter_steps(rows)
    unread = sorted({arm for arm, runs in rows.items() if any(map(_is_unread, runs))})
    if unread:
        yield (
            f"Not checked on the GPU of {', '.join(unread)}: clock, throttling, other processes; their times count as "
            "valid all the same. Install ampcompare[gpu] to read them."
        )


def _difference(what: str, rows: dict[str, list[RunRecord]], value_of: Callable[[RunRecord], object]) -> Iterator[str]:
    by_value: dict[str, list[str]] = {}
    for arm, runs in rows.items():
        for value in sorted({str(value) for run in runs if (value := value_of(run)) is not None}):
            by_value.setdefault(value, []).append(arm)
    if len(by_value) < 2:
        return
    everywhere = all(len(arms) == len(rows) for arms in by_value.values())
    shown = [
        value if everywhere else f"{value} ({', '.join(arms[:MAX_NAMED])}{', ...' if len(arms) > MAX_NAMED else ''})"
        for value, arms in by_value.items()
    ]
    yield f"Cells ran with different {what}: {'; '.join(shown)}."


def _counted(texts: Iterator[str]) -> list[tuple[str, int]]:
    every = list(texts)
    return [(text, every.count(text)) for text in dict.fromkeys(every)]


def _survivors(records: Sequence[RunRecord], reference: str) -> Iterator[str]:
    by_arm: dict[str, list[RunRecord]] = {}
    for record in records:
        by_arm.setdefault(record.arm, []).append(record)
    theirs = by_arm.pop(reference, [])
    by_arm = {arm: runs for arm, runs in by_arm.items() if pairs_by_seed(runs, theirs)}
    parts = [f"{arm} {share}" for arm, runs in by_arm.items() if (share := conditional_on(runs, theirs))]
    if parts:
        yield (
            f"Accuracy is conditional on the seeds that both the arm and {reference} completed: {'; '.join(parts)}. "
            "The seeds that were lost may be those in which they differ."
        )


def _lighter_steps(rows: dict[str, list[RunRecord]]) -> Iterator[str]:
    parts = []
    for arm, runs in rows.items():
        skipped = sum(run.summary.skipped_steps for run in runs)
        steps = sum(run.summary.num_steps for run in runs)
        if steps and skipped >= MIN_SKIPPED * steps:
            parts.append(f"{arm} {skipped} of {steps}")
    if parts:
        yield (
            f"Skipped steps do less work and count in the median step time: {'; '.join(parts)}. "
            "Startup and compilation are not included."
        )


def _is_unread(record: RunRecord) -> bool:
    return device_kind(record) == "cuda" and (record.readings is None or record.readings.clock_low_mhz is None)
