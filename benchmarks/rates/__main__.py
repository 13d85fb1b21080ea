"""Run a study of error rates, print its tables, and write its JSON and its page.

python -m benchmarks.rates order [--replicates N] [--part NAME] [--jobs 2] [--out docs/benchmarks/order]
"""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import click
from tabulate import tabulate

from benchmarks.rates.study import run, write

STUDIES = ("verdicts", "loss_curve", "order", "new_images", "gates", "aa")


@click.command()
@click.argument("name", type=click.Choice(STUDIES))
@click.option("--part", "parts", multiple=True, help="A table of it.  [default: all]")
@click.option("--replicates", type=int, help="Comparisons that are drawn, or trained, for a cell.")
@click.option(
    "--jobs", default=1, show_default=True, help="Processes, where each cell has random numbers of its own."
)
@click.option("--out", help="Write OUT.json and OUT.md; tables that did not run stay as they are.")
@click.option("--page", is_flag=True, help="Only write OUT.md again, from OUT.json.")
def main(
    name: str, parts: Sequence[str], replicates: int | None, jobs: int, out: str | None, page: bool
) -> None:
    """Draw comparisons again and again, and count what the verdicts on them say."""
    if page:
        if out is None:
            raise click.UsageError("--page needs --out")
        write(name, json.loads(Path(f"{out}.json").read_text(encoding="utf-8")), out)
        return
    begin = time.monotonic()
    data = run(name, parts, replicates, jobs)
    for table, rows in data["tables"].items():
        click.echo(
            f"## {table}\n\n{tabulate(rows, headers='keys', tablefmt='github', disable_numparse=True)}\n"
        )
    click.echo("\n".join([*data.get("notes", []), f"{time.monotonic() - begin:.0f} s"]))
    if out is not None:
        write(name, data, out)


if __name__ == "__main__":
    main()
