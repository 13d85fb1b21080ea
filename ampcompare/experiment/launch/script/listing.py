"""What a script shows: run it briefly, and list the metrics that it prints and logs, or the types that it trains in."""

from __future__ import annotations

import re
import shlex
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ampcompare.base.files.run_files import CellFile
from ampcompare.experiment.launch.cell_files import last_lines
from ampcompare.experiment.launch.script.output import COLOR
from ampcompare.experiment.launch.script.rows import read_rows
from ampcompare.runs.records.run import RunRecord
from ampcompare.runs.settings.config import RunConfig

__all__ = [
    "MAX_LINES",
    "SeenMetric",
    "ShortRun",
    "brief_record",
    "list_metrics",
    "printed_metrics",
    "script_steps",
]

BRIEFLY = 20
MAX_LINES = 2000
# A number as Python prints it; without a point only behind a sign of equality, where it is no number of a list.
NUMBER = r"[-+]?(?:(?:\d+\.\d*|\.\d+)(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+|(?i:nan|inf)\b)"
WORD = r"[A-Za-z][\w@./-]*"
# What stands before tells figures of one name apart: `tot_loss[loss=0.5`, `validation: loss=0.5`.
PRINTED = re.compile(
    rf"(?<![\w.])(?P<of>{WORD}(?:\[|: ))?(?P<name>{WORD}(?: {WORD})?)"
    rf"(?:\s*[:=]\s*|\s+)(?P<number>{NUMBER})(?!\.?\d|:\d)"
)
# A figure whose name has numbers of its own, such as the thresholds of COCO: `AP @[ IoU=0.50:0.95 | area=all ] = 0.4`.
BRACKETED = re.compile(rf"(?P<name>[A-Za-z].*\[[^\]]*\])\s*[:=]\s*(?P<number>{NUMBER})\s*")
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


@dataclass(frozen=True)
class ShortRun:
    """What a script showed in some steps.

    Attributes:
        error: that ended it.
        is_cut: whether it was ended after its steps, and may show more later.
    """

    seen: tuple[SeenMetric, ...]
    error: str | None
    is_cut: bool


def list_metrics(config: RunConfig) -> ShortRun:
    """Run the script of a configuration for some steps, and return what it showed."""
    steps = script_steps(config)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        record = brief_record(config, folder)
        rows = read_rows(folder / CellFile.SCRIPT)
        seen = [
            SeenMetric(metric, rows.sources[metric], len(values), values[-1], _option(metric))
            for metric, values in rows.scalars.items()
        ]
        seen += printed_metrics(last_lines(folder / CellFile.LOG, MAX_LINES))
    return ShortRun(tuple(seen), record.error, record.summary.num_steps >= steps)


def brief_record(config: RunConfig, folder: Path) -> RunRecord:
    """Run the script of a configuration for some steps, in a folder of its own, and return its record."""
    from ampcompare.experiment.launch.script.launcher import ScriptLauncher  # which imports torch

    assert config.script is not None
    script = config.script.model_copy(update={"metrics": (), "max_steps": script_steps(config)})
    with ScriptLauncher() as launcher:
        return launcher.launch(config.model_copy(update={"script": script}), folder)


def script_steps(config: RunConfig) -> int:
    """Return the number of steps after which `list_metrics` ends the script."""
    assert config.script is not None
    return config.script.max_steps or BRIEFLY


def printed_metrics(lines: list[str]) -> Iterator[SeenMetric]:
    """Yield the numbers that lines of output show with a name before them."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for line in (COLOR.sub("", line) for line in lines):
        if line.startswith("ampcompare"):
            continue
        if whole := BRACKETED.fullmatch(line.strip()):
            words = whole["name"].split()
            before = r"\s+".join(map(re.escape, words)) + r"\s*[:=]\s*"
            found.setdefault((" ".join(words), "", before), []).append(float(whole["number"]))
            continue
        for printed in PRINTED.finditer(line):
            before = rf"{re.escape(printed['name'])}(?:\s*[:=]\s*|\s+)"
            key = (printed["name"], printed["of"] or "", before)
            found.setdefault(key, []).append(float(printed["number"]))
        for entry in ENTRY.finditer(line):
            quote, name, opening = entry["quote"], entry["name"], entry["open"] or ""
            before = _without_apostrophe(f"{quote}{re.escape(name)}{quote}: ?{re.escape(opening)}")
            found.setdefault((name, "", before), []).append(float(entry["number"]))
    several = Counter((name, before) for name, _, before in found)
    for (name, of, before), values in found.items():
        if several[name, before] > 1:  # else one pattern would mix them
            before = (rf"(?<![\w.]){re.escape(of)}" if of else r"(?<![\w.\[])(?<!: )") + before
            name = f"{of.rstrip('[: ')} {name}" if of else name
        yield SeenMetric(name, "output", len(values), values[-1], _option(name, before + VALUE))


def _without_apostrophe(pattern: str) -> str:
    """Return a pattern of the same meaning that needs no escape within a shell's apostrophes."""
    return pattern.replace("'", r"\x27")


def _option(name: str, pattern: str | None = None) -> str:
    goal = "min" if LOWER.search(name) else "max"
    short = re.sub(r"[:=]", "_", name)[:40].strip()
    return f"--metric {shlex.quote(f'{short}:{goal}' + (f'={pattern}' if pattern else ''))}"
