"""Read the rows that a script's process has written: its updates, and what it logged."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ampcompare.base.files.read import parse_json
from ampcompare.base.files.run_files import CellFile
from ampcompare.results.records.document import parse_json_number
from ampcompare.results.records.ledger import Ledger
from ampcompare.results.records.run import ScriptFacts, SeedCall
from ampcompare.results.records.step import StepRecord
from ampcompare.script.recording.tail import rows_only_in_tail_file

KNOWN = ("lr", "grad_norm")  # of a step, where its row says them


@dataclass
class ScriptRows:
    """What one process did.

    Attributes:
        steps: an update is one step of each optimizer that takes turns; its time is from the end of the last one.
        has_losses: whether some backward pass began at a loss whose value was seen.
        weights: hash at each `initialize`.
        batches: hashes of the first ones.
        draws: hashes of the generators before those forward passes of them that draw random numbers.
        seeds: where it seeds its generators.
        scalars: values by name, with the function that logged them.
        guards: mistakes in the use of amp.
        lost_statistics: layers whose running statistics are not finite at the end, though their weights are.
        setup: how 16-bit types are computed, and facts about the device.
        ledger: in which types the training ran; None if no step was looked at.
        rank: of the process and number of ranks, in a process group at the first step; None without one.
        planned_steps: of the whole script, as its loops say; None where that is not known, or nothing ends it early.
        ended: exit code and error; None if the process was killed.
    """

    header: dict[str, Any] = field(default_factory=dict)
    steps: list[StepRecord] = field(default_factory=list)
    has_losses: bool = False
    weights: list[str] = field(default_factory=list)
    optimizers: list[str] = field(default_factory=list)
    batches: list[str] = field(default_factory=list)
    draws: list[str] = field(default_factory=list)
    seeds: list[SeedCall] | None = None
    scalars: dict[str, list[float]] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    rounded_codes: str = ""
    equal_numbers: list[str] = field(default_factory=list)
    guards: list[str] = field(default_factory=list)
    lost_statistics: list[str] = field(default_factory=list)
    setup: dict[str, Any] = field(default_factory=dict)
    ledger: Ledger | None = None
    peak_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    rank: tuple[int, int] | None = None
    planned_steps: int | None = None
    ended: dict[str, Any] | None = None

    @property
    def losses(self) -> list[float]:
        """Those of its steps; none where no backward pass began at a loss whose value was seen."""
        return [step.loss for step in self.steps if self.has_losses]

    def script_facts(self) -> ScriptFacts:
        """Return what the record of the cell keeps besides its steps."""
        return ScriptFacts(
            weights=self.weights,
            batches=self.batches,
            draws=self.draws,
            seeds=self.seeds,
            notes=self.notes,
            remarks=self.remarks,
            rounded_codes=self.rounded_codes,
            equal_numbers=self.equal_numbers,
            lost_statistics=self.lost_statistics,
        )


def read_script_rows(path: Path) -> ScriptRows:
    """Return what the record of a process holds; lines that were cut off are left out, and so is a missing file."""
    rows = ScriptRows()
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return rows
    read: list[dict[str, Any]] = []
    for line in lines:
        try:
            row = parse_json(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            read.append(row)
    read += rows_only_in_tail_file(path, read)
    if read:
        rows.header = read.pop(0)
    for row in read:
        _add_row(rows, row)
    rows.has_losses = any(row.get("loss") is not None for row in read)
    rows.steps = list(
        _iter_updates(row for row in read if row.get("kind") in ("backward", "plain_backward", "step"))
    )
    return rows


def _add_row(rows: ScriptRows, row: dict[str, Any]) -> None:
    kind = row.get("kind")
    if kind == "weights":
        rows.weights.append(row["sha256"])
        rows.optimizers += row.get("optimizers", ())
    elif kind == "batches":
        rows.batches = row["sha256"]
        rows.draws = row.get("draws", [])
    elif kind == "seeds":
        rows.seeds = [SeedCall.model_validate(call) for call in row["calls"]]
    elif kind == "metric":
        rows.scalars.setdefault(row["name"], []).append(parse_json_number(row["value"]))
        rows.sources.setdefault(row["name"], row["source"])
    elif kind == "memory":
        rows.peak_bytes, rows.peak_reserved_bytes = row["peak_bytes"], row["peak_reserved_bytes"]
    elif kind == "note":
        rows.notes.append(row["text"])
    elif kind == "remark":
        rows.remarks.append(row["text"])
    elif kind == "rounded_codes":
        rows.rounded_codes = row["text"]
    elif kind == "equal_numbers":
        rows.equal_numbers.append(row["place"])
    elif kind == "guard":
        rows.guards.append(row["text"])
    elif kind == "setup":
        rows.setup = row
    elif kind == "ledger":
        rows.ledger = Ledger.model_validate({name: value for name, value in row.items() if name != "kind"})
    elif kind == "lost_statistics":
        rows.lost_statistics = row["layers"]
    elif kind == "planned":
        rows.planned_steps = row["steps"]
    elif kind == "rank":
        rows.rank = row["rank"], row["world_size"]
    elif kind == "end":
        rows.ended = row


@dataclass
class _UpdateOfScript:
    """Steps of optimizers that take turns."""

    losses: list[float] = field(default_factory=list)
    before: dict[int, float] = field(default_factory=dict)
    after: dict[int, float] = field(default_factory=dict)
    applied: dict[int, bool] = field(default_factory=dict)
    seconds: float = 0.0
    lr: float | None = None
    grad_norm: float | None = None


def _iter_updates(rows: Iterable[dict[str, Any]]) -> Iterable[StepRecord]:
    """Yield the updates: losses belong to the step after them, and an optimizer that steps again begins another one.

    So does one that takes the place of all that have stepped in an update, as that of a second training. A loss that
    nothing scales counts where a step has no other.
    """
    rows = list(rows)
    last_steps = {int(row["optimizer"]): place for place, row in enumerate(rows) if row["kind"] == "step"}
    first_update: dict[int, int] = {}  # of each optimizer
    update, number = _UpdateOfScript(), 0
    waiting: list[dict[str, Any]] = []  # losses since the step before
    plain: list[dict[str, Any]] = []
    for place, row in enumerate(rows):
        if row["kind"] == "plain_backward":
            plain.append(row)
            continue
        if row["kind"] == "backward":
            waiting.append(row)
            continue
        optimizer = int(row["optimizer"])
        replaces = (
            optimizer not in first_update
            and last_steps[optimizer] > place  # a single one may be what a script makes after it was ended
            and all(last_steps[other] < place and first_update[other] < number for other in update.applied)
        )
        if update.applied and (optimizer in update.applied or replaces):
            yield _step_record(update, number)
            update, number = _UpdateOfScript(), number + 1
        if not update.applied:
            update.seconds = float(row["seconds"] or 0.0)
            update.lr, update.grad_norm = (
                None if row.get(name) is None else parse_json_number(row[name]) for name in KNOWN
            )
        update.applied[optimizer] = bool(row["applied"])
        first_update.setdefault(optimizer, number)
        if waiting:
            update.losses.append(sum(_losses_of_rows(waiting)))
            for backward in waiting:
                if backward["scale_before"] is not None:
                    update.before.setdefault(backward["loss_id"], parse_json_number(backward["scale_before"]))
                    update.after[backward["loss_id"]] = parse_json_number(backward["scale_after"])
        elif plain:
            update.losses.append(sum(_losses_of_rows(plain)))
        waiting, plain = [], []
    if update.applied:
        yield _step_record(update, number)


def _losses_of_rows(rows: Sequence[dict[str, Any]]) -> list[float]:
    return [math.nan if row["loss"] is None else parse_json_number(row["loss"]) for row in rows]


def _step_record(update: _UpdateOfScript, number: int) -> StepRecord:
    return StepRecord(
        step=number,
        epoch=0,
        loss=sum(update.losses) if update.losses else math.nan,
        loss_scales_before=tuple(update.before.values()),
        loss_scales=tuple(update.after.values()),
        applied=tuple(applied for _, applied in sorted(update.applied.items())),
        grad_norm=update.grad_norm,
        seconds=update.seconds,
        data_seconds=0.0,
        losses=tuple(update.losses) if len(update.losses) > 1 else (),
        lr=update.lr,
    )


def rows_of_training_children(folder: Path) -> list[ScriptRows]:
    """Return what the processes that the script has started, spawned or forked, have recorded, if they made a step."""
    return [rows for rows in _rows_of_children(folder) if rows.steps]


def first_error_of_children(folder: Path) -> str:
    """Return why the first of these processes failed that says so; "" if none does."""
    errors = [
        str(rows.ended["error"])
        for rows in _rows_of_children(folder)
        if rows.ended and rows.ended.get("error")
    ]
    return errors[0] if errors else ""


def _rows_of_children(folder: Path) -> list[ScriptRows]:
    others = {folder / CellFile.SCRIPT, *folder.glob(CellFile.RANK_SCRIPTS)}
    return [read_script_rows(path) for path in sorted(folder.glob(CellFile.SCRIPTS)) if path not in others]


def rows_that_stand_for_cell(folder: Path) -> ScriptRows:
    """Return the rows that stand for a cell: those of its process, or of rank 0 of the processes that it has started.

    They do where the first process made no step and raised no error, and the others are all ranks of one process group,
    with as many steps each, or a single one. An error ends the others at any step, so that their rows say nothing.
    """
    rows = read_script_rows(folder / CellFile.SCRIPT)
    if rows.steps or (rows.ended or {}).get("error"):
        return rows
    children = rows_of_training_children(folder)
    if not children or not _are_ranks_of_one_group(children):
        return rows
    first = min(children, key=lambda one: one.rank or (0, 1))
    of_rank = "rank 0 of " if len(children) > 1 else ""
    first.notes.append(f"the steps are those of {of_rank}{_training_processes_phrase(children)} started")
    return first


def _training_processes_phrase(children: Sequence[ScriptRows]) -> str:
    return (
        f"{len(children)} processes that the script has"
        if len(children) > 1
        else "a process that the script has"
    )


def _are_ranks_of_one_group(children: Sequence[ScriptRows]) -> bool:
    if len(children) == 1:
        return children[0].rank is None or children[0].rank[1] == 1
    places = {one.rank for one in children}
    steps = {len(one.steps) for one in children}
    return places == {(rank, len(children)) for rank in range(len(children))} and len(steps) == 1
