"""The environments of a comparison next to each other, where its cells ran in several: their difference is compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ampcompare.base.formatting import printable_line
from ampcompare.results.records.comparison import Comparison
from ampcompare.results.records.run import RECORDER_RUN, RunRecord
from ampcompare.results.report.document import Cell, Column, Table

FIRST = ("python", "torch", "cuda", "cudnn", "device", "device_name", "apex", "apex_kernels", "ampcompare")
NO_PART = ("exit_code", RECORDER_RUN, "cuda_build", "machine", "numpy", "OMP_NUM_THREADS")
HERE = "here"
NONE = "-"
MAX_WORDS = 80


def stack_table(comparison: Comparison) -> Table | None:
    """Return a row for each fact in which the environments differ, with a column for each; None for one environment."""
    found: dict[str, dict[str, Any]] = {}
    arms: dict[str, list[str]] = {}
    for record in comparison.records:
        # else they are those of the command
        if record.status != "failed" or RECORDER_RUN in record.environment:
            name = _stack_name(record)
            found.setdefault(name, {}).update(_stack_facts(record))
            arms.setdefault(name, [])
            arms[name] += [record.arm] if record.arm not in arms[name] else []
    if len(found) < 2:
        return None
    known = dict.fromkeys([*FIRST, *(fact for facts in found.values() for fact in facts)])
    unlike = [fact for fact in known if len({str(facts.get(fact, NONE)) for facts in found.values()}) > 1]
    rows = [[Cell("arms"), *(Cell(printable_line(", ".join(arms[name]), MAX_WORDS)) for name in found)]]
    rows += [
        [
            Cell(fact),
            *(Cell(printable_line(str(facts.get(fact, NONE)), MAX_WORDS)) for facts in found.values()),
        ]
        for fact in unlike
    ]
    legend = ["These differences are what is compared; what is the same in all is left out."]
    return Table([Column("environment"), *map(Column, found)], rows, caption="Environments", legend=legend)


def _stack_name(record: RunRecord) -> str:
    return HERE if record.config.stack is None else record.config.stack.name


def _stack_facts(record: RunRecord) -> Mapping[str, Any]:
    parts = {name: value for name, value in record.environment.items() if name not in NO_PART}
    return {name: value for name, value in parts.items() if value not in (None, "")}
