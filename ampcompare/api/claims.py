"""Run small versions of published claims: the command `reproduce`."""

from __future__ import annotations

from ampcompare.api.arguments import takes
from ampcompare.experiment.claims.reproduce import Reproduction
from ampcompare.experiment.claims.study import run_study
from ampcompare.experiment.notebook_progress import default_observer
from ampcompare.experiment.options import StudyOptions

__all__ = ["reproduce_claims"]


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
