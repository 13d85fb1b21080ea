"""Train arms and compare them: the commands `run`, `compare` and `reproduce`, and `report` for what they wrote."""

from __future__ import annotations

from pathlib import Path

from ampcompare.api.arguments import takes
from ampcompare.base.errors import GateFailed
from ampcompare.experiment.claims.reproduce import Reproduction, run_study
from ampcompare.experiment.compare import run_comparison
from ampcompare.experiment.load import reload_comparison
from ampcompare.experiment.notebook_progress import default_observer
from ampcompare.experiment.options import CompareOptions, RunOptions, StudyOptions
from ampcompare.experiment.single_run import run_single
from ampcompare.runs.records.comparison import Comparison
from ampcompare.runs.records.run import RunRecord

__all__ = ["compare", "load_comparison", "reproduce_claims", "run"]


@takes(RunOptions)
def run(options: RunOptions) -> RunRecord:
    """Train one arm in a separate process and return its record.

    Returns:
        The record, even if the run failed or diverged: see its `status` and `error`.

    Raises:
        ConfigError: settings that cannot be used, or another command uses the folder.
        EnvironmentUnfit: this machine lacks something that was requested.
        LaunchError: no process could be started.
    """
    return run_single(options, observer=default_observer(options.observer)).record


@takes(CompareOptions)
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
    outcome = run_comparison(options, observer=default_observer(options.observer))
    outcome.write_junit()
    failures = [f"{check.arm}: {check.failure}" for check in outcome.checks if check.failure]
    if failures:
        raise GateFailed("; ".join(failures), outcome.comparison)
    return outcome.comparison


@takes(StudyOptions)
def reproduce_claims(options: StudyOptions) -> Reproduction:
    """Run small versions of published claims, judge them, and write the report.

    Returns:
        A result for each claim, in `findings`.

    Raises:
        ConfigError: there is no such study or claim, or the folder cannot be used.
        LaunchError: no process could be started, or a program of the study failed.
    """
    return run_study(options, observer=default_observer(options.observer))


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
