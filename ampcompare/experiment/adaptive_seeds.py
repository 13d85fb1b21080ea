"""Seeds "auto": a pilot estimates how many seeds the margin needs, and a budget limits them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ampcompare.analysis.accuracy import accuracy_effects
from ampcompare.analysis.criteria import Criteria
from ampcompare.analysis.statistics import ERROR_RATE, MIN_PAIRS, pairs_needed
from ampcompare.experiment.plan import Plan
from ampcompare.experiment.run import Observer, run_plan
from ampcompare.launch.base import Launcher
from ampcompare.records.comparison import Comparison
from ampcompare.records.run import RunRecord

__all__ = ["run_auto", "seeds_needed"]


def seeds_needed(comparison: Comparison) -> tuple[int, str]:
    """Return how many pairs a comparison needs in all, and the arm that needs most; 0 and "" where none can tell.

    An arm needs what a one-sided test of non-inferiority at the margin needs for a power of 80 %, if in truth it does
    not differ, with the pilot's spread, at a level that is shared by all arms.
    """
    arms = [row.arm for row in comparison.arms]
    effects = accuracy_effects(comparison.records, arms, comparison.reference)
    alpha = ERROR_RATE / max(1, len(effects))
    needs = {arm: pairs_needed(effect.spread, comparison.margin / 100, alpha) for arm, effect in effects.items()}
    arm = max(needs, key=lambda name: needs[name], default="")
    return needs.get(arm, 0), arm


def run_auto(
    make: Callable[[Sequence[int]], Plan],
    folder: Path,
    launcher: Launcher,
    *,
    terms: Criteria,
    budget_seconds: float,
    command: str = "",
    force: bool = False,
    jobs: int = 1,
    observer: Observer | None = None,
    save: Callable[[Comparison, Path], None] | None = None,
) -> Comparison:
    """Run a pilot of three seeds, estimate how many the margin needs, and run that many within a budget.

    Args:
        make: the plan for some seeds.
        budget_seconds: wall time; a seed whose cells would not end in time is not begun. The pilot always runs.
        others: as for `run_plan`.
    """
    observer = observer or Observer()
    begin = time.monotonic()
    pilot = run_plan(
        make(range(MIN_PAIRS)), folder, launcher, command=command, terms=terms, force=force, jobs=jobs,
        observer=observer, save=save,
    )  # fmt: skip
    needed, arm = seeds_needed(pilot)
    if not needed:
        observer.note(f"no arm has a completed pair with {pilot.reference}, so how many seeds are needed is not known")
        return pilot
    if needed <= MIN_PAIRS:
        observer.note(f"the pilot of {MIN_PAIRS} seeds is enough for a margin of {pilot.margin:g} points")
        return pilot
    observer.note(
        f"a margin of {pilot.margin:g} points needs {needed} seeds, by the spread of {arm} over the pilot's {MIN_PAIRS}"
    )
    ended = ""

    def may_start(records: Sequence[RunRecord]) -> bool:
        nonlocal ended
        left = begin + budget_seconds - time.monotonic()
        seeds = len({record.config.recipe.seed for record in records})
        if left >= sum(record.summary.wall_seconds or 0.0 for record in records) / (seeds * jobs):
            return True
        ended = f"The budget of {budget_seconds:g} s ended it after {seeds} of the {needed} seeds that are needed."
        return False

    comparison = run_plan(
        make(range(needed)), folder, launcher, command=command, terms=terms, jobs=jobs, observer=observer, save=save,
        may_start=may_start,
    )  # fmt: skip
    if not ended:
        return comparison
    comparison = comparison.model_copy(update={"reading": [*comparison.reading, ended]})
    if save is not None:
        save(comparison, folder)
    return comparison
