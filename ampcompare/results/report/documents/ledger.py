"""What arms declare next to what ran: one row for each arm in a comparison, one for each part of a step elsewhere."""

from collections.abc import Mapping, Sequence
from typing import Any

from ampcompare.backends.arm import Arm
from ampcompare.backends.roles import Roles
from ampcompare.base.formatting import format_count, printable_line
from ampcompare.results.analysis.pairing.declared import (
    RoleComparison,
    ineffective_option_sentences,
    observed_types_text,
    role_comparisons,
    sentences_on_types_not_of_arm,
)
from ampcompare.results.records.comparison import Comparison
from ampcompare.results.records.ledger import GroupTypes, Ledger, Types
from ampcompare.results.report.document import Block, Cell, Column, Document, Figure, Section, Table, Text
from ampcompare.results.report.documents.profile import COLORS, bar_segments

MOST_ARMS = 8  # in the figure
SHORT = {
    "forward products": "forward",
    "backward products": "backward",
    "accumulated gradients": "accumulated",
    "update lost": "lost",
    "largest gradient": "max gradient",
    "zero denominators": "zero den.",
}
FIGURES = {
    "largest gradient": "Max gradient: times the loss scale; the largest number of fp16 is 65504.",
    "zero denominators": "Zero den.: elements that Adam divides by 0.",
}


def ledger_blocks(comparison: Comparison) -> list[Block]:
    """Return a row of observed types for each arm, those that are not as declared first, and the figure of them."""
    seen: dict[str, tuple[list[RoleComparison], Ledger]] = {}
    for record in comparison.records:
        if record.ledger is None:
            continue
        found = role_comparisons(record.config.parsed_arm.roles, record.ledger)
        if record.arm not in seen or any(role.differs for role in found):
            seen[record.arm] = found, record.ledger
    order = sorted(seen, key=lambda arm: not any(role.differs for role in seen[arm][0]))
    if not order:
        return []
    figure = Figure("bars", lambda: _type_bars({arm: seen[arm] for arm in order[:MOST_ARMS]}))
    return [_ledger_table({arm: seen[arm][0] for arm in order}), figure]


def _type_bars(seen: Mapping[str, tuple[Sequence[RoleComparison], Ledger]]) -> dict[str, Any]:
    """Return a bar for each part of a step: the share of elements, or of multiply-adds, by type."""
    names = sorted(
        {name for _, ledger in seen.values() for _, _, types in _figure_parts(ledger) for name in types}
    )
    bars: list[dict[str, Any]] = []
    for arm, (roles, ledger) in seen.items():
        bars.append({"name": printable_line(arm, 30), "text": "declared", "segments": []})
        by_name = {role.name: role for role in roles}
        for title, part, types in _figure_parts(ledger):
            role = by_name.get(part)
            declared = "" if role is None or not role.declared else f"{'not ' * role.differs}{role.declared}"
            segments = bar_segments(names, [types.get(name, 0.0) for name in names], 1.0, "{:.0%}".format)
            bars.append({"name": title, "text": declared, "segments": segments})
    return {
        "title": "What ran by type",
        "bars": bars,
        "key": [(name, index % COLORS) for index, name in enumerate(names)],
    }


def _figure_parts(ledger: Ledger) -> list[tuple[str, str, Types]]:
    """Return name, part and types of what a figure shows of a ledger: each parameter group, and the products."""
    several = len(ledger.groups) > 1
    parts = []
    for group in ledger.groups:
        of_group = f" of {printable_line(group.name, 16)}" if several else ""
        for part in ("weights", "masters", "state"):
            parts.append((f"{part}{of_group}", part, getattr(group, part)))
    parts.append(("forward products", "forward products", ledger.forward))
    parts.append(("backward products", "backward products", ledger.backward))
    return [one for one in parts if one[2]]


def _ledger_table(rows: Mapping[str, Sequence[RoleComparison]]) -> Table:
    heads = [
        role.name for roles in rows.values() for role in sorted(roles, key=lambda role: role.position_in_step)
    ]
    seen = {role.name for roles in rows.values() for role in roles if role.observed}
    shown = [head for head in dict.fromkeys(heads) if head in seen]
    return Table(
        [Column("arm"), *(Column(SHORT.get(head, head)) for head in shown)],
        [[Cell(printable_line(arm, 60)), *_role_cells(rows[arm], shown)] for arm in rows],
        legend=[
            "Types that a few steps showed: of weights between steps, of multiply-adds in the forward and the backward "
            "pass, and of what the optimizer gets and keeps. Lost: elements that an update left as they were. In "
            "parentheses: what the arm declares, where something else ran.",
            *(text for name, text in FIGURES.items() if name in shown),
        ],
        caption="What ran, one row per arm",
    )


def _role_cells(roles: Sequence[RoleComparison], shown_names: Sequence[str]) -> list[Cell]:
    by_name = {role.name: role for role in roles}
    cells = []
    for name in shown_names:
        role = by_name.get(name)
        if role is None or not (role.observed or role.differs):
            cells.append(Cell())
        else:
            text = role.observed or "none"
            other = f"{text} ({role.declared})" if role.differs or role.departs else text
            cells.append(Cell(other, "bad") if role.differs else Cell(other))
    return cells


def ledger_document(ledger: Ledger, arm: Arm) -> Document:
    """Return what one training showed, next to what its arm declares, as a document of any format.

    Args:
        ledger: of the training.
        arm: under which it ran; one without declared roles, as `script`, has nothing to differ from.
    """
    roles, title = arm.roles, f"What ran under {arm}"
    differ = [part.difference_text for part in role_comparisons(roles, ledger) if part.differs]
    head = f"{title}: not as declared ({'; '.join(dict.fromkeys(differ))})" if differ else title
    where = f"Seen in {format_count(len(ledger.steps), 'step')}: {', '.join(map(str, ledger.steps))}, counted from 0."
    by = f" ({ledger.by['frozen']})" if "frozen" in ledger.by else ""
    frozen = [f"Frozen weights: {observed_types_text(ledger.frozen)}{by}."] if ledger.frozen else []
    groups = (
        [f"{group.name}: {_group_types_text(group)}." for group in ledger.groups]
        if len(ledger.groups) > 1
        else []
    )
    if ledger.skipped:
        where += f" {ledger.skipped} of them updated nothing."
    own = [f"{note[0].upper()}{note[1:]}." for note in sentences_on_types_not_of_arm(roles, ledger)]
    sections = [
        Section("headline", [Text([head])]),
        Section("parts", [_step_parts_table(roles, ledger)]),
        Section("where", [Text([*ineffective_option_sentences(arm, ledger), *own, where, *frozen, *groups])]),
    ]
    return Document("ledger", sections, ledger, title, head)


def _group_types_text(group: GroupTypes) -> str:
    """Return the types of one parameter group in words."""
    parts = [("weights", group.weights), ("masters", group.masters), ("gradients", group.gradients)]
    shown = [
        f"{name} {observed_types_text(types)}" for name, types in [*parts, ("state", group.state)] if types
    ]
    return f"{group.parameters:,} parameters, {', '.join(shown)}"


def _step_parts_table(roles: Roles | None, ledger: Ledger) -> Table:
    """Return a row for each part of a step: what was declared, what ran, and who set it."""
    heads = ["part", *(["declared"] if roles is not None else []), "ran", "by"]
    rows: list[list[str | Cell]] = []
    for part in role_comparisons(roles, ledger):
        ran = Cell(part.observed or "-", "bad" if part.differs else "")
        declared = [part.declared or "-"] if roles is not None else []
        rows.append([part.name, *declared, ran, printable_line(part.remark or "-", 120)])
    return Table.from_rows(heads, rows, caption="What ran", narrows=True)
