"""Train arms and compare them: the commands `run` and `compare`; what they wrote: `report`, `export`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from ampcompare.api.arguments import takes_parameters_of
from ampcompare.backends.arm import Arm
from ampcompare.base.errors import RecordError
from ampcompare.experiment.compare import run_comparison
from ampcompare.experiment.notebook_progress import observer_or_notebook_progress
from ampcompare.experiment.reload_report import reload_comparison
from ampcompare.experiment.run_options import CompareOptions, RunOptions, settings_request
from ampcompare.experiment.single_run import run_single
from ampcompare.experiment.sources import collect_settings
from ampcompare.results.records.comparison import Comparison
from ampcompare.results.records.run import RunRecord
from ampcompare.results.report.export import make_exporter
from ampcompare.settings.config import RunConfig
from ampcompare.settings.reads import TRAIN
from ampcompare.settings.recipe import Recipe


@takes_parameters_of(RunOptions)
def run(options: RunOptions) -> RunRecord:
    """Train one arm in a separate process and return its record.

    Returns:
        The record, even if the run failed or diverged: see its `status` and `error`.

    Raises:
        ConfigError: settings that cannot be used, or another command uses the folder.
        EnvironmentUnfit: this machine lacks something that was requested.
        LaunchError: no process could be started.
    """
    return run_single(options, observer=observer_or_notebook_progress(options.observer)).record


@takes_parameters_of(CompareOptions)
def compare(options: CompareOptions) -> Comparison:
    """Train every arm with every seed on the same weights and batches, compare them, and write the reports.

    Returns:
        The comparison that the reports show; failed cells are among its records.

    Raises:
        ConfigError: an arm or option that cannot be used, or another command uses the folder.
        EnvironmentUnfit: this machine lacks something that was requested.
        RecordError: the baseline cannot be read.
        LaunchError: no process could be started.
        GateFailed: an arm exceeds a limit of `fail_on`; its `comparison` has the results.
    """
    outcome = run_comparison(options, observer=observer_or_notebook_progress(options.observer))
    outcome.write_junit()
    outcome.raise_if_gate_failed()
    return outcome.comparison


def load_comparison(path: str | Path, *, reference: str | None = None) -> Comparison:
    """Load a run directory again, of `compare` or of `run`, or a single `report.json` or `record.json`.

    A run directory is summed up again from its records. Nothing is trained.

    Args:
        path: such as "runs/first".
        reference: another arm to compare with; in a run directory that is one more look at its runs, and is counted.

    Returns:
        The comparison. Records with a fault are left out, and named in `excluded`.

    Raises:
        RecordError: there is no such file or folder, or it holds no results.
        ConfigError: no row is named like the reference, or another command uses the folder.
    """
    return reload_comparison(Path(path), reference=reference)


def export(
    path: str | Path,
    to: Literal["tensorboard", "wandb", "mlflow"],
    *,
    output_dir: str | Path | None = None,
    project: str = "ampcompare",
    note: Callable[[str], None] = lambda text: None,
) -> str:
    """Hand the finished runs of a run directory to a tracker of experiments; runs that exist there stay as they are.

    Args:
        path: run directory of `run` or `compare`.
        to: the tracker.
        output_dir: folder for its files, by default one named like the tracker in the run directory.
        project: W&B project or MLflow experiment.
        note: receives a line about each record that is not written.

    Returns:
        Where the runs went: a folder or an address.

    Raises:
        RecordError: there is no such folder, or it holds no results.
        ConfigError: there is no such tracker, or the folder cannot be written.
        EnvironmentUnfit: the tracker is not installed, or refuses the runs.
    """
    comparison, destination = export_run_directory(Path(path), to, output_dir, project, note)
    for excluded in comparison.excluded:
        note(f"not used: {excluded}")
    return destination


def export_run_directory(
    folder: Path, to: str, output_dir: str | Path | None, project: str, note: Callable[[str], None]
) -> tuple[Comparison, str]:
    """Export a run directory to a tracker.

    Args:
        folder: that run or compare wrote.
        to: the name of the tracker.
        output_dir: for its files; None for a folder of its name in the run directory.
        project: what the tracker calls all runs together; "" for its default.
        note: receives a line about each record that is not written.

    Returns:
        What was exported, and where it went.

    Raises:
        RecordError: the folder is none, or holds no usable record.
        EnvironmentUnfit: the package of the tracker is not installed.
        ConfigError: there is no such tracker, or its folder cannot be written.
    """
    if not folder.is_dir():
        raise RecordError(f"{folder} is not a run directory; name a folder that run or compare wrote")
    comparison = reload_comparison(folder)
    target = folder / to if output_dir is None else Path(output_dir)
    exporter = make_exporter(to, target, note, project)
    exporter.export_records(comparison, folder)
    return comparison, exporter.destination or str(target)


def resolve_config(
    *,
    arm: Arm | str = "fp32",
    recipe: Recipe | str | None = None,
    size: str | None = None,
    config_file: str | Path | None = None,
    **settings: Any,
) -> tuple[RunConfig, dict[str, str]]:
    """Return the settings that `run` would use with these arguments, and where each came from.

    Args:
        arm: such as "apex:O2", or an `Arm`.
        recipe, size, config_file, settings: as for `run`.

    Returns:
        The configuration, and the origin of each setting that is not a default, by its path such as
        "recipe.optimizer.lr".

    Raises:
        ConfigError: settings that cannot be used.
    """
    request = settings_request(recipe, size, config_file, {**settings, "arm": str(arm)})
    sources = collect_settings(request, TRAIN, one_run=True)
    return sources.config, dict(sources.resolved.origins)
