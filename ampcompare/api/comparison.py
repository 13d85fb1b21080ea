"""Train arms on the same weights and batches, and compare them: the command `compare`."""

from __future__ import annotations

from ampcompare.api.arguments import takes
from ampcompare.base.errors import GateFailed
from ampcompare.experiment.compare import run_comparison
from ampcompare.experiment.notebook_progress import default_observer
from ampcompare.experiment.options import CompareOptions
from ampcompare.runs.records.comparison import Comparison

__all__ = ["compare"]


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
