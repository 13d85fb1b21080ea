"""The report of a diagnosis, before it has a format: the verdict, the cure and the ten worst places."""

import math
import shlex
from typing import Any

from ampcompare.base.formatting import format_count, format_rough_percent_number, printable_line
from ampcompare.base.tensors.type_names import HALF_NAMES
from ampcompare.results.records.diagnosis import Cure, Diagnosis, Fault, MagnitudeRange, PlaceReport
from ampcompare.results.report.document import (
    Block,
    Code,
    Document,
    Figure,
    Items,
    Section,
    Step,
    Table,
    Text,
)

WORST = 10
MAX_PLACE = 44
MAX_WHERE = 32
MAX_ROWS = 60
FP16 = (-24, 15)  # exponents
HEADS = ("place", "pass", "smallest", "largest", "zero %", "lost %", "top %", "error", "made", "call")


def worst_places(diagnosis: Diagnosis) -> list[PlaceReport]:
    """Return the places with values that are not finite, then those of the largest error, then of the widest range."""
    seen = [place for place in [*diagnosis.places, *diagnosis.gradients] if place.range.elements]
    begins = [fault.place for fault in diagnosis.faults]
    return sorted(seen, key=lambda one: (one.place in begins, *_sort_key_of_place(one)), reverse=True)[:WORST]


def _sort_key_of_place(report: PlaceReport) -> tuple[float, ...]:
    values = report.range
    is_half = bool(set(HALF_NAMES) & set(report.dtypes))  # fp32 has room above
    near = (values.share_of_count(values.top + values.above) if is_half else 0.0) + values.share_of_count(
        values.lost
    )
    breaks = values.nonfinite > 0
    return (
        breaks and report.place.phase == "forward",
        breaks,
        min(report.error or 0.0, 1.0) + near,
        values.share_of_count(values.nonfinite),
    )


def _place_row(report: PlaceReport) -> list[str]:
    """Return the cells of a place, under `HEADS`."""
    values, place = report.range, report.place
    return [
        printable_line(place.name, MAX_PLACE, keep_end=16),
        place.phase,
        _number_text(values.smallest),
        _number_text(values.largest) if not values.nonfinite else "not finite",
        _share_text(values, values.zeros),
        _share_text(values, values.lost),
        _share_text(values, values.top + values.above),
        _number_text(report.error),
        _number_text(report.made),
        printable_line(place.where, MAX_WHERE, keep_end=MAX_WHERE - 8) or "-",
    ]


def _share_text(values: MagnitudeRange, count: int) -> str:
    return format_rough_percent_number(values.share_of_count(count)) if count else "-"


def _number_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def diagnosis_document(diagnosis: Diagnosis) -> Document:
    """Return the report: the verdict, the cure, the faults, the worst places and what the steps lost."""
    worst = worst_places(diagnosis)
    rows = [_place_row(report) for report in worst]
    cures = sum(trial.cures for trial in diagnosis.trials)
    tried = f"Candidates trained: {len(diagnosis.trials)}; fault removed by {cures}"
    sections = [
        Section("verdict", [Text([diagnosis.verdict])]),
        Section("cure", [] if diagnosis.cure is None else _cure_blocks(diagnosis.cure, diagnosis)),
        Section("faults", [_fault_items(fault) for fault in diagnosis.faults]),
        Section("worst", [Table.from_rows(HEADS, rows, f"The {len(rows)} worst places")] if rows else []),
        Section("formats", _blocks_on_formats(diagnosis)),
        Section("losses", [*_loss_scale_headroom_texts(diagnosis), *_lost_update_texts(diagnosis)]),
        Section("trials", [Text([tried])] if diagnosis.trials else []),
        Section("notes", [Items([f"note: {note}" for note in diagnosis.notes])] if diagnosis.notes else []),
        Section("map", [Figure("range_map", lambda: _range_map_of_modules_and_steps(diagnosis), is_bare=True)],
                "Range of results, by module and step"),
        Section("places", [Table.from_rows(HEADS, rows, caption="Worst places")]),
        Section(
            "candidates",
            [_candidate_table(diagnosis)] if diagnosis.trials else [],
            "Candidates that were trained",
        ),
    ]  # fmt: skip
    about = (
        diagnosis.arm,
        diagnosis.subject,
        f"{format_count(diagnosis.steps, 'step')}, {diagnosis.skipped} skipped",
    )
    return Document(
        "diagnosis",
        sections,
        diagnosis,
        "Diagnosis",
        printable_line(diagnosis.verdict, 600),
        [printable_line(part, 120) for part in about if part],
        diagnosis.notes,
    )


def _blocks_on_formats(diagnosis: Diagnosis) -> list[Block]:
    """Return what each product of each layer changes, in the order of the layers, as sizes rank no layer."""
    errors = {(one.layer, one.role): one.error for one in diagnosis.formats}
    roles = list(dict.fromkeys(one.role for one in diagnosis.formats))
    rows = [
        [printable_line(layer, 60), *(f"{100 * errors[layer, role]:.2g} %" for role in roles)]
        for layer in dict.fromkeys(one.layer for one in diagnosis.formats)
    ]
    caption = "Change of the gradient by one product of one layer in its format, all else in bf16"
    return [Table.from_rows(["layer", *roles], rows, caption)] if rows else []


def _candidate_table(diagnosis: Diagnosis) -> Table:
    rows = [
        [trial.name, "yes" if trial.cures else "no", printable_line(trial.left, 200)]
        for trial in diagnosis.trials
    ]
    return Table.from_rows(
        [f"candidate in {'bf16' if diagnosis.formats else 'fp32'}", "cures", "what is left"],
        rows,
        caption="Candidates",
        prose=True,
    )


def _cure_blocks(cure: Cure, diagnosis: Diagnosis) -> list[Block]:
    code = Code(cure.code, "Cure (tested)")
    if cure.arm is None:
        return [code]
    script = ["--", *diagnosis.script] if diagnosis.script else []
    words = ["ampcompare", "compare", "--arm", diagnosis.arm, "--arm", cure.arm, *script]
    return [code, Step("measure the cure (with your other options)", printable_line(shlex.join(words), 1000))]


def _fault_items(fault: Fault) -> Items:
    why = f", as {fault.reason}" if fault.reason else ""
    chain = [f"chain: {' > '.join(fault.chain)}"] if fault.chain else []
    items = [*(f"into it: {text}" for text in fault.inputs), *chain]
    return Items(items, f"{fault.kind} at step {fault.step}: {fault.text}{why}")


def _loss_scale_headroom_texts(diagnosis: Diagnosis) -> list[Text]:
    room = diagnosis.headroom
    if room is None:
        return []
    shares = ", ".join(
        f"{format_rough_percent_number(share)} % at {scale}" for scale, share in room.lost.items()
    )
    largest = "unknown" if room.largest_scale is None else f"{room.largest_scale:g}"
    scale = f"own {room.own_scale:g}, largest without overflow {largest}"
    return [Text([f"Loss scale: {scale}; underflow in fp16: {shares}"])]


def _lost_update_texts(diagnosis: Diagnosis) -> list[Text]:
    lost = [one for one in diagnosis.updates if one.moved and one.lost]
    if not lost:
        return []
    worst = max(lost, key=lambda one: one.lost / one.moved)
    total, moved = sum(one.lost for one in lost), sum(one.moved for one in diagnosis.updates)
    share = f"{format_rough_percent_number(total / moved)} % are below half a unit in the last place of the weight"
    most = f"most in {worst.parameter} ({worst.dtype}), {format_rough_percent_number(worst.lost / worst.moved)} %"
    return [Text([f"Updates: {share}; {most}"])]


MapCell = tuple[str, float, str]  # a class of the style sheet, its strength from 0 to 1, and a text


def _range_map_of_modules_and_steps(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return how much of the range of fp16 each module uses in each step that was watched: steps, and rows of cells."""
    found = {(cell.module, cell.step): cell.range for cell in diagnosis.map}
    seen = {module for module, _ in found}
    order = [*(name for name in diagnosis.modules if name in seen), *sorted(seen - set(diagnosis.modules))]
    rows = [
        (
            printable_line(name or "outside of submodules", 40, keep_end=20),
            [_fp16_range_map_cell(found.get((name, step)), step) for step in diagnosis.observed],
        )
        for name in order[:MAX_ROWS]
    ]
    return {"steps": diagnosis.observed, "rows": rows}


def _fp16_range_map_cell(values: MagnitudeRange | None, step: int) -> MapCell:
    """Return how much of the range of fp16 a module uses: what overflows, what is near, what is too small."""
    if values is None:
        return ("", 0.0, "")
    text = f"step {step}: {values.smallest or 0:.2g} to {values.largest or 0:.2g}"
    if values.nonfinite:
        return ("bad", 1.0, f"{text}, {values.nonfinite} not finite")
    high, low = (
        values.share_of_count(values.top + values.above),
        values.share_of_count(values.below + values.lost),
    )
    if high:
        return (
            "unclear",
            0.4 + 0.6 * min(1.0, 10 * high),
            f"{text}, {format_rough_percent_number(high)} % from 32768",
        )
    if low > 0.01:
        return (
            "accent",
            0.2 + 0.8 * min(1.0, low),
            f"{text}, {format_rough_percent_number(low)} % below fp16",
        )
    used = (math.log2(values.largest) - FP16[0]) / (FP16[1] - FP16[0]) if values.largest else 0.0
    return ("good", 0.1 + 0.7 * min(1.0, max(0.0, used)), text)
