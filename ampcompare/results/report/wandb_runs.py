"""Runs for Weights & Biases: offline, unless its variable WANDB_MODE says otherwise."""

import hashlib
import os
from pathlib import Path

from ampcompare.base.errors import EnvironmentUnfit, RecordError
from ampcompare.results.records.comparison import Comparison
from ampcompare.results.records.run import RunRecord
from ampcompare.results.report.export import Exporter, points_of_record


class WandbExporter(Exporter):
    """Writes a run per record, in a project; `wandb sync` uploads what was written offline.

    The id of a run is that of the cell and its start, so that a run that is uploaded twice is one run.
    """

    def export_records(self, comparison: Comparison, folder: Path) -> None:
        for record in comparison.records:
            try:
                self._write_run(record, folder)
            except RecordError as error:
                self._note(f"no run of {record.arm}, seed {record.config.recipe.seed}: {error}")

    def _write_run(self, record: RunRecord, folder: Path) -> None:
        import wandb

        name = f"{record.arm}, seed {record.config.recipe.seed}"
        run_id = hashlib.sha256(f"{record.cell} {record.started}".encode()).hexdigest()[:16]
        if any(self._folder.glob(f"wandb/*run-*-{run_id}")):
            self._note(f"{name} is there already")
            return
        points = list(points_of_record(record, folder))
        # The machine that exports is not the one that trained: W&B would note down the wrong one.
        of_this_machine = {
            "disable_git": True,
            "disable_code": True,
            "x_disable_stats": True,
            "x_disable_meta": True,
        }
        quiet = wandb.Settings(silent=True, console="off", x_save_requirements=False, **of_this_machine)
        try:
            run = wandb.init(
                project=self._project,
                group=folder.resolve().name,
                name=name,
                id=run_id,
                dir=str(self._folder),
                mode=os.environ.get("WANDB_MODE", "offline"),
                config=record.config.model_dump(mode="json"),
                notes=record.error,
                tags=[record.status],
                reinit="create_new",
                settings=quiet,
            )
            for _, step, values in points:
                run.log(values, step=step)
            numbers = record.summary.model_dump(
                mode="json", exclude={"epochs", "rollbacks"}, exclude_none=True
            )
            run.summary.update({**numbers, "status": record.status, "half": record.half, "host": record.host})
            run.finish(exit_code=int(record.status == "failed"))
        except wandb.errors.Error as error:
            raise EnvironmentUnfit(f"W&B refuses {name}: {error}") from error
