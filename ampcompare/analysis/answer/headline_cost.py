"""The costs of arms: step time and peak memory, or why they are not known."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ampcompare.analysis.answer.phrases import label_of, names_of
from ampcompare.records.comparison import ArmSummary, Comparison

__all__ = ["MIN_SAVING", "memory_saving", "memory_sentence", "on_device", "speed_sentences", "step_time_of"]

MIN_SAVING = 0.05  # of memory: less than that is the noise of an allocator
MAX_NAMED = 4
EMULATED = re.compile(r"(fp16|bf16) computed in fp32")


def on_device(comparison: Comparison) -> str:
    """Return where times were measured, if that is no GPU."""
    devices = {str(record.environment.get("device", "cpu")).partition(":")[0] for record in comparison.records}
    return " on this CPU" if devices == {"cpu"} else ""


def step_time_of(row: ArmSummary) -> str:
    """Return the relative step time of an arm with its interval, such as `0.61x (0.58 to 0.65)`."""
    if row.time_ratio is None:
        return ""
    if row.time_ratio_low is None or row.time_ratio_high is None:
        return f"{row.time_ratio:.2f}x"
    return f"{row.time_ratio:.2f}x ({row.time_ratio_low:.2f} to {row.time_ratio_high:.2f})"


def speed_sentences(comparison: Comparison, rows: Sequence[ArmSummary]) -> Iterable[str]:
    """Yield the relative step times of these rows, and of which the speed is not known, with the reason."""
    everyone = [row.arm for row in comparison.arms if row.arm != comparison.reference]
    known = [row for row in rows if row.time_ratio_low is not None]
    where = on_device(comparison)
    if len(known) == 1:
        (row,) = known
        doubt = ", inconclusive" if _is_open(row) else ""
        yield f"{label_of(row)} takes {step_time_of(row)} the step time of {comparison.reference}{where}{doubt}."
    elif known:
        known.sort(key=lambda row: row.time_ratio or 0.0)
        parts = [f"{label_of(row)} {_marked(row)}" for row in known[:MAX_NAMED]]
        more = f" and {len(known) - MAX_NAMED} more" if len(known) > MAX_NAMED else ""
        yield f"Step time relative to {comparison.reference}{where}: {', '.join(parts)}{more}."
    unknown = _unknown([row for row in rows if row not in known])
    if len(unknown) == 1 and not known:
        yield f"Speed is not known: {unknown[0][1]}."
    elif unknown:
        (names, why), *rest = [(names_of(arms, everyone), why) for arms, why in unknown]
        yield f"Speed of {names} is not known: {why}{''.join(f'; of {others}: {its}' for others, its in rest)}."


def _unknown(rows: Sequence[ArmSummary]) -> list[tuple[list[str], str]]:
    """Return the arms whose step times are not usable, with one reason: emulated ones, then invalid ones, then the
    rest.

    An arm whose accuracy could not be compared for the same reason is left out.
    """
    types = set()
    emulated: list[str] = []
    invalid: dict[str, str] = {}
    others: dict[str, str] = {}
    for row in rows:
        inside = row.time_verdict.partition(" (")[2].removesuffix(")")
        if row.time_verdict == row.accuracy_verdict:
            continue
        if match := EMULATED.fullmatch(inside):
            emulated.append(row.arm)
            types.add(match[1])
        elif row.time_verdict.startswith("invalid measurement"):
            invalid[row.arm] = inside
        elif row.time_verdict.startswith("not comparable"):
            others[row.arm] = inside
    found = []
    if emulated:
        verb = "is" if len(types) == 1 else "are"
        why = f"{' and '.join(sorted(types))} {verb} emulated on this CPU, measure on a GPU"
        found.append((emulated, why))
    if invalid:
        reasons = list(dict.fromkeys(invalid.values()))
        such = "such as " if len(reasons) > 1 else ""
        found.append((list(invalid), f"the measurement was invalid ({such}{reasons[0]})"))
    if others:
        reasons = list(dict.fromkeys(others.values()))
        such = "several reasons, such as " if len(reasons) > 1 else ""
        found.append((list(others), f"{such}{reasons[0]}"))
    return found


def _is_open(row: ArmSummary) -> bool:
    return row.time_verdict.startswith("inconclusive")


def _marked(row: ArmSummary) -> str:
    shown = step_time_of(row)
    return f"{shown.removesuffix(')')}, inconclusive)" if _is_open(row) else shown


def memory_saving(row: ArmSummary) -> float:
    """Return the share of the reference's peak that an arm saves, below 0 where it needs more; 0 if not known."""
    if row.memory_difference is None or row.peak_bytes is None or row.peak_bytes <= row.memory_difference:
        return 0.0
    return -row.memory_difference / (row.peak_bytes - row.memory_difference)


def memory_sentence(comparison: Comparison, rows: Sequence[ArmSummary]) -> str:
    """Return which of these rows need less or more memory than the reference; "" if none does, and on a CPU.

    The resident memory of a CPU moves by some MiB between runs.
    """
    if on_device(comparison) and comparison.records:
        return ""
    apart = sorted((row for row in rows if abs(memory_saving(row)) >= MIN_SAVING), key=memory_saving, reverse=True)
    parts = [f"{label_of(row)} {shown_saving(row)}" for row in apart[:MAX_NAMED]]
    more = f" and {len(apart) - MAX_NAMED} more" if len(apart) > MAX_NAMED else ""
    return f"Peak memory: {', '.join(parts)} than {comparison.reference}{more}." if parts else ""


def shown_saving(row: ArmSummary) -> str:
    """Return how much less, or more, memory an arm needs."""
    saving = memory_saving(row)
    return f"{100 * abs(saving):.0f} % {'less' if saving > 0 else 'more'}"
