"""Claims and what was measured, as a table, as Markdown and as plain data."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from tabulate import tabulate

from ampcompare.base.formatting import printable
from ampcompare.experiment.claims.definition import Claim
from ampcompare.experiment.claims.evaluate import ClaimResult
from ampcompare.experiment.claims.reproduce import Reproduction

__all__ = ["claim_table", "findings_data", "render_markdown", "render_text"]

WIDTH = 100
COLUMNS = {"claim": 34, "published": 26, "measured": 40, "verdict here": 26}


def claim_table(claims: Sequence[Claim]) -> str:
    """Return the names of claims with what they say."""
    rows = [[claim.name, claim.says, "yes" if claim.needs_gpu else "no"] for claim in claims]
    return tabulate(rows, headers=["claim", "says", "needs a GPU"], tablefmt="simple") + "\n"


def render_text(done: Reproduction) -> str:
    """Return the table for a terminal, what limits each small version, and what it was made on."""
    rows = [
        [textwrap.fill(cell, width) for cell, width in zip(_cells(f), COLUMNS.values(), strict=True)]
        for f in done.findings
    ]
    table = tabulate(rows, headers=list(COLUMNS), tablefmt="simple", disable_numparse=True)
    lines = [_summary(done), *_limits(done.findings), _source(done), *_where(done)]
    filled = (textwrap.fill(line, WIDTH, subsequent_indent="  ") for line in lines)
    return table + "\n\n" + "\n".join(filled) + "\n"


def render_markdown(done: Reproduction) -> str:
    """Return the report as Markdown: the table, its limits, where and how it was made."""
    rows = [[cell.replace("|", "\\|") for cell in _cells(finding)] for finding in done.findings]
    table = tabulate(rows, headers=list(COLUMNS), tablefmt="pipe", disable_numparse=True)
    parts = ["# Claims, published and measured", table, _summary(done)]
    if limits := _limits(done.findings):
        parts += ["## Limits of the small versions", "\n".join(f"- {line}" for line in limits)]
    facts = [_source(done), *_where(done)]
    parts += ["## How it was made", "\n".join(f"- {line}" for line in facts)]
    if done.command:
        parts.append(f"```\n{printable(done.command, 2000)}\n```")
    return "\n\n".join(parts) + "\n"


def findings_data(done: Reproduction) -> dict[str, Any]:
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


def _limits(findings: Sequence[ClaimResult]) -> list[str]:
    return [f"{finding.claim.name}: {finding.claim.limits}." for finding in findings if finding.claim.limits]


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
