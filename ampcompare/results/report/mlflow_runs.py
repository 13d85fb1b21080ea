"""Runs for MLflow: into a local store, or to the server that MLFLOW_TRACKING_URI names."""

import os
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from ampcompare.base.errors import EnvironmentUnfit, RecordError
from ampcompare.results.records.comparison import Comparison
from ampcompare.results.records.run import RunRecord
from ampcompare.results.report.export import Exporter, Point, points_of_record

MAX_METRICS = 1000  # of one call, by MLflow's own limit
MAX_PARAMS = 100
MAX_TEXT = 500
RETRIES = 2


class MlflowExporter(Exporter):
    """Writes a run per record, at the times at which it trained, into the experiment that is named like the project.

    The folder is a store of files; a server is used instead where MLFLOW_TRACKING_URI is set.
    """

    def __init__(self, folder: Path, note: Callable[[str], None], project: str = "") -> None:
        from mlflow.tracking import MlflowClient

        super().__init__(folder, note, project)
        # MLflow itself goes on trying for minutes where nothing answers.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", str(RETRIES))
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:  # MLflow prefers databases, whose packages the small installation lacks
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = folder.resolve().as_uri()
        else:
            self.destination = uri
        self._client = MlflowClient(tracking_uri=uri)

    def export_records(self, comparison: Comparison, folder: Path) -> None:
        from mlflow.exceptions import MlflowException

        try:
            found = self._client.get_experiment_by_name(self._project)
            experiment = (
                self._client.create_experiment(self._project) if found is None else found.experiment_id
            )
            for record in comparison.records:
                self._write_run(record, folder, experiment)
        except MlflowException as error:
            raise EnvironmentUnfit(f"MLflow refuses the runs of {folder}: {error}") from error

    def _write_run(self, record: RunRecord, folder: Path, experiment: str) -> None:
        from mlflow.exceptions import MlflowException

        name = f"{record.arm}, seed {record.config.recipe.seed}"
        tags = {"ampcompare.cell": record.cell, "ampcompare.started": str(record.started)}
        same = " and ".join(f"tags.`{tag}` = '{value}'" for tag, value in tags.items())
        if self._client.search_runs([experiment], same):
            self._note(f"{name} is there already")
            return
        try:
            points = list(points_of_record(record, folder))
        except RecordError as error:
            self._note(f"no run of {name}: {error}")
            return
        began = record.started and round(1000 * datetime.fromisoformat(record.started).timestamp())
        begin = int(began or 0)  # milliseconds since the epoch
        tags |= {"ampcompare.status": record.status, "ampcompare.group": folder.resolve().name}
        run_id = self._client.create_run(experiment, start_time=begin, tags=tags, run_name=name).info.run_id
        try:
            self._log_points(run_id, record, points, begin)
        except BaseException:  # half a run would count as one that is there
            with suppress(MlflowException):
                self._client.delete_run(run_id)
            raise
        ended = begin + round(1000 * (record.summary.wall_seconds or (points[-1][0] if points else 0.0)))
        self._client.set_terminated(
            run_id, status="FINISHED" if record.has_result else "FAILED", end_time=ended
        )

    def _log_points(self, run_id: str, record: RunRecord, points: list[Point], begin: int) -> None:
        from mlflow.entities import Metric, Param

        metrics = [
            Metric(name, value, begin + round(1000 * elapsed), step)
            for elapsed, step, values in points
            for name, value in values.items()
        ]
        numbers = record.summary.model_dump(exclude={"epochs", "rollbacks"}, exclude_none=True)
        last = points[-1][1] if points else 0
        metrics += [
            Metric(f"summary/{name}", float(value), begin, last)
            for name, value in numbers.items()
            if isinstance(value, (int, float))
        ]
        settings = {"arm": record.config.arm, **record.config.values_by_path()}
        params = [Param(name, str(value)[:MAX_TEXT]) for name, value in settings.items()]
        for at in range(0, len(metrics), MAX_METRICS):
            self._client.log_batch(run_id, metrics=metrics[at : at + MAX_METRICS])
        for at in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(run_id, params=params[at : at + MAX_PARAMS])
