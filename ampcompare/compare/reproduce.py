"""Runs the small shapes of a study and holds its claims against them; goes on where an earlier call stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ampcompare.compare.claims import Claim, Shape, Study
from ampcompare.compare.findings import Finding, judge_claim
from ampcompare.compare.plan import make_plan, parse_seeds
from ampcompare.compare.run import Observer, check_output_dir, run_plan
from ampcompare.comparison import Comparison
from ampcompare.config import RunConfig
from ampcompare.doctor.gpu import has_nvidia_gpu
from ampcompare.environment import fingerprint
from ampcompare.errors import ConfigError, LaunchError
from ampcompare.launch.base import Launcher
from ampcompare.recipes.layers import Layer, settle
from ampcompare.record import RunRecord, dump_json, write_atomically

__all__ = ["Reproduction", "chosen", "reproduce", "sees_gpu"]

NEEDS_GPU = "needs a GPU"
PROGRAM_SECONDS = 600


@dataclass(frozen=True)
class Reproduction:
    """The findings of a study, with what they were made on.

    Attributes:
        environment: of the runs.
        seconds: that this call took.
    """

    study: Study
    findings: tuple[Finding, ...]
    environment: dict[str, object]
    seconds: float
    command: str = ""


def chosen(study: Study, names: Sequence[str]) -> list[Claim]:
    """Return the claims of some names, all of them where none is given.

    Raises:
        ConfigError: there is no claim of a name; the nearest is named.
    """
    import difflib

    known = {claim.name: claim for claim in study.claims}
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
            raise ConfigError(f"there is no claim {name!r}; {hint}")
    return [known[name] for name in dict.fromkeys(names)] if names else list(study.claims)


def sees_gpu() -> bool:
    """Tell whether torch can use a GPU; another process asks, since one that forks cells must not touch CUDA."""
    if not has_nvidia_gpu():
        return False
    asked = [sys.executable, "-c", "import torch; raise SystemExit(not torch.cuda.is_available())"]
    return subprocess.run(asked, capture_output=True, check=False, timeout=120).returncode == 0


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
        budget_seconds: wall time; a seed is not begun after it, and what lacks seeds then says so.
        save: called with each shape's comparison, as for `run_plan`.

    Raises:
        ConfigError: the folder cannot be written.
        LaunchError: a program that a shape consists of has failed.
    """
    check_output_dir(folder)
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
    shape: Shape,
    folder: Path,
    launcher: Launcher,
    seconds: float,
    *,
    jobs: int,
    observer: Observer,
    save: Callable[[Comparison, Path], None] | None,
) -> tuple[list[RunRecord], str]:
    """Return the records of a shape, and why some are missing, or ""."""
    base: RunConfig = settle([Layer("shape", shape.settings)]).config
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


def _of_program(shape: Shape, folder: Path, seconds: float, observer: Observer) -> tuple[list[RunRecord], str]:
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
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    try:
        done = subprocess.run(
            [sys.executable, "-m", str(shape.program), *seeds],
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
