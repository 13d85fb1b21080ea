"""The journal of a run directory: one line of strict JSON for each look at its runs, only ever appended to.

The process that writes holds the lock of the folder.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from ampcompare.base.errors import RecordError
from ampcompare.base.files.run_files import CellFile
from ampcompare.experiment.run_directory import RunDirectory, StoredPlan
from ampcompare.runs.analysis.inference.effect import MIN_PAIRS
from ampcompare.runs.analysis.inference.looks import (
    Design,
    changed_terms,
    changes_sentence,
    error_rate_of_next,
    look_sentences,
)
from ampcompare.runs.analysis.runs.comparability import changed_settings
from ampcompare.runs.analysis.runs.pairs import finished, pairs_by_seed
from ampcompare.runs.analysis.runs.scores import metric_of
from ampcompare.runs.records.comparison import Comparison, Look
from ampcompare.runs.records.run import RunRecord, read_record

__all__ = ["NO_PLAN", "Journal"]

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


@dataclass(frozen=True)
class Journal:
    """The looks at a run directory so far, and the basis of the next one.

    Attributes:
        plan: whose reference may be another one than the plan on disk has.
    """

    run: RunDirectory
    plan: StoredPlan
    looks: tuple[Look, ...]

    @classmethod
    def read(cls, run: RunDirectory, plan: StoredPlan) -> Journal:
        """Return the journal of a run directory.

        Raises:
            RecordError: it is damaged.
        """
        return cls(run, plan, tuple(run.looks()))

    @property
    def pilot(self) -> frozenset[int]:
        """The seeds whose spread determined the number of seeds."""
        return frozenset(self.plan.pilot)

    def is_complete(self, records: Sequence[RunRecord]) -> bool:
        """Return whether every cell of the plan has ended."""
        ended = {f"{record.arm}@{record.config.recipe.seed}" for record in records if record.status != "interrupted"}
        return self.plan.cells.keys() <= ended

    def untested(self, why: str = NOT_COMPLETE) -> Design:
        """Return how runs are shown without a test, such as those that are not complete."""
        return Design(0.0, 0.0, self.pilot, looks=self.looks, notes=(why,))

    def reread(self, records: Sequence[RunRecord]) -> Design | None:
        """Return the design for a command that only reads: as the runs were tested, or else without a test.

        None is returned if all runs of the plan are there, and the version that wrote it kept no journal.
        """
        design = self.design(records)
        if self.looks and design.looks == self.looks:
            return design
        if not self.is_complete(records):
            return self.untested()
        return self.untested(NOT_COUNTED) if self.looks or self.plan.journal is not None else None

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
            rate = error_rate_of_next(self.looks, self.plan.terms.looks)
            look = look.model_copy(update={"number": number, "error_rate": rate, "changes": changes})
        looks = self.looks if known is not None else (*self.looks, look)
        later = error_rate_of_next(looks, self.plan.terms.looks)
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
                "accuracy": {row.arm: str(row.quality) for row in comparison.arms if row.quality},
                "time": {row.arm: str(row.time) for row in comparison.arms if row.time},
                "loss": {row.arm: str(row.loss) for row in comparison.arms if row.loss},
            }
        )
        self.run.append_look(look)
        return comparison.model_copy(update={"looks": [*self.looks, look]})

    def _look(self, records: Sequence[RunRecord]) -> Look:
        ended = finished(records)
        labels = {f"{record.arm}@{record.config.recipe.seed}" for record in ended}
        base = [record for record in ended if record.arm == self.plan.reference]
        others = [arm for arm in self.plan.arms if arm != self.plan.reference]
        return Look(
            number=0,
            error_rate=0.0,
            reference=self.plan.reference,
            arms=self.plan.arms,
            seeds=sorted({record.config.recipe.seed for record in ended}),
            pairs={arm: len(pairs_by_seed([run for run in ended if run.arm == arm], base)) for arm in others},
            cells={label: self._hash_of(cell) for label, cell in self.plan.cells.items() if label in labels},
            lost=sorted(f"{run.arm}@{run.config.recipe.seed}" for run in records if run.status == "failed"),
            margin=self.plan.terms.margin,
            margin_unit=metric_of(records).difference_unit,
            time_margin=self.plan.terms.time_margin,
            loss_margin=self.plan.terms.loss_margin,
            planned=self.plan.terms.looks,
            pilot=sorted(self.plan.pilot),
        )

    def _hash_of(self, cell: str) -> str:
        return hashlib.sha256((self.run.cell_named(cell) / CellFile.RECORD).read_bytes()).hexdigest()[:16]

    def _seeds_left_out(self, records: Sequence[RunRecord]) -> list[int]:
        """Return the seeds of completed runs in the folder that are not of the plan, but have the settings of one."""
        rows = {record.arm: record.config for record in records}.values()
        seeds = set()
        for path in self.run.record_files():
            if path.parent.name in self.plan.cells.values():
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
