"""What stands in and below the one table: notes of rows, what all arms share, and which times do not count."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ampcompare.base.formatting import MIB, few, printable
from ampcompare.records.comparison import ArmSummary, Comparison
from ampcompare.report.columns import arm_engine, is_emulated, time_words, word_and_detail

__all__ = ["fact_lines", "row_notes"]

LONGEST = 120
Value = Callable[[ArmSummary], str]


def row_notes(comparison: Comparison) -> list[list[str]]:
    """Return for each row what its numbers do not say: why it has none, and in what it differs from the others."""
    return [list(dict.fromkeys(filter(None, _notes(row, comparison)))) for row in comparison.arms]


def fact_lines(comparison: Comparison) -> list[str]:
    """Return lines on what all arms share, on times that do not count and on how far memory varies; none where there is
    nothing to say.
    """
    return [line for line in (_shared(comparison), _times(comparison), _memory(comparison)) if line]


def _notes(row: ArmSummary, comparison: Comparison) -> list[str]:
    word, detail = word_and_detail(row.accuracy_verdict)
    its = [value(row) for value in _differing(comparison)]
    time = time_words(row.time_verdict, comparison.time_margin)
    reason = "" if word == "inconclusive" else printable(detail, LONGEST)  # whose cell has it
    memory = row.memory_verdict and f"memory {printable(row.memory_verdict, LONGEST)}"
    return [_status(row), reason, time, *its, memory]


def _status(row: ArmSummary) -> str:
    """Return what became of the runs, unless all were completed."""
    status = printable(row.status, LONGEST)
    return "" if status in ("", "ok", "not run", row.accuracy_verdict) else status


def _lr(row: ArmSummary) -> str:
    return f"lr {row.lr:g}" if row.lr == row.lr else ""


def _steps(row: ArmSummary) -> str:
    runs = row.completed + row.diverged
    if not row.num_steps or not runs or row.diverged or row.num_steps % runs:
        return ""
    return f"{row.num_steps // runs:,} steps"


def _skipped(row: ArmSummary) -> str:
    if row.skipped_steps is None:
        return ""
    if 0 < row.skipped_steps == row.num_steps:
        return f"all {row.num_steps} steps skipped"  # as why a run learned nothing
    return f"{row.skipped_steps:,} of {row.num_steps:,} steps skipped" if row.skipped_steps else "0 steps skipped"


def _loss_scale(row: ArmSummary) -> str:
    return "" if row.final_loss_scale is None else f"final loss scale {row.final_loss_scale:g}"


SETTINGS: tuple[Value, ...] = (_lr, _steps, _skipped)


def _values(comparison: Comparison, value: Value) -> set[str]:
    return {text for row in comparison.arms if (text := value(row))}


def _differing(comparison: Comparison) -> list[Value]:
    """Return the settings and counts in which rows differ, each as the note of a row."""
    chosen: list[Value] = [value for value in SETTINGS if len(_values(comparison, value)) > 1]
    shown = [_only_some if value is _skipped else value for value in chosen]
    return [*shown, *([_engine] if _engines_differ(comparison) else [])]


def _only_some(row: ArmSummary) -> str:
    return _skipped(row) if row.skipped_steps else ""


def _engine(row: ArmSummary) -> str:
    return f"engine {arm_engine(row)}" if row.engine else ""


def _by_backend(comparison: Comparison) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for row in comparison.arms:
        if row.engine:
            found.setdefault(row.arm.partition(":")[0].partition(" ")[0], set()).add(arm_engine(row))
    return found


def _engines_differ(comparison: Comparison) -> bool:
    return any(len(engines) > 1 for engines in _by_backend(comparison).values())


def _shared(comparison: Comparison) -> str:
    """Return one line of what all arms share."""
    if comparison.judged is not None:
        return ""
    shared = [*filter(None, [_seeds(comparison.seeds)])]
    for value in (*SETTINGS, _loss_scale):
        texts = _values(comparison, value)
        if len(texts) == 1:
            shared += texts
    whose = "All arms: " if len(comparison.arms) > 1 else ""
    line = f"{whose}{', '.join(shared)}." if shared else ""
    line = line[:1].upper() + line[1:]
    engines = _by_backend(comparison)
    if engines and not _engines_differ(comparison):
        line += f" Engine: {', '.join(f'{min(its)} ({printable(name, 40)})' for name, its in engines.items())}."
    return line.strip()


def _seeds(seeds: Sequence[int]) -> str:
    """Return `seeds 0-4`, or the single ones where they have gaps."""
    if len(seeds) > 2 and list(seeds) == list(range(seeds[0], seeds[0] + len(seeds))):
        return f"seeds {seeds[0]}-{seeds[-1]}"
    return f"seed{'s' if len(seeds) > 1 else ''} {' '.join(map(str, seeds))}" if seeds else ""


def _times(comparison: Comparison) -> str:
    """Return one line: which step times do not count, and why."""
    reasons: dict[str, list[str]] = {}
    for row in comparison.arms:
        if reason := _no_time(row):
            reasons.setdefault(reason, []).append(printable(row.arm, 60))
    if not reasons:
        return ""
    parts = [f"{reason} for {few(names)}" for reason, names in reasons.items()]
    return printable(f"No step times: {'; '.join(parts)}.", 2000)


def _memory(comparison: Comparison) -> str:
    """Return one line on peaks measured on a CPU, which differ between equal runs; "" elsewhere."""
    peaks: dict[str, list[int]] = {}
    for record in comparison.records:
        if not str(record.environment.get("device", "cpu")).startswith("cpu"):
            return ""
        if record.summary.peak_bytes is not None:
            peaks.setdefault(record.arm, []).append(record.summary.peak_bytes)
    if not peaks:
        return ""
    spread = max(max(values) - min(values) for values in peaks.values())
    here = f": here by up to {spread / MIB:.1f} MiB between the seeds of an arm" if spread else ""
    return f"Peak MiB: growth of resident memory, the highest of the seeds; on a CPU it varies from run to run{here}."


def _no_time(row: ArmSummary) -> str:
    """Return why the step time of an arm does not count, or cannot be compared; "" where it can."""
    if is_emulated(row):
        return f"{printable(row.half or '', 40).partition(' ')[0]} emulated (computed in fp32, rounded)"
    if not row.completed:
        return ""
    if row.invalid_time:
        return f"invalid ({row.invalid_time})"
    word, detail = word_and_detail(row.time_verdict)
    return f"{word} ({detail})" if word in ("not comparable", "invalid measurement") else ""
