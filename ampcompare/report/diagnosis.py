"""The report of a diagnosis, before it has a format: the verdict, the cure and the ten worst places."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from ampcompare.base.formatting import printable
from ampcompare.records.diagnosis import Cure, Diagnosis, Fault, PlaceReport
from ampcompare.report.document import Block, Code, Document, Figure, Items, Section, Table, Text
from ampcompare.report.html.diagnosis_figures import drift_by_depth, histograms, range_map

__all__ = ["HEADERS", "diagnosis_document", "place_row", "worst_places"]

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


def diagnosis_document(diagnosis: Diagnosis) -> Document:
    """Return the report: the verdict, the cure, the faults, the worst places and what the steps lost."""
    worst = worst_places(diagnosis)
    rows = [place_row(report) for report in worst]
    cures = sum(trial.cures for trial in diagnosis.trials)
    tried = f"Candidates trained: {len(diagnosis.trials)}; fault removed by {cures}"
    sections = [
        Section("verdict", [Text([diagnosis.verdict])]),
        Section("cure", [] if diagnosis.cure is None else [_cure(diagnosis.cure, diagnosis)]),
        Section("faults", [_fault(fault) for fault in diagnosis.faults]),
        Section("worst", [Table.of(HEADERS, rows, f"The {len(rows)} worst places")] if rows else []),
        Section("losses", [*_headroom(diagnosis), *_updates(diagnosis), _audit(diagnosis)]),
        Section("trials", [Text([tried])] if diagnosis.trials else []),
        Section("notes", [Items([f"note: {note}" for note in diagnosis.notes])] if diagnosis.notes else []),
        Section("map", [Figure("range_map", lambda: range_map(diagnosis), is_bare=True)],
                "Range of results, by module and step"),
        Section("exponents", [Figure("histograms", lambda: histograms(diagnosis, worst), is_bare=True)], "Exponents"),
        Section("drift", lambda: _drift(diagnosis), "Drift along the depth of the network"),
        Section("places", [Table.of(HEADERS, rows, caption="Worst places")]),
        Section("candidates", [_candidates(diagnosis)] if diagnosis.trials else [], "Candidates that were trained"),
        Section("types", [_types(diagnosis)], "Types that operations ran in"),
    ]  # fmt: skip
    about = (diagnosis.arm, diagnosis.subject, f"{diagnosis.steps} steps, {diagnosis.skipped} skipped")
    return Document(
        "diagnosis",
        sections,
        diagnosis,
        "Diagnosis",
        printable(diagnosis.verdict, 600),
        [printable(part, 120) for part in about if part],
        diagnosis.notes,
    )


def _drift(diagnosis: Diagnosis) -> list[Block]:
    drift = drift_by_depth(diagnosis)
    return [] if drift is None else [Figure("drift", lambda: drift, is_bare=True)]


def _candidates(diagnosis: Diagnosis) -> Table:
    rows = [[trial.name, "yes" if trial.cures else "no", printable(trial.left, 200)] for trial in diagnosis.trials]
    return Table.of(["candidate in fp32", "cures", "what is left"], rows, caption="Candidates", prose=True)


def _types(diagnosis: Diagnosis) -> Table:
    rows = [
        [
            row.operation,
            ", ".join(row.inputs),
            ", ".join(row.outputs),
            str(row.calls),
            _names(row.modules),
            row.remark or "as promised",
        ]
        for row in diagnosis.audit
    ]
    heads = ["operation", "inputs", "outputs", "calls", "modules", "against the arm"]
    return Table.of(heads, rows, caption="Types")


def _cure(cure: Cure, diagnosis: Diagnosis) -> Code:
    lines = [cure.code]
    if cure.arm is not None:
        script = ["--", *diagnosis.script] if diagnosis.script else []
        words = ["ampcompare", "compare", "--arm", diagnosis.arm, "--arm", cure.arm, *script]
        lines.append(f"to measure it: {printable(shlex.join(words), 1000)}")
    return Code("\n".join(lines), "Cure (tested)")


def _fault(fault: Fault) -> Items:
    why = f", as {fault.reason}" if fault.reason else ""
    chain = [f"chain: {' > '.join(fault.chain)}"] if fault.chain else []
    items = [*(f"into it: {text}" for text in fault.inputs), *chain]
    return Items(items, f"{fault.kind} at step {fault.step}: {fault.text}{why}")


def _headroom(diagnosis: Diagnosis) -> list[Text]:
    room = diagnosis.headroom
    if room is None:
        return []
    shares = ", ".join(f"{100 * share:.2g} % at {scale}" for scale, share in room.lost.items())
    largest = "unknown" if room.largest_scale is None else f"{room.largest_scale:g}"
    scale = f"own {room.own_scale:g}, largest without overflow {largest}"
    return [Text([f"Loss scale: {scale}; underflow in fp16: {shares}"])]


def _updates(diagnosis: Diagnosis) -> list[Text]:
    lost = [one for one in diagnosis.updates if one.moved and one.lost]
    if not lost:
        return []
    worst = max(lost, key=lambda one: one.lost / one.moved)
    total, moved = sum(one.lost for one in lost), sum(one.moved for one in diagnosis.updates)
    share = f"{100 * total / moved:.2g} % are below half a unit in the last place of the weight"
    most = f"most in {worst.parameter} ({worst.dtype}), {100 * worst.lost / worst.moved:.2g} %"
    return [Text([f"Updates: {share}; {most}"])]


def _audit(diagnosis: Diagnosis) -> Items | Text:
    remarks = [row for row in diagnosis.audit if row.remark]
    if not remarks:
        return Text([f"Types: {sum(row.calls for row in diagnosis.audit)} calls, as explain promises"])
    rows = [
        f"{row.calls} {row.operation} ({', '.join(row.inputs)} to {', '.join(row.outputs)}) in "
        f"{_names(row.modules)}: {row.remark}"
        for row in remarks
    ]
    return Items(rows, f"Types: not as `ampcompare explain {diagnosis.arm}` promises")


def _names(modules: Sequence[str]) -> str:
    return printable(", ".join(name or "no module" for name in modules), 80)
