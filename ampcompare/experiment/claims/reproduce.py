"""Run the small experiments of a study and judge its claims; resume where an earlier call stopped."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ampcompare.base.environment.fingerprint import fingerprint
from ampcompare.base.environment.gpus import why_no_cuda
from ampcompare.base.errors import ConfigError, LaunchError, did_you_mean
from ampcompare.base.files.write import write_atomically
from ampcompare.base.isolate.call import call_in_child
from ampcompare.base.isolate.start import isolated_environment, start_command
from ampcompare.experiment.claims.definition import Claim, ExperimentSpec, Study
from ampcompare.experiment.claims.evaluate import ClaimResult, judge_claim
from ampcompare.experiment.launch.base import Launcher
from ampcompare.experiment.observer import Observer
from ampcompare.experiment.plan import make_plan, parse_seeds
from ampcompare.experiment.run import run_plan
from ampcompare.experiment.run_directory import RunDirectory
from ampcompare.runs.records.comparison import Comparison
from ampcompare.runs.records.run import RunRecord, dump_json
from ampcompare.runs.settings.config import RunConfig
from ampcompare.runs.settings.layers import Layer, resolve_settings

__all__ = ["Reproduction", "reproduce", "sees_gpu", "select_claims"]

NEEDS_GPU = "needs a GPU"
PROGRAM_SECONDS = 600
PROGRAMS = Path(__file__).resolve().parent / "programs"


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
