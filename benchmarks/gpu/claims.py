"""The published claims that need a GPU, each on its small shape, with its verdict."""

from __future__ import annotations

import json

from benchmarks.gpu.context import Context
from benchmarks.gpu.report import Report

__all__ = ["run"]

# A claim that does not hold here is an answer too; one of which nothing can be told is none.
ANSWERED = ("holds", "does not hold")
REHEARSED = "double-step"


def run(context: Context, report: Report) -> None:
    """Reproduce them; what is checked is that each was measured and judged, and the last line has the verdicts."""
    from ampcompare.experiment.claims.definition import load_study

    names = [claim.name for claim in load_study("articles").claims if claim.needs_gpu]
    report.check("three claims need a GPU", len(names) == 3, ", ".join(names))
    if context.rehearse:
        # One that a CPU can answer takes the same way.
        names.append(REHEARSED)
    budget = f"{context.left(420.0):.0f}s"
    folder = context.scratch / "claims"
    words = ("reproduce", "articles", *names, "--budget", budget, "--json", "--no-progress", "-q", "-o", str(folder))
    done = context.ampcompare(*words, most=480.0)
    report.check("reproduce ends with 0", done.code == 0, done.reason)
    try:
        found = {entry["name"]: entry for entry in json.loads(done.out)["claims"]}
    except (ValueError, KeyError) as error:
        report.check("reproduce answers with claims", False, f"{error!r}: {done.reason}")
        return
    report.figures["claims"] = found
    for name in names:
        entry = found.get(name, {"verdict": "missing", "reason": ""})
        if context.rehearse and name != REHEARSED:
            report.check(f"claim {name} asks for a GPU", "GPU" in entry["reason"], str(entry))
        else:
            seen = f"{entry['verdict']} {entry['reason']}".strip()
            report.check(f"claim {name} has a verdict", entry["verdict"] in ANSWERED, seen)
    report.says = "; ".join(f"{name}: {found[name]['verdict']}" for name in names if name in found)
