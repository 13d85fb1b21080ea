"""Which runs of two arms belong together: completed ones of one seed."""

from __future__ import annotations

from collections.abc import Sequence

from ampcompare.records.run import RunRecord

__all__ = ["Pair", "divergence_verdict", "finished", "pairs_by_seed"]

Pair = tuple[RunRecord, RunRecord]  # of an arm, and of the reference


def pairs_by_seed(arm: Sequence[RunRecord], reference: Sequence[RunRecord]) -> list[Pair]:
    """Return the completed runs of one seed of both arms."""
    partners = {record.config.recipe.seed: record for record in reference if record.status == "completed"}
    return [
        (record, partners[record.config.recipe.seed])
        for record in arm
        if record.status == "completed" and record.config.recipe.seed in partners
    ]


def divergence_verdict(records: Sequence[RunRecord]) -> str:
    count = sum(record.status == "diverged" for record in records)
    return f"diverged {count}/{len(finished(records))}" if count else ""


def finished(records: Sequence[RunRecord]) -> list[RunRecord]:
    return [record for record in records if record.status in ("completed", "diverged")]
