"""Seeds "auto": a pilot estimates how many seeds the margin needs, and a budget limits them.

The number is derived from the pilot's spread, so the test uses that spread too, with its few degrees of freedom
(Stein's two-stage test): the spread over all pairs would be too small whenever the pilot's was, and the error rate too
high.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ampcompare.analysis.inference.criteria import Criteria, criteria_of
from ampcompare.analysis.inference.effect import Effect
from ampcompare.analysis.inference.looks import error_rate_of_next
from ampcompare.analysis.inference.sample_size import stein_pairs
from ampcompare.analysis.verdicts.accuracy import accuracy_effects, accuracy_margin
from ampcompare.experiment.journal import read_looks
from ampcompare.experiment.observer import Observer
from ampcompare.experiment.plan import Plan
from ampcompare.experiment.run import run_plan
from ampcompare.launch.base import Launcher
from ampcompare.records.comparison import Comparison
from ampcompare.records.look import Look
from ampcompare.records.run import RunRecord

__all__ = ["pilot_seeds", "run_auto", "seeds_needed"]

PILOT_SIZES = {1: 5, 2: 8, 3: 8}  # by the number of arms besides the reference; MAX_PILOT for more arms
MAX_PILOT = 10


def pilot_seeds(others: int) -> range:
    """Return the seeds of a pilot.

    Each arm is tested at its share of the error rate, and at a small level few degrees of freedom cost many seeds: nine
    arms need 158 seeds with a pilot of five and 72 with one of ten, where a difference has an sd of 0.8 points and
    the margin is 0.5.

    Args:
        others: arms besides the reference.
    """
    return range(PILOT_SIZES.get(max(1, others), MAX_PILOT))


def seeds_needed(comparison: Comparison, error_rate: float) -> tuple[int, str]:
    """Return how many pairs a comparison needs in all, and the arm that needs most; 0 and "" if that cannot be
    estimated.

    That is the number for a power of 80 % in Stein's one-sided test of non-inferiority at the margin, if the true
    difference is 0, with the pilot's spread, at a level shared by all arms. All arms get the largest number.

    Args:
        error_rate: of the test that follows, over all arms.
    """
    arms, reference = [row.arm for row in comparison.arms], comparison.reference
    runs = [record for record in comparison.records if record.arm == reference]
    margin = accuracy_margin(runs, reference, criteria_of(comparison), comparison.metric)
    effects = accuracy_effects(comparison.records, arms, reference, margin.error_share)
    able = {arm: effect for arm, effect in effects.items() if effect.testable}
    alpha = error_rate / max(1, len(able))
    needs = {
        arm: stein_pairs(_spread_to_margin(effect), effect.freedom, margin.of_scores().size, alpha)
        for arm, effect in able.items()
    }
    arm = max(needs, key=lambda name: needs[name], default="")
    return needs.get(arm, 0), arm


def _margin(comparison: Comparison) -> str:
    unit = comparison.metric.difference_unit.replace("pp", "points")
    return f"{comparison.margin:g} {unit}".rstrip()


def _spread_to_margin(effect: Effect) -> float:
    return max(effect.error, effect.margin_error or 0.0) * math.sqrt(effect.pairs)


def _needed_at_this_look(pilot: Comparison, size: int, looks: Sequence[Look], terms: Criteria) -> tuple[int, str]:
    """Return how many seeds the next look needs, or an earlier one that got them: the same command asks no more."""
    for look in looks:
        if look.error_rate and look.margin == terms.margin:
            needed, arm = seeds_needed(pilot, look.error_rate)
            if look.seeds == list(range(max(needed, size))):
                return needed, arm
    error_rate = error_rate_of_next(looks, terms.looks)
    return seeds_needed(pilot, error_rate) if error_rate else (0, "")


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
    """Run a pilot of some seeds, estimate how many the margin needs, and run that many within a budget.

    Args:
        make: the plan for some seeds.
        budget_seconds: wall time; a seed whose cells would not finish in time is not started. The pilot always runs.
        others: as for `run_plan`.
    """
    observer = observer or Observer()
    begin = time.monotonic()
    first = pilot_seeds(len(make([0]).arms) - 1)
    pilot = run_plan(
        make(first), folder, launcher, command=command, terms=terms, force=force, jobs=jobs, observer=observer,
        save=save, test=False,
    )  # fmt: skip
    needed, arm = _needed_at_this_look(pilot, len(first), read_looks(folder), terms)
    if needed > len(first):
        observer.note(
            f"a margin of {_margin(pilot)} needs {needed} seeds, judging by the spread of {arm} over the pilot's "
            f"{len(first)}"
        )
    else:
        if needed:
            observer.note(f"the pilot of {len(first)} seeds is enough for a margin of {_margin(pilot)}")
        else:
            observer.note(
                f"no arm has three completed pairs with {pilot.reference}, or no look is left, so how many seeds are "
                "needed is not known"
            )
        return run_plan(make(first), folder, launcher, command=command, terms=terms, jobs=jobs, save=save, pilot=first)
    ended = ""

    def may_start(records: Sequence[RunRecord]) -> bool:
        nonlocal ended
        left = begin + budget_seconds - time.monotonic()
        seeds = len({record.config.recipe.seed for record in records})
        if left >= sum(record.summary.wall_seconds or 0.0 for record in records) / (seeds * jobs):
            return True
        ended = (
            f"The budget of {budget_seconds:g} s ended it after {seeds} of the {needed} seeds that are needed. The "
            f"error rate still holds, but the power to detect a difference is below 80 %."
        )
        return False

    comparison = run_plan(
        make(range(needed)), folder, launcher, command=command, terms=terms, jobs=jobs, observer=observer, save=save,
        may_start=may_start, pilot=first,
    )  # fmt: skip
    if not ended:
        return comparison
    comparison = comparison.model_copy(update={"reading": [*comparison.reading, ended]})
    if save is not None:
        save(comparison, folder)
    return comparison
