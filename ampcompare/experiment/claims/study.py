"""Reproduce a study from start to end: what both `ampcompare.reproduce_claims` and the command `reproduce` call."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from ampcompare.base.files.write import write_atomically
from ampcompare.experiment.claims.definition import load_study, study_name
from ampcompare.experiment.claims.report import findings_data, render_markdown
from ampcompare.experiment.claims.reproduce import Reproduction, reproduce, sees_gpu, select_claims
from ampcompare.experiment.observer import Observer
from ampcompare.experiment.options import Jobs
from ampcompare.experiment.ownership import owned
from ampcompare.experiment.single_run import WhileRunning
from ampcompare.launch.places import find_places
from ampcompare.launch.pool import launcher_at
from ampcompare.records.run import dump_json
from ampcompare.report.base import write_reports
from ampcompare.settings.config import RunConfig

__all__ = ["StudyOptions", "run_study"]


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """All options of `reproduce`.

    Attributes:
        claims: names; all of the study if empty.
        output_dir: folder of records and reports, by default `runs/reproduce-<study>`.
        budget_seconds: wall time; no seed begins after it.
        jobs, gpus: as for `CompareOptions`.
        wait_seconds: how long to wait for another command that uses the folder.
        command: printed in the report.
    """

    study: str = "articles"
    claims: tuple[str, ...] = ()
    output_dir: Path | None = None
    budget_seconds: float = 900.0
    jobs: Jobs = None
    gpus: str | None = None
    wait_seconds: float = 0.0
    command: str = ""

    @property
    def folder(self) -> Path:
        """Where records and reports go."""
        return self.output_dir or Path("runs") / f"reproduce-{study_name(self.study)}"


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
    hold = owned(folder, launcher, command=options.command, wait_seconds=wait, note=observer.note)
    with launcher, hold, while_running(launcher):
        reproduction = reproduce(
            study, claims, folder, launcher, gpu=gpu, budget_seconds=options.budget_seconds, observer=observer,
            jobs=len(places.all), command=options.command, save=write_reports,
        )  # fmt: skip
        write_atomically(folder / "reproduce.md", render_markdown(reproduction))
        write_atomically(folder / "reproduce.json", dump_json(findings_data(reproduction)) + "\n")
    return reproduction
