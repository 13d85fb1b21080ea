"""Pairs of completed runs of two arms with the same seed, and whether both computed the same, bit for bit."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ampcompare.results.records.run import RunRecord
from ampcompare.results.records.verdict import Verdict

Pair = tuple[RunRecord, RunRecord]  # of an arm, and of the reference
IDENTICAL = Verdict(kind="identical")
# A share: where a loss falls at most in proportion to the number of updates, fewer that are lost move it by less than
# its margin.
MAX_LOST_UPDATES = 0.01


@dataclass(frozen=True)
class Pairing:
    """The runs of an arm next to those of the reference, or of a baseline, which may be of other software."""

    arm: Sequence[RunRecord]
    reference: Sequence[RunRecord]
    pairs: Sequence[Pair]
    same_software: bool = True

    @classmethod
    def by_seed(
        cls, arm: Sequence[RunRecord], reference: Sequence[RunRecord], *, same_software: bool = True
    ) -> Pairing:
        """Return the completed runs of each seed as pairs."""
        return cls(arm, reference, pairs_by_seed(arm, reference), same_software)

    @property
    def is_of_reference(self) -> bool:
        """Whether the arm is the reference, paired with itself."""
        return self.arm is self.reference

    @property
    def surviving_and_common_seed_counts(self) -> tuple[int, int] | None:
        """On how many of the seeds that both ran a verdict rests, and how many these are; None if on all."""
        return surviving_and_common_seed_counts(self.arm, self.reference)

    @property
    def differing_mean_updates(self) -> tuple[float, float] | None:
        """How many updates runs of pairs made on average, without skipped steps; None where they hardly differ."""
        if not self.pairs:
            return None
        here, there = (statistics.fmean(map(_count_updates, side)) for side in zip(*self.pairs, strict=True))
        return (here, there) if abs(here - there) > MAX_LOST_UPDATES * max(here, there) else None


def _count_updates(record: RunRecord) -> int:
    return record.summary.num_steps - record.summary.skipped_steps


def pairs_by_seed(arm: Sequence[RunRecord], reference: Sequence[RunRecord]) -> list[Pair]:
    """Return the completed runs of one seed of both arms, as (run of the arm, run of the reference).

    Args:
        arm, reference: all runs of each.
    """
    partners = {record.config.recipe.seed: record for record in reference if record.status == "completed"}
    return [
        (record, partners[record.config.recipe.seed])
        for record in arm
        if record.status == "completed" and record.config.recipe.seed in partners
    ]


def pairs_by_seed_or_with_first(arm: Sequence[RunRecord], reference: Sequence[RunRecord]) -> list[Pair]:
    """Return pairs by seed or, where no seed is in common, every run with the first of the other side.

    That is enough to see whether all of them did the same work, because equality is transitive.
    """
    if not arm or not reference:
        return []
    by_seed = pairs_by_seed(arm, reference)
    return by_seed or [*((run, reference[0]) for run in arm), *((arm[0], run) for run in reference[1:])]


def surviving_and_common_seed_counts(
    arm: Sequence[RunRecord], reference: Sequence[RunRecord]
) -> tuple[int, int] | None:
    """Return on how many of the seeds that both ran a verdict rests, and how many these are; None if on all.

    A seed that either side lost by divergence or failure may be one where the arms differ most.
    """
    ended = [
        {record.config.recipe.seed: record.status for record in side if record.status != "interrupted"}
        for side in (arm, reference)
    ]
    seeds = ended[0].keys() & ended[1].keys()
    kept = [seed for seed in seeds if all(statuses[seed] == "completed" for statuses in ended)]
    return (len(kept), len(seeds)) if len(kept) < len(seeds) else None


def divergence_verdict(records: Sequence[RunRecord]) -> Verdict:
    """Return how many of the runs that ended by themselves diverged, as a verdict; an empty one if none did."""
    count = sum(record.status == "diverged" for record in records)
    return (
        Verdict(kind="diverged", share=(count, len(completed_or_diverged_runs(records))))
        if count
        else Verdict()
    )


def completed_or_diverged_runs(records: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the runs that ended by themselves, in a good state or not."""
    return [record for record in records if record.has_result]


def are_pairs_identical(pairs: Sequence[Pair]) -> bool:
    """Return whether all pairs ended with the same weights after the same losses, training and validation.

    It is an observation about these runs and needs no test. Records without a hash of the weights never show it.
    """
    return bool(pairs) and all(_have_same_losses(*pair) and _have_same_weights(*pair) for pair in pairs)


def have_pairs_equal_losses(pairs: Sequence[Pair]) -> bool:
    """Return whether all pairs had the same losses bit for bit, and skipped the same number of steps.

    Their final weights are not known to be the same: a skipped step may leave every recorded loss as it would be.
    """
    return bool(pairs) and all(_have_same_losses(*pair) for pair in pairs)


def has_pair_of_unequal_final_weights(pairs: Sequence[Pair]) -> bool:
    """Return whether a pair is known to have ended with different weights."""
    return any(
        None not in (ours := {_final_weights_hash(arm), _final_weights_hash(other)}) and len(ours) > 1
        for arm, other in pairs
    )


def _have_same_losses(arm: RunRecord, reference: RunRecord) -> bool:
    here, there = arm.summary, reference.summary
    return (
        here.losses_sha256 is not None
        and here.losses_sha256 == there.losses_sha256
        and here.skipped_steps == there.skipped_steps
        and _evaluations_of_run(arm) == _evaluations_of_run(reference)
    )


def _evaluations_of_run(record: RunRecord) -> list[Any]:
    return [(epoch.loss, epoch.values, epoch.counts) for epoch in record.summary.epochs]


def _have_same_weights(arm: RunRecord, reference: RunRecord) -> bool:
    return _final_weights_hash(arm) is not None and _final_weights_hash(arm) == _final_weights_hash(reference)


def _final_weights_hash(record: RunRecord) -> str | None:
    """Return the hash of the final weights; older records of several processes have one of another kind."""
    if record.summary.weights_sha256 is not None:
        return record.summary.weights_sha256
    return record.processes.weights if record.processes else None
