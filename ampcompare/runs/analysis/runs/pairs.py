"""Pairs of completed runs of two arms with the same seed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ampcompare.runs.analysis.inference.verdict import Verdict
from ampcompare.runs.records.run import RunRecord

__all__ = ["Pair", "conditional", "conditional_on", "counterparts", "divergence_verdict", "finished", "pairs_by_seed"]

Pair = tuple[RunRecord, RunRecord]  # of an arm, and of the reference


def pairs_by_seed(arm: Sequence[RunRecord], reference: Sequence[RunRecord]) -> list[Pair]:
    """Return the completed runs of one seed of both arms."""
    partners = {record.config.recipe.seed: record for record in reference if record.status == "completed"}
    return [
        (record, partners[record.config.recipe.seed])
        for record in arm
        if record.status == "completed" and record.config.recipe.seed in partners
    ]


def counterparts(arm: Sequence[RunRecord], reference: Sequence[RunRecord]) -> list[Pair]:
    """Return pairs by seed or, where no seed is in common, every run with the first of the other side.

    That is enough to see whether all of them did the same work, because equality is transitive.
    """
    if not arm or not reference:
        return []
    by_seed = pairs_by_seed(arm, reference)
    return by_seed or [*((run, reference[0]) for run in arm), *((arm[0], run) for run in reference[1:])]


def conditional_on(arm: Sequence[RunRecord], reference: Sequence[RunRecord]) -> str:
    """Return on how many of the seeds that both ran a verdict rests, as "3 of 8 seeds"; "" if on all.

    A seed that either side lost by divergence or failure may be one where the arms differ most.
    """
    ended = [
        {record.config.recipe.seed: record.status for record in side if record.status != "interrupted"}
        for side in (arm, reference)
    ]
    seeds = ended[0].keys() & ended[1].keys()
    kept = [seed for seed in seeds if all(statuses[seed] == "completed" for statuses in ended)]
    return f"{len(kept)} of {len(seeds)} seeds" if len(kept) < len(seeds) else ""


def conditional(verdict: Verdict, share: str) -> Verdict:
    """Return a verdict, marked as conditional where it rests on the share of seeds that survived (`conditional_on`)."""
    if not verdict.word or not share or verdict.word.startswith(("diverged", "not comparable")):
        return verdict
    return dataclasses.replace(verdict, word=f"conditional on {share} ({verdict.word})")


def divergence_verdict(records: Sequence[RunRecord]) -> str:
    """Return how many of the runs that ended by themselves diverged, as a verdict; "" if none did."""
    count = sum(record.status == "diverged" for record in records)
    return f"diverged {count}/{len(finished(records))}" if count else ""


def finished(records: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the runs that ended by themselves, in a good state or not."""
    return [record for record in records if record.status in ("completed", "diverged")]
