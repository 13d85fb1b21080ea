"""Run `ampcompare migrate` over files that are not of this repository, and print what came of each.

    python benchmarks/migrate_corpus.py [--rows] FOLDER...

No file is changed. With --rows a row per file that uses Apex: lines, uses of Apex before and after, lines left by hand,
notes. Then the sums: crashes, results that do not parse, second runs that change something, functions that clip scaled
gradients, lines per second of one core.
"""

import ast
import sys
import time
from collections import Counter

import click

from ampcompare.source.find import find_sources
from ampcompare.source.migrate.project import migrate_file
from ampcompare.source.migrate.read.finding import BY_HAND
from ampcompare.source.migrate.rewrite import migrate_text


def clips_scaled(text: str) -> bool:
    """Return whether a function steps a scaler and clips, but neither unscales nor scales the limit."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            names = {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
            source = ast.unparse(node)
            steps = "scaler.step(" in source or "scaler_" in source
            if (
                steps
                and "scale" in names
                and names & {"clip_grad_norm_", "clip_grad_value_"}
                and not names & {"unscale_", "get_scale"}
            ):
                return True
    return False


@click.command()
@click.argument("folders", nargs=-1, required=True)
@click.option("--rows", is_flag=True, help="print a row for each file")
def main(folders: tuple[str, ...], rows: bool) -> None:
    """Print the table and the sums; end with 1 where something crashed or does not parse."""
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    seconds = 0.0
    if rows:
        print("| file | lines | uses of Apex | left | by hand | notes |\n|---|---|---|---|---|---|")
    for path in find_sources(folders):
        begun = time.process_time()
        try:
            result = migrate_file(path)
        except Exception as error:  # what this program looks for
            counts["crashes"] += 1
            print(f"{path}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        seconds += time.process_time() - begun
        counts["files"] += 1
        if result.fault is not None:
            counts["not Python 3 or not readable"] += 1
        if result.migration is None or result.document is None:
            continue
        lines = result.document.text.count("\n")
        counts["lines"] += lines
        if not result.migration.uses:
            continue
        counts["files that use Apex"] += 1
        try:
            ast.parse(result.migration.text)
        except SyntaxError:
            counts["results that do not parse"] += 1
            continue
        counts["second runs that change something"] += (
            migrate_text(result.migration.text).text != result.migration.text
        )
        counts["functions that clip scaled gradients"] += result.is_changed and clips_scaled(
            result.migration.text
        )
        by_hand = [each for each in result.migration.findings if each.kind == BY_HAND]
        counts["files with a line left by hand"] += bool(by_hand)
        counts["files that still use Apex"] += bool(result.migration.left)
        counts["uses of Apex"] += result.migration.uses
        counts["uses left"] += result.migration.left
        counts["notes"] += len(result.migration.findings) - len(by_hand)
        reasons.update(each.message.partition(";")[0] for each in by_hand)
        if rows:
            uses, left = result.migration.uses, result.migration.left
            notes = len(result.migration.findings) - len(by_hand)
            print(f"| {path.name} | {lines} | {uses} | {left} | {len(by_hand)} | {notes} |")
    for name, count in counts.items():
        print(f"{name}: {count}")
    print(f"lines per second of one core: {counts['lines'] / max(seconds, 1e-9):,.0f}")
    for reason, count in reasons.most_common():
        print(f"  {count} x {reason}")
    sys.exit(1 if counts["crashes"] or counts["results that do not parse"] else 0)


if __name__ == "__main__":
    main()
