"""Claims and what was measured: their report before it has a format, and plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ampcompare.base.formatting import printable
from ampcompare.experiment.claims.definition import Claim
from ampcompare.experiment.claims.evaluate import ClaimResult
from ampcompare.experiment.claims.reproduce import Reproduction
from ampcompare.runs.report.document import Cell, Code, Column, Document, Items, Section, Table
from ampcompare.runs.report.tables import grid

__all__ = ["claim_table", "claims_document"]

LISTED = ("claim", "says", "needs a GPU")
COLUMNS = {"claim": 34, "published": 26, "measured": 40, "verdict here": 26}


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
