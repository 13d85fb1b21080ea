"""The report of a replay, before it has a format: a sentence for each change, what differs, errors of modules."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ampcompare.base.formatting import printable_line
from ampcompare.results.analysis.replay import PARTS, ModuleErrors, ReplayJudgment
from ampcompare.results.report.document import Block, Cell, Document, Section, Table, Text

MAX_FINDINGS = 12
BAR = 27  # characters
MOST_DECADES, LEAST_DECADES = 8.0, -1.0  # of the errors in the picture
LEGEND = (
    "Errors in units in the last place, the largest of a module, each against itself in fp64: of the step as it is (=) "
    "and of each change (# where it is more; three characters are a decade). Left out is what has no digits since its "
    "terms cancel out, such as the gradient of a bias before batch norm."
)


def replay_document(judgments: Sequence[ReplayJudgment]) -> Document:
    """Return the report of replays of one step."""
    sentences = [one.sentence for one in judgments]
    blocks: list[Block] = [Text(sentences), *_finding_blocks(judgments)]
    sections = [Section("answer", blocks), Section("modules", _module_blocks(judgments))]
    notes = [note for one in judgments for note in one.notes]
    notes += [f"{name} is not judged: {why}" for one in judgments for name, why in one.unjudged.items()]
    if notes:
        sections.append(Section("notes", [Text(list(dict.fromkeys(notes)))]))
    return Document("replay", sections, judgments, title="; ".join(sentences))


def _finding_blocks(judgments: Sequence[ReplayJudgment]) -> list[Block]:
    rows = []
    for judgment in judgments:
        for one in judgment.findings[:MAX_FINDINGS]:
            side = "input" if one.part == "dgrad" else "output"
            tensor = f"{side} {one.tensor}" if one.tensor.isdecimal() else one.tensor
            where = f"{printable_line(one.module, 44, keep_end=16)}, {PARTS[one.part]} ({tensor})"
            rows.append([judgment.change, where, f"{one.answer}: {one.finding_text}"])
        if (more := len(judgment.findings) - MAX_FINDINGS) > 0:
            rows.append([judgment.change, f"and {more} more", ""])
    if not rows:
        return []
    first = 0 if len(judgments) > 1 else 1
    heads = ["change", "where", "what"]
    return [Table.from_rows(heads[first:], [row[first:] for row in rows], "What differs, the lowest modules")]


def _module_blocks(judgments: Sequence[ReplayJudgment]) -> list[Block]:
    judged = [one for one in judgments if one.errors]
    names = list(dict.fromkeys((one.module, one.kind) for each in judged for one in each.errors))
    found = [_largest_errors_by_module(one.errors) for one in judged]
    rows: list[Sequence[str | Cell]] = []
    for name, kind in names:
        here = [one.get(name) for one in found]
        before = max((one[0] for one in here if one), default=0.0)
        cells = [_changed_error_cell(one) for one in here]
        bar = _text_bar_of_errors(before, max((one[1] for one in here if one), default=0.0))
        rows.append([printable_line(name, 44, keep_end=16), kind, _units_text(before), *cells, bar])
    heads = ["module", "class", "as it is", *(one.change for one in judged), ""]
    return [Table.from_rows(heads, rows, "Errors of modules", LEGEND)] if rows else []


def _largest_errors_by_module(errors: Sequence[ModuleErrors]) -> dict[str, tuple[float, float, bool]]:
    """Return of each module the largest error as it is and changed, and whether it differs."""
    found: dict[str, tuple[float, float, bool]] = {}
    for one in errors:
        before, now = (max((pair[side] for pair in one.units.values()), default=0.0) for side in (0, 1))
        first, second, differs = found.get(one.module, (0.0, 0.0, False))
        found[one.module] = max(first, before), max(second, now), differs or one.answer != "noise"
    return found


def _changed_error_cell(error: tuple[float, float, bool] | None) -> Cell:
    if error is None:
        return Cell("-")
    _, value, is_bad = error
    return Cell(_units_text(value), "bad" if is_bad else "")


def _units_text(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "-"


def _text_bar_of_errors(before: float, now: float) -> str:
    first, second = _bar_length(before), _bar_length(now)
    return "=" * first + "#" * max(0, second - first)


def _bar_length(value: float) -> int:
    if value <= 0:
        return 0
    decades = math.log10(value) if math.isfinite(value) else MOST_DECADES
    share = (min(max(decades, LEAST_DECADES), MOST_DECADES) - LEAST_DECADES) / (MOST_DECADES - LEAST_DECADES)
    return round(BAR * share)
