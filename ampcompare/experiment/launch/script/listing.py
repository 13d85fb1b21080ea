"""What a script shows: run it briefly, and list the metrics that it prints and logs, or the types that it trains in."""

import re
import shlex
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from ampcompare.base.files.run_files import CellFile
from ampcompare.experiment.launch.cell_files import last_lines_of_file
from ampcompare.experiment.launch.script.output import COLOR, pattern_with_wider_numbers
from ampcompare.experiment.launch.script.rows import read_script_rows
from ampcompare.results.records.run import RunRecord
from ampcompare.settings.config import RunConfig
from ampcompare.settings.metric_direction import known_metric_direction

BRIEFLY = 20
MAX_LINES = 2000
# Warnings of Python, with the file and line of what gave them, and of torch's C++.
OF_WARNING = re.compile(
    r"^\S.*:\d+: \w*Warning: |\(Triggered internally at |^\[W\d* ?[\d:. -]*\w+\.cpp:\d+\]"
)
# A number as Python prints it; without a point only behind a sign of equality, where it is no number of a list.
NUMBER = r"[-+]?(?:(?:\d+\.\d*|\.\d+)(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+|(?i:nan|inf)\b)"
WORD = r"[A-Za-z][\w@./-]*"
PRINTED = re.compile(
    rf"(?<![\w.])(?P<name>{WORD}(?: {WORD})?)(?:\s*[:=]\s*|\s+)(?P<number>{NUMBER})(?!\.?\d|:\d)"
)
# What the figures behind it belong to: `tot_loss[`, `"valid": {`, `validation: ` or `[test]`; a number in it counts on.
OWNER = re.compile(
    r"""(?P<tag>\[[A-Za-z_ -]+\])|(?P<open>[A-Za-z_./-]+[\[(]|['"][A-Za-z_./-]+['"]: ?\{)|(?P<close>[\])}])"""
    r"""|(?P<word>(?<![\w.])[A-Za-z_./-]+: (?=[A-Za-z]))"""
)
CLOSING = {"[": "]", "(": ")", "{": "}"}
NEXT_OWNER = r"\w: [A-Za-z]"
BOUNDARY = r"(?<![\w@./-])"
# A figure whose name has numbers of its own, such as the thresholds of COCO: `AP @[ IoU=0.50:0.95 | area=all ] = 0.4`.
BRACKETED = re.compile(rf"(?P<name>[A-Za-z].*\[[^\]]*\])\s*[:=]\s*(?P<number>{NUMBER})\s*")
# An entry of a dict or of JSON; its number may be a text, as HF's Trainer prints it, or a scalar of numpy or torch.
ENTRY = re.compile(
    rf"""(?P<quote>['"])(?P<name>[A-Za-z][\w@./ -]*)(?P=quote): ?"""
    rf"""(?P<open>['"]|[\w.]+\()?(?P<number>{NUMBER})(?=['"),}}]|$)"""
)
VALUE = r"([-+]?[\d.]+(?:[eE][-+]?\d+)?|nan|[-+]?inf)"
OWNERS_MARKS = "[](){}:'\" "
Place: TypeAlias = tuple[int, int]  # the line, and the first character


@dataclass(frozen=True)
class SeenMetric:
    """A figure that a script showed.

    Attributes:
        name: as it is logged, or the words before the number.
        source: the function that logged it, or "output".
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


def run_script_briefly(config: RunConfig) -> ShortRun:
    """Run the script of a configuration for some steps, and return what it showed."""
    steps = step_count_of_short_run(config)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        record = run_script_briefly_and_make_record(config, folder)
        rows = read_script_rows(folder / CellFile.SCRIPT)
        seen = [
            SeenMetric(metric, rows.sources[metric], len(values), values[-1], _metric_option_text(metric))
            for metric, values in rows.scalars.items()
        ]
        seen += printed_metrics(last_lines_of_file(folder / CellFile.LOG, MAX_LINES))
    return ShortRun(tuple(seen), record.error, record.summary.num_steps >= steps)


def run_script_briefly_and_make_record(config: RunConfig, folder: Path) -> RunRecord:
    """Run the script of a configuration for some steps, in a folder of its own, and return its record.

    Args:
        config: with a script; the script's own limit of steps holds, else `BRIEFLY`.
        folder: gets the files of the run.
    """
    from ampcompare.experiment.launch.script.launcher import ScriptLauncher  # which imports torch

    assert config.script is not None
    own = {"metrics": (), "max_steps": step_count_of_short_run(config), "first_weights": None}
    script = config.script.model_copy(update=own)
    with ScriptLauncher() as launcher:
        return launcher.launch(config.model_copy(update={"script": script}), folder)


def step_count_of_short_run(config: RunConfig) -> int:
    """Return the number of steps after which `run_script_briefly` ends the script."""
    assert config.script is not None
    return config.script.max_steps or BRIEFLY


def printed_metrics(lines: list[str]) -> Iterator[SeenMetric]:
    """Yield the numbers that lines of output show with a name before them."""
    plain = [
        line
        for line in (COLOR.sub("", one) for one in lines)
        if not line.startswith("ampcompare") and not OF_WARNING.search(line)
    ]
    found: dict[tuple[str, str], dict[str, list[tuple[Place, float]]]] = {}
    for row, line in enumerate(plain):
        for name, before, match in _figures_with_names_and_patterns(line):
            owner = _owner_word_of_figure(line, match.start("name"))
            value = (row, match.start("number")), float(match["number"])
            found.setdefault((name, before), {}).setdefault(owner, []).append(value)
    for (name, before), by_owner in found.items():
        for owner, values in by_owner.items():
            shown = f"{owner.strip(OWNERS_MARKS)} {name}".strip() if len(by_owner) > 1 else name
            patterns = _candidate_patterns(name, before, owner, [*by_owner], [other for other, _ in found])
            places = [place for place, _ in values]
            pattern = next(
                (one for one in patterns if _positions_of_matches(one, plain) == places), patterns[-1]
            )
            yield SeenMetric(shown, "output", len(values), values[-1][1], _metric_option_text(shown, pattern))


def _figures_with_names_and_patterns(line: str) -> Iterator[tuple[str, str, re.Match[str]]]:
    """Yield the numbers of a line that have a name, with the name and a pattern of what stands before them."""
    if whole := BRACKETED.fullmatch(line.strip()):
        words = whole["name"].split()
        yield (
            " ".join(words),
            r"\s+".join(map(re.escape, words)) + r"\s*[:=]\s*",
            BRACKETED.search(line) or whole,
        )
        return
    for printed in PRINTED.finditer(line):
        yield printed["name"], rf"{re.escape(printed['name'])}(?:\s*[:=]\s*|\s+)", printed
    for entry in ENTRY.finditer(line):
        quote = entry["quote"]
        name = entry["name"]
        opening = entry["open"] or ""
        yield (
            name,
            _pattern_without_apostrophe(f"{quote}{re.escape(name)}{quote}: ?{re.escape(opening)}"),
            entry,
        )


def _owner_word_of_figure(line: str, place: int) -> str:
    """Return what the figure at a place belongs to: the bracket that is open, else the last word with a colon."""
    opened: list[str] = []
    last = ""
    for found in OWNER.finditer(line):
        if found.end() > place:
            break
        if found["open"]:
            opened.append(found["open"])
        elif found["close"]:
            opened = opened[:-1]
        else:
            last = found[0]
    return opened[-1] if opened else last


def _candidate_patterns(
    name: str, text_before: str, owner: str, owners: list[str], names: list[str]
) -> list[str]:
    """Return patterns for a figure, the shortest first, which other figures of its name may match too."""
    words = [other.removesuffix(name) for other in names if other != name and other.endswith(f" {name}")]
    apart = BOUNDARY + "".join(rf"(?<!{re.escape(word)})" for word in dict.fromkeys(words))
    inside = (
        rf"[^{re.escape(CLOSING[owner[-1]])}]*?" if owner[-1:] in CLOSING else rf"(?:(?!{NEXT_OWNER}).)*?"
    )
    others = "|".join(_pattern_without_apostrophe(re.escape(one)) for one in owners if one)
    outside = rf"^(?:(?!{others}).)*?" if others else ""
    place = rf"(?<![\w.]){_pattern_without_apostrophe(re.escape(owner))}{inside}" if owner else outside
    return [
        one + VALUE
        for one in (text_before, BOUNDARY + text_before, apart + text_before, place + apart + text_before)
    ]


def _positions_of_matches(pattern: str, lines: list[str]) -> list[Place]:
    """Return where a pattern takes a number, as it reads the output of a script."""
    wide = pattern_with_wider_numbers(pattern)
    return [
        (row, found.end(1) - len(found[1].lstrip()))
        for row, line in enumerate(lines)
        for found in wide.finditer(line)
    ]


def _pattern_without_apostrophe(pattern: str) -> str:
    """Return a pattern of the same meaning that needs no escape within a shell's apostrophes."""
    return pattern.replace("'", r"\x27")


def _metric_option_text(name: str, pattern: str | None = None) -> str:
    goal = known_metric_direction(name) or "MAX-OR-MIN"
    short = re.sub(r"[:=]", "_", name)[:40].strip()
    return f"--metric {shlex.quote(f'{short}:{goal}' + (f'={pattern}' if pattern else ''))}"
