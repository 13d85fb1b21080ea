"""The looks at a run directory, a line of its journal each, and what the next one may spend."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from ampcompare.base.files.run_files import CellFile
from ampcompare.experiment.run_directory import RunDirectory, StoredPlan
from ampcompare.results.analysis.inference.alpha_spending import error_rate_of_next_look
from ampcompare.results.analysis.inference.effect import MIN_PAIRS
from ampcompare.results.analysis.inference.verdict import SequentialDesign
from ampcompare.results.analysis.pairing.pairs import completed_or_diverged_runs, pairs_by_seed
from ampcompare.results.analysis.pairing.scores import metric_of_runs
from ampcompare.results.records.comparison import Comparison, Look
from ampcompare.results.records.run import RunRecord

NOT_COMPLETE = (
    "Nothing was tested: some runs of this plan are missing, and a test before the end would be another look. Run the "
    "command that began it again: it finishes the other runs and tests."
)
# equal: the same look
TESTED = ("cells", "lost", "arms", "reference", "margin", "time_margin", "loss_margin", "pilot")


@dataclass(frozen=True)
class Journal:
    """The looks so far, and a plan, whose reference may be another one than that on disk."""

    run: RunDirectory
    plan: StoredPlan
    looks: tuple[Look, ...]

    def has_every_cell_ended(self, records: Sequence[RunRecord]) -> bool:
        """Return whether every cell of the plan has ended."""
        ended = {
            f"{record.arm}@{record.config.recipe.seed}"
            for record in records
            if record.status != "interrupted"
        }
        return self.plan.cells.keys() <= ended

    def sequential_design_without_test(self, why: str = NOT_COMPLETE) -> SequentialDesign:
        """Return how runs are shown without a test."""
        return SequentialDesign(0.0, 0.0, frozenset(self.plan.pilot), looks=self.looks, notes=(why,))

    def sequential_design(self, records: Sequence[RunRecord]) -> SequentialDesign:
        """Return how runs of the plan are tested: at an earlier look at them, which spends nothing, or the next."""
        planned = self.plan.terms.looks
        looks = self.looks
        look = self._make_look_at_records(records)
        known = [
            other for other in looks if all(getattr(other, name) == getattr(look, name) for name in TESTED)
        ]
        if known:
            look = known[0]
        elif max(look.pairs.values(), default=0) >= MIN_PAIRS:
            number = 1 + sum(bool(other.number) for other in looks)
            look = look.model_copy(
                update={"number": number, "error_rate": error_rate_of_next_look(looks, planned)}
            )
        looks = looks if known else (*looks, look)
        return SequentialDesign(
            look.error_rate,
            error_rate_of_next_look(looks, planned),
            frozenset(look.pilot),
            look.number,
            looks,
        )

    def append_last_look(self, comparison: Comparison) -> Comparison:
        """Append the last look of a comparison, if it is new, under the lock of the folder; return it with its date."""
        if comparison.looks == list(self.looks):
            return comparison
        written = datetime.now().astimezone().isoformat(timespec="seconds")
        look = comparison.looks[-1].model_copy(update={"written": written})
        self.run.append_look(look)
        return comparison.model_copy(update={"looks": [*self.looks, look]})

    def record_file_by_cell_name(self) -> dict[str, Path]:
        """Return the file of each cell's record, which need not exist, under LABEL@SEED."""
        return {
            label: self.run.cell_folder_of_digest(cell) / CellFile.RECORD
            for label, cell in self.plan.cells.items()
        }

    def _make_look_at_records(self, records: Sequence[RunRecord]) -> Look:
        plan, terms = self.plan, self.plan.terms
        ended = completed_or_diverged_runs(records)
        ran = {f"{run.arm}@{run.config.recipe.seed}" for run in ended}
        files = self.record_file_by_cell_name()
        rows = {arm: [run for run in ended if run.arm == arm] for arm in plan.arms}
        base = rows.pop(plan.reference)
        return Look(
            number=0,
            error_rate=0.0,
            reference=plan.reference,
            arms=plan.arms,
            planned=terms.looks,
            seeds=sorted({run.config.recipe.seed for run in ended}),
            pairs={arm: len(pairs_by_seed(runs, base)) for arm, runs in rows.items()},
            cells={
                name: hashlib.sha256(files[name].read_bytes()).hexdigest()[:16]
                for name in files
                if name in ran
            },
            lost=sorted(f"{run.arm}@{run.config.recipe.seed}" for run in records if run.status == "failed"),
            margin=terms.margin,
            time_margin=terms.time_margin,
            loss_margin=terms.loss_margin,
            margin_unit=metric_of_runs(records).difference_unit,
            pilot=sorted(plan.pilot),
        )
