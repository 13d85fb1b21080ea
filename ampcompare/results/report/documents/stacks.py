"""The environments of a comparison next to each other, where its cells ran in several: their difference is compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
            found.setdefault(name, {}).update(comparable_environment_facts(record.environment))
            arms.setdefault(name, [])
            arms[name] += [record.arm] if record.arm not in arms[name] else []
    if len(found) < 2:
        return None
    heads, rows = rows_of_environments(found, arms)
    legend = ["These differences are what is compared; what is the same in all is left out."]
    cells = [[Cell(text) for text in row] for row in rows]
    return Table(list(map(Column, heads)), cells, caption="Environments", legend=legend)


def rows_of_environments(
    environments: Mapping[str, Mapping[str, Any]], arms: Mapping[str, Sequence[str]]
) -> tuple[list[str], list[list[str]]]:
    """Return the heads and rows of a table of what differs between environments, with a column for each.

    Args:
        environments: facts of each environment, by its name.
        arms: that train there.
    """
    known = dict.fromkeys([*FIRST, *(fact for facts in environments.values() for fact in facts)])
    unlike = [
        fact for fact in known if len({str(facts.get(fact, NONE)) for facts in environments.values()}) > 1
    ]
    rows = [["arms", *(", ".join(arms[name]) for name in environments)]]
    rows += [[fact, *(str(facts.get(fact, NONE)) for facts in environments.values())] for fact in unlike]
    return ["environment", *environments], [[printable_line(text, MAX_WORDS) for text in row] for row in rows]


def _stack_name(record: RunRecord) -> str:
    return HERE if record.config.stack is None else record.config.stack.name


def comparable_environment_facts(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of an environment that a table compares, of those that a record has."""
    parts = {name: value for name, value in environment.items() if name not in NO_PART}
    return {name: value for name, value in parts.items() if value not in (None, "")}
