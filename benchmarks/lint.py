"""How fast lint is, and how many findings of each code it has in folders of source.

    python benchmarks/lint.py FOLDER...

Each folder is examined once, by as many processes as `lint` takes. `s` is the time on the clock, `CPU s` that of all
processes. `parsed` counts the lines of files in which a rule may find something by their words; others are only read.
"""

import os
import sys
import time
from collections import Counter
from pathlib import Path

from tabulate import tabulate

from ampcompare.source.find import find_sources
from ampcompare.source.lint.check import rules_that_may_match
from ampcompare.source.lint.run import LintSelection, lint_files


def measure(folder: Path) -> tuple[list[object], Counter[str]]:
    """Return the row of a folder, and its findings by code."""
    files = list(find_sources([folder]))
    lines = parsed = 0
    for file in files:
        text = file.read_text(encoding="utf-8", errors="replace")
        lines += text.count("\n")
        parsed += text.count("\n") if file.suffix != ".pyi" and rules_that_may_match(text) else 0
    began, used = time.perf_counter(), sum(os.times()[:4])
    report = lint_files(files, LintSelection())
    seconds, used = time.perf_counter() - began, sum(os.times()[:4]) - used
    codes = Counter(finding.code for finding in report.findings)
    speed = round(lines / seconds, -3)
    times = f"{seconds:.1f}", f"{used:.1f}", f"{speed:,.0f}"
    row = [folder.name, len(files), lines, parsed, *times, codes.total(), len(report.unread)]
    return row, codes


def main(folders: list[str]) -> None:
    """Print the table of folders and the counts of codes."""
    measured = [measure(Path(folder)) for folder in folders]
    heads = ["folder", "files", "lines", "parsed", "s", "CPU s", "lines/s", "findings", "unread"]
    print(tabulate([row for row, _ in measured], headers=heads, tablefmt="github"))
    total = sum((codes for _, codes in measured), Counter[str]())
    print(", ".join(f"{code} {count}" for code, count in sorted(total.items())))


if __name__ == "__main__":
    main(sys.argv[1:])
