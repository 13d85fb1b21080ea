"""A diagnosis as text for a terminal: the verdict first, then the ten worst places and the cure."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Sequence

from ampcompare.base.formatting import printable
from ampcompare.records.diagnosis import Diagnosis, PlaceReport
from ampcompare.report.tables import grid

__all__ = ["HEADERS", "diagnosis_text", "place_row", "worst_places"]

WORST = 10
MAX_PLACE = 44
MAX_WHERE = 32
HEADERS = ("place", "pass", "smallest", "largest", "zero %", "lost %", "top %", "error", "made", "call")


def worst_places(diagnosis: Diagnosis, count: int = WORST) -> list[PlaceReport]:
    """Return the places with values that are not finite, then those of the largest error, then of the widest range."""
    seen = [place for place in [*diagnosis.places, *diagnosis.gradients] if place.range.elements]
    begins = [fault.place for fault in diagnosis.faults]
    return sorted(seen, key=lambda one: (one.place in begins, *_badness(one)), reverse=True)[:count]


def _badness(report: PlaceReport) -> tuple[float, ...]:
    values = report.range
    is_half = bool({"fp16", "bf16"} & set(report.dtypes))  # fp32 has room above
    near = (values.share(values.top + values.above) if is_half else 0.0) + values.share(values.lost)
    breaks = values.nonfinite > 0
    return (
        breaks and report.place.phase == "forward",
        breaks,
        min(report.error or 0.0, 1.0) + near,
        values.share(values.nonfinite),
    )


def place_row(report: PlaceReport) -> list[str]:
    """Return the cells of a place, under `HEADERS`."""
    values, place = report.range, report.place
    return [
        printable(place.name, MAX_PLACE, keep_end=16),
        place.phase,
        _number(values.smallest),
        _number(values.largest) if not values.nonfinite else "not finite",
        _percent(values.share(values.zeros)),
        _percent(values.share(values.lost)),
        _percent(values.share(values.top + values.above)),
        _number(report.error),
        _number(report.made),
        printable(place.where, MAX_WHERE, keep_end=MAX_WHERE - 8) or "-",
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def _percent(share: float) -> str:
    return "-" if share == 0 else f"{100 * share:.2g}"


def diagnosis_text(diagnosis: Diagnosis, *, width: int = 120) -> str:
    """Return the text; it ends with a newline."""
    lines = textwrap.wrap(printable(diagnosis.verdict, 2000), width)
    if diagnosis.cure is not None:
        lines += ["", "Cure (tested)", *(f"  {line}" for line in diagnosis.cure.code.splitlines())]
        if diagnosis.cure.arm is not None:
            script = ["--", *diagnosis.script] if diagnosis.script else []
            words = ["ampcompare", "compare", "--arm", diagnosis.arm, "--arm", diagnosis.cure.arm, *script]
            lines += [f"  to measure it: {printable(shlex.join(words), 1000)}"]
    for fault in diagnosis.faults:
        why = f", as {fault.reason}" if fault.reason else ""
        lines += ["", *textwrap.wrap(f"{fault.kind} at step {fault.step}: {printable(fault.text + why, 1000)}", width)]
        lines += [f"  into it: {printable(text, width)}" for text in fault.inputs]
        if fault.chain:
            lines += textwrap.wrap(
                f"chain: {' > '.join(fault.chain)}", width, initial_indent="  ", subsequent_indent="    "
            )
    rows = [place_row(report) for report in worst_places(diagnosis)]
    if rows:
        lines += ["", f"The {len(rows)} worst places", grid(rows, HEADERS, width)]
    lines += _headroom(diagnosis) + _updates(diagnosis) + _audit(diagnosis)
    if diagnosis.trials:
        cures = sum(trial.cures for trial in diagnosis.trials)
        lines += ["", f"Candidates trained: {len(diagnosis.trials)}; fault removed by {cures}"]
    lines += [f"note: {printable(note, 500)}" for note in diagnosis.notes]
    return "\n".join(lines) + "\n"


def _headroom(diagnosis: Diagnosis) -> list[str]:
    room = diagnosis.headroom
    if room is None:
        return []
    shares = ", ".join(f"{100 * share:.2g} % at {scale}" for scale, share in room.lost.items())
    largest = "unknown" if room.largest_scale is None else f"{room.largest_scale:g}"
    return ["", f"Loss scale: own {room.own_scale:g}, largest without overflow {largest}; underflow in fp16: {shares}"]


def _updates(diagnosis: Diagnosis) -> list[str]:
    lost = [one for one in diagnosis.updates if one.moved and one.lost]
    if not lost:
        return []
    worst = max(lost, key=lambda one: one.lost / one.moved)
    total, moved = sum(one.lost for one in lost), sum(one.moved for one in diagnosis.updates)
    return [
        f"Updates: {100 * total / moved:.2g} % are below half a unit in the last place of the weight; "
        f"most in {worst.parameter} ({worst.dtype}), {100 * worst.lost / worst.moved:.2g} %"
    ]


def _audit(diagnosis: Diagnosis) -> list[str]:
    remarks = [row for row in diagnosis.audit if row.remark]
    if not remarks:
        return [f"Types: {sum(row.calls for row in diagnosis.audit)} calls, as explain promises"]
    return [
        f"Types: not as `ampcompare explain {diagnosis.arm}` promises",
        *(
            f"  {row.calls} {row.operation} ({', '.join(row.inputs)} to {', '.join(row.outputs)}) in "
            f"{_names(row.modules)}: {row.remark}"
            for row in remarks
        ),
    ]


def _names(modules: Sequence[str]) -> str:
    return printable(", ".join(name or "no module" for name in modules), 80)
