"""Reproduce a study from start to end: what both `ampcompare.reproduce_claims` and the command `reproduce` call."""

from __future__ import annotations

from contextlib import nullcontext

from ampcompare.experiment.claims.definition import load_study
from ampcompare.experiment.claims.report import claims_document
from ampcompare.experiment.claims.reproduce import Reproduction, reproduce, sees_gpu, select_claims
from ampcompare.experiment.launch.places import find_places
from ampcompare.experiment.launch.pool import launcher_at
from ampcompare.experiment.observer import Observer
from ampcompare.experiment.options import StudyOptions
from ampcompare.experiment.run_directory import RunDirectory
from ampcompare.experiment.single_run import WhileRunning
from ampcompare.runs.report.base import write_formats, write_reports
from ampcompare.runs.settings.config import RunConfig

__all__ = ["run_study"]


def run_study(
    options: StudyOptions, *, observer: Observer | None = None, while_running: WhileRunning = nullcontext
) -> Reproduction:
    """Run what claims need, judge them, and write `reproduce.md` and `reproduce.json`.

    Args:
        observer: receives progress and notes.
        while_running: a context around the runs, given the launcher; the command line handles signals in it.

    Raises:
        ConfigError: there is no such study or claim, or the folder cannot be used.
        LaunchError: no process could be started, or a program of the study failed.
    """
    observer = observer or Observer()
    study = load_study(options.study)
    claims = select_claims(study, options.claims)
    places = find_places([RunConfig()], options.jobs, options.gpus)
    launcher = launcher_at(places, RunConfig())
    for text in (*places.notes, *places.about_times):
        observer.note(text)
    gpu = any(claim.needs_gpu for claim in claims) and sees_gpu()
    folder, wait = options.folder, options.wait_seconds
    hold = RunDirectory(folder).owned(launcher, command=options.command, wait_seconds=wait, note=observer.note)
    with launcher, hold, while_running(launcher):
        reproduction = reproduce(
            study, claims, folder, launcher, gpu=gpu, budget_seconds=options.budget_seconds, observer=observer,
            jobs=len(places.all), command=options.command, save=write_reports,
        )  # fmt: skip
        write_formats(claims_document(reproduction), folder, "reproduce", ("md", "json"))
    return reproduction
