"""Check whether two arms computed the same: equal losses and final weights, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ampcompare.runs.analysis.runs.pairs import Pair
from ampcompare.runs.records.run import RunRecord

__all__ = ["IDENTICAL", "equal_losses", "identical", "other_weights"]

IDENTICAL = "identical"


def identical(pairs: Sequence[Pair]) -> bool:
    """Return whether all pairs ended with the same weights after the same losses, training and validation.

    It is an observation about these runs and needs no test. Records without a hash of the weights never show it.
    """
    return bool(pairs) and all(_same_losses(*pair) and _same_weights(*pair) for pair in pairs)


def equal_losses(pairs: Sequence[Pair]) -> bool:
    """Return whether all pairs had the same losses bit for bit, and skipped the same number of steps.

    The final weights are then likely the same, and not known to be: a skipped step may leave every recorded loss as it
    would have been.
    """
    return bool(pairs) and all(_same_losses(*pair) for pair in pairs)


def other_weights(pairs: Sequence[Pair]) -> bool:
    """Return whether a pair is known to have ended with different weights."""
    return any(None not in (ours := {_weights(arm), _weights(other)}) and len(ours) > 1 for arm, other in pairs)


def _same_losses(arm: RunRecord, reference: RunRecord) -> bool:
    here, there = arm.summary, reference.summary
    return (
        here.losses_sha256 is not None
        and here.losses_sha256 == there.losses_sha256
        and here.skipped_steps == there.skipped_steps
        and _evaluations(arm) == _evaluations(reference)
    )


def _evaluations(record: RunRecord) -> list[Any]:
    return [(epoch.loss, epoch.values, epoch.counts) for epoch in record.summary.epochs]


def _same_weights(arm: RunRecord, reference: RunRecord) -> bool:
    return _weights(arm) is not None and _weights(arm) == _weights(reference)


def _weights(record: RunRecord) -> str | None:
    """Return the hash of the final weights; older records of several processes have one of another kind."""
    if record.summary.weights_sha256 is not None:
        return record.summary.weights_sha256
    return record.processes.weights if record.processes else None
