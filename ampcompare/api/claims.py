"""Run small versions of published claims: the command `reproduce`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from ampcompare.api.arguments import optional_path, wait_seconds
from ampcompare.experiment.claims.reproduce import Reproduction
from ampcompare.experiment.claims.study import StudyOptions, run_study
from ampcompare.experiment.notebook_progress import default_observer
from ampcompare.experiment.observer import Observer
from ampcompare.experiment.options import to_seconds

__all__ = ["reproduce_claims"]


def reproduce_claims(
    claims: Sequence[str] = (),
    *,
    study: str = "articles",
    output_dir: str | Path | None = None,
    budget: float | str = "15m",
    jobs: int | Literal["auto"] | None = None,
    gpus: str | None = None,
    wait: float | str = 0,
    observer: Observer | None = None,
) -> Reproduction:
    """Run small versions of published claims, judge them, and write the report.

    Args:
        claims: names; all of the study by default.
        study: which claims.
        output_dir: folder of records and reports, by default `runs/reproduce-<study>`.
        budget: wall time, as seconds or a text such as "15m"; no seed begins after it.
        jobs: cells that run in parallel; "auto": as many as there are GPUs, or cores for the threads of a cell;
            by default "auto" where several GPUs are visible, else one. Step times of cells that run in parallel are
            compared on equal GPUs only.
        gpus: numbers of the GPUs to use, such as "0,2-3"; all that nobody uses by default.
        wait: seconds, or a text such as "10m", to wait for another command that uses the folder.
        observer: receives progress and notes; in a notebook a display of the progress by default.

    Returns:
        A result for each claim, in `findings`.

    Raises:
        ConfigError: there is no such study or claim, or the folder cannot be used.
        LaunchError: no process could be started, or a program of the study failed.
    """
    options = StudyOptions(
        study=study,
        claims=tuple(claims),
        output_dir=optional_path(output_dir),
        budget_seconds=to_seconds("budget", budget),
        jobs=jobs,
        gpus=gpus,
        wait_seconds=wait_seconds(wait),
    )
    return run_study(options, observer=default_observer(observer))
