"""What a script shows: run it briefly, and list the metrics that it prints and logs, or the types that it trains in."""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ampcompare.base.files.run_files import CellFile
from ampcompare.experiment.launch.cell_files import last_lines
from ampcompare.experiment.launch.script.launcher import ScriptLauncher
from ampcompare.experiment.launch.script.output import COLOR
from ampcompare.experiment.launch.script.rows import read_rows
from ampcompare.runs.records.run import RunRecord
from ampcompare.runs.settings.config import RunConfig

__all__ = ["SeenMetric", "brief_record", "list_metrics", "script_steps"]

BRIEFLY = 20
MAX_LINES = 2000
# A number as Python prints it; without a point only behind a sign of equality, where it is no number of a list.
NUMBER = r"[-+]?(?:(?:\d+\.\d*|\.\d+)(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+|(?i:nan|inf)\b)"
WORD = r"[A-Za-z][\w@./-]*"
PRINTED = re.compile(rf"(?<![\w.])({WORD}(?: {WORD})?)(?:\s*[:=]\s*|\s+)({NUMBER})(?!\.?\d)")
# An entry of a dict or of JSON; its number may be a text, as HF's Trainer prints it, or a scalar of numpy or torch.
ENTRY = re.compile(
    rf"""(?P<quote>['"])(?P<name>[A-Za-z][\w@./ -]*)(?P=quote): ?"""
    rf"""(?P<open>['"]|[\w.]+\()?(?P<number>{NUMBER})(?=['"),}}]|$)"""
)
VALUE = r"([-+]?[\d.]+(?:[eE][-+]?\d+)?|nan|[-+]?inf)"
LOWER = re.compile(r"loss|err|perplexity|ppl|mse|mae", re.IGNORECASE)


@dataclass(frozen=True)
class SeenMetric:
    """A figure that a script showed.

    Attributes:
        name: as it is logged, or the words before the number.
        source: the function that logged it, or "output".
        count: how often.
        last: its last value.
        option: what to paste.
    """

    name: str
    source: str
    count: int
    last: float
    option: str


def list_metrics(config: RunConfig) -> tuple[list[SeenMetric], str | None]:
    """Run the script of a configuration for some steps, and return what it showed, and the error that ended it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        record = brief_record(config, folder)
        rows = read_rows(folder / CellFile.SCRIPT)
        seen = [
            SeenMetric(metric, rows.sources[metric], len(values), values[-1], _option(metric))
            for metric, values in rows.scalars.items()
        ]
        seen += _printed(last_lines(folder / CellFile.LOG, MAX_LINES))
    return seen, record.error


def brief_record(config: RunConfig, folder: Path) -> RunRecord:
    """Run the script of a configuration for some steps, in a folder of its own, and return its record."""
    assert config.script is not None
    script = config.script.model_copy(update={"metrics": (), "max_steps": script_steps(config)})
    with ScriptLauncher() as launcher:
        return launcher.launch(config.model_copy(update={"script": script}), folder)


def script_steps(config: RunConfig) -> int:
    """Return the number of steps after which `list_metrics` ends the script."""
    assert config.script is not None
    return config.script.max_steps or BRIEFLY


def _printed(lines: list[str]) -> Iterator[SeenMetric]:
    found: dict[tuple[str, str], list[float]] = {}
    for line in (COLOR.sub("", line) for line in lines):
        if line.startswith("ampcompare"):
            continue
        for words, number in PRINTED.findall(line):
            before = rf"{re.escape(words)}(?:\s*[:=]\s*|\s+)"
            found.setdefault((words, before), []).append(float(number))
        for entry in ENTRY.finditer(line):
            quote, name, opening = entry["quote"], entry["name"], entry["open"] or ""
            before = _without_apostrophe(f"{quote}{re.escape(name)}{quote}: ?{re.escape(opening)}")
            found.setdefault((name, before), []).append(float(entry["number"]))
    for (name, before), values in found.items():
        yield SeenMetric(name, "output", len(values), values[-1], _option(name, before + VALUE))


def _without_apostrophe(pattern: str) -> str:
    """Return a pattern of the same meaning that needs no escape within a shell's apostrophes."""
    return pattern.replace("'", r"\x27")


def _option(name: str, pattern: str | None = None) -> str:
    goal = "min" if LOWER.search(name) else "max"
    short = re.sub(r"[:=]", "_", name)[:40]
    return f"--metric {shlex.quote(f'{short}:{goal}' + (f'={pattern}' if pattern else ''))}"
