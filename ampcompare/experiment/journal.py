"""The journal of a run directory: one line for each look at its runs, only ever appended to.

`journal.jsonl` holds strict JSON. Each line carries a hash of the one before, so that a changed or removed line is
detected. The process that writes holds the lock of the folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from pydantic import ValidationError

from ampcompare.analysis.inference.criteria import Criteria
from ampcompare.analysis.inference.effect import MIN_PAIRS
from ampcompare.analysis.inference.looks import (
    Design,
    changed_terms,
    changes_sentence,
    error_rate_of_next,
    look_sentences,
)
from ampcompare.analysis.runs.comparability import changed_settings
from ampcompare.analysis.runs.pairs import finished, pairs_by_seed
from ampcompare.analysis.runs.scores import metric_of
from ampcompare.base.errors import RecordError
from ampcompare.base.files.read import FileFault, parse_json, read_json, read_text
from ampcompare.base.files.write import append_line
from ampcompare.records.comparison import Comparison
from ampcompare.records.look import Look
from ampcompare.records.run import RunRecord, dump_json, read_record

__all__ = ["JOURNAL", "NO_PLAN", "Journal", "append_look", "journal_head", "read_looks"]

JOURNAL = "journal.jsonl"
NOT_COMPLETE = (
    "Nothing was tested: some runs of this plan are missing, and a test before the end would be another look. Run the "
    "command that began it again: it finishes the other runs and tests."
)
NOT_COUNTED = (
    "Nothing was tested: the journal has no look at these runs under the terms of the plan, and a report adds none. "
    "Run the comparison again with these terms to test."
)
NO_PLAN = (
    "Nothing was tested: the folder has a journal of looks but no plan.json that says which of its runs belong "
    "together. Run the command that wrote it again to restore it."
)
SPENT = (
    "Nothing was tested: earlier looks have spent the error rate of 5 %. Other seeds in another run directory are a "
    "new comparison."
)


def read_looks(folder: Path) -> list[Look]:
    """Return the looks at a run directory, in order; none where it has no journal.

    Raises:
        RecordError: a line is damaged, changed or missing, including the last one, which `plan.json` names.
    """
    path, head = folder / JOURNAL, _head_of_plan(folder)
    if not os.path.lexists(path):
        if head:
            raise _lacks_a_look(path)
        return []
    try:
        lines = read_text(path).splitlines()
    except FileFault as fault:
        raise RecordError(f"cannot read the journal {path}: {fault}") from None
    looks, before = [], ""
    for number, line in enumerate(lines, 1):
        try:
            data = parse_json(line)
            if not isinstance(data, dict) or data.get("before") != _hash(before):
                raise FileFault("it does not follow from the line before, so a line was changed or removed")
            looks.append(Look.model_validate(data["look"]))
        except (FileFault, KeyError, ValidationError) as error:
            why = f"{error}".splitlines()[0]
            raise RecordError(
                f"{path}, line {number}, is damaged: {why}; how often these runs were looked at is not known, so "
                "restore the file or choose another --output-dir"
            ) from None
        before = line
    if head and head not in map(_hash, lines):
        raise _lacks_a_look(path)
    return looks


def journal_head(folder: Path) -> str:
    """Return the hash of the last look, which `plan.json` keeps; "" where there is none.

    The chain of hashes reveals a missing line before another one; the plan reveals a missing last line or journal.
    """
    path = folder / JOURNAL
    lines = read_text(path).splitlines() if path.exists() else []
    return _hash(lines[-1]) if lines else ""


def _head_of_plan(folder: Path) -> str:
    try:
        plan = read_json(folder / "plan.json")
    except FileFault:
        return ""
    return str(plan.get("journal") or "") if isinstance(plan, dict) else ""


def _lacks_a_look(path: Path) -> RecordError:
    return RecordError(
        f"{path} lacks the look that plan.json names: it was deleted, cut, changed or replaced; how often these runs "
        "were looked at is not known, so restore the file or choose another --output-dir"
    )


def append_look(folder: Path, look: Look) -> None:
    """Append a look to the journal, and sync it to disk.

    Raises:
        EnvironmentUnfit: the file cannot be written.
    """
    path = folder / JOURNAL
    lines = read_text(path).splitlines() if path.exists() else []
    append_line(path, dump_json({"before": _hash(lines[-1] if lines else ""), "look": look.model_dump()}, indent=None))


def _hash(line: str) -> str:
    return hashlib.sha256(line.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Journal:
    """The looks at a run directory so far, and the basis of the next one: the plan and the terms.

    Attributes:
        cells: the name of each cell's folder, under LABEL@SEED.
        pilot: seeds whose spread determined the number of seeds.
    """

    folder: Path
    looks: tuple[Look, ...]
    arms: tuple[str, ...]
    reference: str
    cells: Mapping[str, str]
    terms: Criteria
    pilot: frozenset[int] = frozenset()

    def untested(self, why: str = NOT_COMPLETE) -> Design:
        """Return how runs are shown without a test, such as those that are not complete."""
        return Design(0.0, 0.0, self.pilot, looks=self.looks, notes=(why,))

    def reread(self, records: Sequence[RunRecord], *, has_journal: bool = True) -> Design | None:
        """Return the design for a command that only reads: as the runs were tested, or else without a test.

        Args:
            has_journal: whether the version that wrote the plan kept one; None is returned for others, if all runs of
                the plan are there.
        """
        design = self.design(records)
        if self.looks and design.looks == self.looks:
            return design
        ended = {f"{record.arm}@{record.config.recipe.seed}" for record in records if record.status != "interrupted"}
        if not self.cells.keys() <= ended:
            return self.untested()
        return self.untested(NOT_COUNTED) if self.looks or has_journal else None

    def design(self, records: Sequence[RunRecord]) -> Design:
        """Return how these runs are tested.

        The look is the last of the design's, or an earlier one where the journal has one at the same runs under the
        same terms: reading a result again spends nothing.

        Args:
            records: of the plan, under the labels of their rows.
        """
        look = self._look(records)
        known = next((other for other in self.looks if _same(other, look)), None)
        others = [other for other in self.looks if other is not known]
        changes = changed_terms(look, others, self._seeds_left_out(records))
        if known is not None:
            look = known
        elif max(look.pairs.values(), default=0) >= MIN_PAIRS:
            number = 1 + sum(bool(other.number) for other in self.looks)
            rate = error_rate_of_next(self.looks, self.terms.looks)
            look = look.model_copy(update={"number": number, "error_rate": rate, "changes": changes})
        looks = self.looks if known is not None else (*self.looks, look)
        later = error_rate_of_next(looks, self.terms.looks)
        notes = [SPENT] if look.number and not look.error_rate else look_sentences(look, looks, later)
        return Design(
            look.error_rate, later, self.pilot, look.number, looks, tuple(changes_sentence(changes)), tuple(notes)
        )

    def record(self, comparison: Comparison) -> Comparison:
        """Append the last look of a comparison to the journal, with its verdicts, if the journal does not have it.

        Returns:
            The comparison with the look as it was written.

        Raises:
            EnvironmentUnfit: the file cannot be written.
        """
        if comparison.looks == list(self.looks):
            return comparison
        look = comparison.looks[-1].model_copy(
            update={
                "written": datetime.now().astimezone().isoformat(timespec="seconds"),
                "accuracy": {row.arm: row.accuracy_verdict for row in comparison.arms if row.accuracy_verdict},
                "time": {row.arm: row.time_verdict for row in comparison.arms if row.time_verdict},
                "loss": {row.arm: row.loss_verdict for row in comparison.arms if row.loss_verdict},
            }
        )
        append_look(self.folder, look)
        return comparison.model_copy(update={"looks": [*self.looks, look]})

    def _look(self, records: Sequence[RunRecord]) -> Look:
        ended = finished(records)
        labels = {f"{record.arm}@{record.config.recipe.seed}" for record in ended}
        base = [record for record in ended if record.arm == self.reference]
        others = [arm for arm in self.arms if arm != self.reference]
        return Look(
            number=0,
            error_rate=0.0,
            reference=self.reference,
            arms=list(self.arms),
            seeds=sorted({record.config.recipe.seed for record in ended}),
            pairs={arm: len(pairs_by_seed([run for run in ended if run.arm == arm], base)) for arm in others},
            cells={label: self._hash_of(cell) for label, cell in self.cells.items() if label in labels},
            lost=sorted(f"{run.arm}@{run.config.recipe.seed}" for run in records if run.status == "failed"),
            margin=self.terms.margin,
            margin_unit=metric_of(records).difference_unit,
            time_margin=self.terms.time_margin,
            loss_margin=self.terms.loss_margin,
            planned=self.terms.looks,
            pilot=sorted(self.pilot),
        )

    def _hash_of(self, cell: str) -> str:
        return hashlib.sha256((self.folder / "cells" / cell / "record.json").read_bytes()).hexdigest()[:16]

    def _seeds_left_out(self, records: Sequence[RunRecord]) -> list[int]:
        """Return the seeds of completed runs in the folder that are not of the plan, but have the settings of one."""
        rows = {record.arm: record.config for record in records}.values()
        seeds = set()
        for path in self.folder.glob("cells/*/record.json"):
            if path.parent.name in self.cells.values():
                continue
            with contextlib.suppress(RecordError):
                other = read_record(path)
                if other.status == "completed" and any(not changed_settings(other.config, row) for row in rows):
                    seeds.add(other.config.recipe.seed)
        return sorted(seeds)


def _same(one: Look, other: Look) -> bool:
    """Return whether two looks are at the same runs under the same terms."""
    keys = ("cells", "lost", "arms", "reference", "margin", "time_margin", "loss_margin", "pilot")
    return all(getattr(one, key) == getattr(other, key) for key in keys)
