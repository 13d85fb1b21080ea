"""Run the small experiments of a study, judge its claims and report them; resume where an earlier call stopped."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ampcompare.base.environment.fingerprint import fingerprint
from ampcompare.base.environment.gpus import why_no_cuda
from ampcompare.base.errors import ConfigError, LaunchError, did_you_mean
from ampcompare.base.files.write import write_atomically
from ampcompare.base.formatting import printable
from ampcompare.base.processes.call import call_in_child
from ampcompare.base.processes.start import isolated_environment, start_command
from ampcompare.experiment.claims.definition import Claim, ExperimentSpec, Study, load_study
from ampcompare.experiment.claims.evaluate import ClaimResult, judge_claim
from ampcompare.experiment.launch.base import Launcher
from ampcompare.experiment.launch.dispatch import launcher_at
from ampcompare.experiment.launch.places import find_places
from ampcompare.experiment.observer import Observer
from ampcompare.experiment.options import StudyOptions
from ampcompare.experiment.plan import make_plan, parse_seeds
from ampcompare.experiment.run import run_plan
from ampcompare.experiment.run_directory import RunDirectory
from ampcompare.experiment.single_run import WhileRunning
from ampcompare.runs.records.comparison import Comparison
from ampcompare.runs.records.run import RunRecord, dump_json
from ampcompare.runs.report.base import write_formats, write_reports
from ampcompare.runs.report.document import Cell, Code, Column, Document, Items, Section, Table
from ampcompare.runs.report.tables import grid
from ampcompare.runs.settings.config import RunConfig
from ampcompare.runs.settings.layers import Layer, resolve_settings

__all__ = ["Reproduction", "claim_table", "claims_document", "reproduce", "run_study", "sees_gpu", "select_claims"]

NEEDS_GPU = "needs a GPU"
PROGRAM_SECONDS = 600
PROGRAMS = Path(__file__).resolve().parent / "programs"
LISTED = ("claim", "says", "needs a GPU")
COLUMNS = {"claim": 34, "published": 26, "measured": 40, "verdict here": 26}


@dataclass(frozen=True)
class Reproduction:
    """The findings of a study, with what they were made on.

    Attributes:
        environment: of the runs.
        seconds: duration of this call.
    """

    study: Study
    findings: tuple[ClaimResult, ...]
    environment: dict[str, object]
    seconds: float
    command: str = ""


def select_claims(study: Study, names: Sequence[str]) -> list[Claim]:
    """Return the claims of some names, all of them if none is given.

    Raises:
        ConfigError: a name is not a claim of the study.
    """
    known = {claim.name: claim for claim in study.claims}
    for name in names:
        if name not in known:
            raise ConfigError(f"there is no claim {name!r}; {did_you_mean(name, known)}")
    return [known[name] for name in dict.fromkeys(names)] if names else list(study.claims)


def sees_gpu() -> bool:
    """Return whether torch can use a GPU; where files leave that open, a child process asks torch."""
    return not why_no_cuda() and bool(call_in_child(PROGRAMS / "sees_gpu.py").value.get("available"))


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


def reproduce(
    study: Study,
    claims: Sequence[Claim],
    folder: Path,
    launcher: Launcher,
    *,
    gpu: bool,
    budget_seconds: float,
    observer: Observer | None = None,
    jobs: int = 1,
    command: str = "",
    save: Callable[[Comparison, Path], None] | None = None,
) -> Reproduction:
    """Run what claims need and judge them.

    Args:
        folder: each shape is a run directory below it.
        gpu: whether there is one; claims that need it are not run otherwise.
        budget_seconds: wall time; no seed is started after it, and findings with missing seeds say so.
        save: called with each shape's comparison, as for `run_plan`.

    Raises:
        ConfigError: the folder cannot be written.
        LaunchError: the program of a shape failed.
    """
    RunDirectory(folder).make()
    observer = observer or Observer()
    began = time.monotonic()
    found: dict[str, tuple[list[RunRecord], str]] = {}
    for claim in claims:
        if claim.shape in found or (claim.needs_gpu and not gpu):
            continue
        shape, where = study.shapes[claim.shape], folder / claim.shape
        left = began + budget_seconds - time.monotonic()
        if shape.program is not None:
            found[claim.shape] = _of_program(shape, where, left, observer)
        else:
            found[claim.shape] = _of_plan(shape, where, launcher, left, jobs=jobs, observer=observer, save=save)
    findings = [
        judge_claim(claim, [], not_run=NEEDS_GPU)
        if claim.shape not in found
        else judge_claim(claim, found[claim.shape][0], ended=found[claim.shape][1])
        for claim in claims
    ]
    records = [record for runs, _ in found.values() for record in runs]
    environment = next((record.environment for record in records if record.environment), dict(fingerprint()))
    return Reproduction(study, tuple(findings), environment, time.monotonic() - began, command)


def _of_plan(
    shape: ExperimentSpec,
    folder: Path,
    launcher: Launcher,
    seconds: float,
    *,
    jobs: int,
    observer: Observer,
    save: Callable[[Comparison, Path], None] | None,
) -> tuple[list[RunRecord], str]:
    """Return the records of a shape, and why some are missing, or ""."""
    base: RunConfig = resolve_settings([Layer("shape", shape.settings)]).config
    plan = make_plan(base, shape.arms, parse_seeds(shape.seeds))
    end = time.monotonic() + seconds
    ended = ""

    def may_start(records: Sequence[RunRecord]) -> bool:
        nonlocal ended
        if time.monotonic() < end:
            return True
        seeds = len({record.config.recipe.seed for record in records})
        ended = f"the budget ended it after {seeds} of {len(plan.seeds)} seeds"
        return False

    comparison = run_plan(plan, folder, launcher, observer=observer, jobs=jobs, save=save, may_start=may_start)
    return comparison.records, ended


def _of_program(shape: ExperimentSpec, folder: Path, seconds: float, observer: Observer) -> tuple[list[RunRecord], str]:
    """Return the records that a program of this package prints, or those that it printed before in this environment."""
    path = folder / "records.json"
    now = {**fingerprint(), "seeds": shape.seeds}
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["environment"] == now:
            return [RunRecord.model_validate(record) for record in kept["records"]], ""
    except (OSError, ValueError, KeyError, TypeError):
        pass
    if seconds <= 0:
        return [], "the budget ended before it began"
    observer.note(f"{shape.program} runs with seeds {shape.seeds}")
    seeds = [str(seed) for seed in parse_seeds(shape.seeds)]
    environment = {**isolated_environment(), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    try:
        done = subprocess.run(
            start_command(str(shape.program), *seeds),
            capture_output=True, text=True, check=False, timeout=PROGRAM_SECONDS, env=environment,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"{shape.program} did not end within {PROGRAM_SECONDS} s; run the same command again"
        ) from None
    if done.returncode != 0:
        last = next(iter(done.stderr.strip().splitlines()[-1:]), "without a message")
        raise LaunchError(f"{shape.program} ended with {done.returncode}: {last}")
    records = [RunRecord.model_validate(json.loads(line)) for line in done.stdout.splitlines()]
    write_atomically(
        path, dump_json({"environment": now, "records": [record.model_dump(by_alias=True) for record in records]})
    )
    return records, ""


def claim_table(claims: Sequence[Claim]) -> str:
    """Return the names of claims with what they say."""
    return grid([[one.name, one.says, "yes" if one.needs_gpu else "no"] for one in claims], LISTED) + "\n"


def claims_document(done: Reproduction) -> Document:
    """Return the report, before it has a format: the claims, what limits each small version, how it was made."""
    rows = [[Cell(text) for text in _cells(finding)] for finding in done.findings]
    limits = [f"{one.claim.name}: {one.claim.limits}." for one in done.findings if one.claim.limits]
    table = Table([Column(head, wrap=width) for head, width in COLUMNS.items()], rows, legend=[_summary(done)])
    sections = [
        Section("claims", [table]),
        Section("limits", [Items(limits)] if limits else [], "Limits of the small versions"),
        Section("made", [Items([_source(done), *_where(done)])], "How it was made"),
        Section("command", [Code(printable(done.command, 2000))] if done.command else []),
    ]
    return Document("claims", sections, _data(done), "Claims, published and measured")


def _data(done: Reproduction) -> dict[str, Any]:
    """Return everything as plain data."""
    return {
        "source": done.study.source,
        "claims": [
            {
                "name": finding.claim.name,
                "claim": finding.claim.says,
                "published": finding.claim.published,
                "measured": finding.measured,
                "verdict": finding.word,
                "reason": finding.reason,
                "limits": finding.claim.limits,
            }
            for finding in done.findings
        ],
        "environment": done.environment,
        "seconds": round(done.seconds, 1),
        "command": done.command,
    }


def _cells(finding: ClaimResult) -> list[str]:
    return [finding.claim.says, finding.claim.published, finding.measured, finding.verdict]


def _summary(done: Reproduction) -> str:
    words = [finding.word for finding in done.findings]
    counts = ", ".join(f"{word} {words.count(word)}" for word in dict.fromkeys(words))
    about = "The verdicts are about these small versions."
    return f"{len(words)} claims: {counts}. {about} This call took {done.seconds:.0f} s."


def _source(done: Reproduction) -> str:
    return f"Published: {done.study.source}; one run per figure."


def _where(done: Reproduction) -> list[str]:
    named = {"torch": "torch", "device": "on", "processor": "processor", "device_name": "GPU"}
    facts = [
        f"{word} {printable(str(done.environment[name]), 80)}"
        for name, word in named.items()
        if done.environment.get(name)
    ]
    return [f"Made with {', '.join(facts)}."] if facts else []
