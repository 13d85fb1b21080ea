"""Train one arm: the command `run`."""

from __future__ import annotations

from ampcompare.api.arguments import takes
from ampcompare.experiment.notebook_progress import default_observer
from ampcompare.experiment.options import RunOptions
from ampcompare.experiment.single_run import run_single
from ampcompare.runs.records.run import RunRecord

__all__ = ["run"]


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
