"""The report of a search for the largest batch: a row for each arm, and the environments where there are several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ampcompare.base.formatting import format_mebibytes, printable_line
from ampcompare.results.records.batch_limit import BatchLimit
from ampcompare.results.report.document import Document, Section, Table
from ampcompare.results.report.documents.stacks import (
    HERE,
    comparable_environment_facts,
    rows_of_environments,
)

HEADS = ("arm", "largest batch", "peak MiB", "next tried", "does not fit")


def batch_limits_document(limits: Sequence[BatchLimit]) -> Document:
    """Return the report of the largest batches of some arms; its data are a dict for each."""
    sections = [Section("limits", [Table.from_rows(HEADS, _rows_of_limits(limits), prose=True)])]
    facts: dict[str, dict[str, Any]] = {}
    arms: dict[str, list[str]] = {}
    for limit in limits:
        if limit.tries:
            facts.setdefault(limit.stack or HERE, {}).update(comparable_environment_facts(limit.environment))
            arms.setdefault(limit.stack or HERE, []).append(limit.arm)
    if len(facts) > 1:
        sections.append(Section("stacks", [Table.from_rows(*rows_of_environments(facts, arms))]))
    return Document("batch limits", sections, [asdict(limit) for limit in limits])


def _rows_of_limits(limits: Sequence[BatchLimit]) -> list[list[str]]:
    rows = []
    for limit in limits:
        largest, peak = "none", None
        if limit.fits is not None:
            largest, peak = str(limit.fits.batch), limit.fits.peak_bytes
        next_tried, reason = "-", "-"
        if limit.fails is not None:
            next_tried, reason = str(limit.fails.batch), limit.fails.reason
        if limit.error is not None:
            largest, reason = "unknown", limit.error
        rows.append([limit.label, largest, format_mebibytes(peak), next_tried, printable_line(reason)])
    return rows
