"""How fast lint is, and how many findings of each code it has in folders of source.

    python benchmarks/lint.py FOLDER...

Each folder is examined once, in this process, on one core; seconds are those of the CPU. A file without a word such as
`apex`, `autocast` or `scaler` is read and not parsed.
"""

import sys
import time
from collections import Counter
from pathlib import Path

from tabulate import tabulate

from ampcompare.source.find import find_sources
from ampcompare.source.lint.check import is_of_interest
from ampcompare.source.lint.run import Selection, lint_files


def measure(folder: Path) -> tuple[list[object], Counter[str]]:
    """Return the row of a folder, and its findings by code."""
    files = list(find_sources([folder]))
    lines = parsed = 0
    for file in files:
        text = file.read_text(encoding="utf-8", errors="replace")
        lines += text.count("\n")
        parsed += text.count("\n") if is_of_interest(text) else 0
    began = time.process_time()
    report = lint_files(files, Selection())
    seconds = time.process_time() - began
    codes = Counter(finding.code for finding in report.findings)
    speed = round(lines / seconds, -3)
    row = [folder.name, len(files), lines, parsed, f"{seconds:.1f}", f"{speed:,.0f}", codes.total(), len(report.unread)]
    return row, codes


def main(folders: list[str]) -> None:
    """Print the table of folders and the counts of codes."""
    measured = [measure(Path(folder)) for folder in folders]
    heads = ["folder", "files", "lines", "parsed", "s", "lines/s", "findings", "unread"]
    print(tabulate([row for row, _ in measured], headers=heads, tablefmt="github"))
    total = sum((codes for _, codes in measured), Counter[str]())
    print(", ".join(f"{code} {count}" for code, count in sorted(total.items())))


if __name__ == "__main__":
    main(sys.argv[1:])
