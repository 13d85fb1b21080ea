"""What benchmarks share: paths of this checkout, loops that take turns, fresh processes, and the files they leave."""

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import click
from tabulate import tabulate

__all__ = [
    "ROOT",
    "environment",
    "load",
    "make_table",
    "median_ratio",
    "ratios",
    "take_turns",
    "turns_command",
]
__all__ += ["write_results"]

ROOT = Path(__file__).resolve().parents[1]
Seconds = dict[str, list[float]]
Measure = Callable[[str, str, int], dict[str, Any]]


def environment() -> dict[str, str]:
    """Return the variables for a process that imports from this checkout."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


def take_turns(
    blocks: Mapping[str, Callable[[], object]],
    rounds: int,
    seed: int = 0,
    *,
    steps: int = 1,
    before: Callable[[str], object] = lambda name: None,
) -> Seconds:
    """Run every block once in each round, in random order.

    Args:
        steps: of a block.
        before: is called with the name of a block ahead of it, outside of the time.

    Returns:
        Seconds of CPU time of a step, by block and round.
    """
    shuffler = random.Random(seed)
    seconds: Seconds = {name: [] for name in blocks}
    for _ in range(rounds):
        for name in shuffler.sample(list(blocks), len(blocks)):
            before(name)
            begin = time.process_time_ns()
            blocks[name]()
            seconds[name].append((time.process_time_ns() - begin) / steps / 1e9)
    return seconds


def ratios(seconds: Seconds, name: str, base: str) -> list[float]:
    """Return the time of one block over that of another in the same round, for each round."""
    return [one / other for one, other in zip(seconds[name], seconds[base], strict=True)]


def median_ratio(seconds: Seconds, name: str, base: str) -> float:
    """Return the median of `ratios`."""
    return statistics.median(ratios(seconds, name, base))


def make_table(rows: Sequence[Any], headers: Sequence[str]) -> str:
    """Return rows as a table in Markdown, words as they are."""
    text: str = tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)
    return text


def load() -> str:
    """Return the number of cores and how busy they are."""
    return f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end"


def write_results(
    out: str | Path,
    title: str,
    about: str | None,
    facts: str,
    text: str,
    data: Mapping[str, Any] | None = None,
) -> None:
    """Write OUT.md, and OUT.json where there is data.

    Args:
        about: the docstring of the benchmark, which says what was done.
        facts: one line on machine and versions.
        text: tables and sentences, in Markdown.
    """
    page = f"# {title}\n\n```\n{about}```\n\n{facts}\n\n{text.rstrip()}\n"
    Path(f"{out}.md").write_text(page, encoding="utf-8")
    if data is not None:
        Path(f"{out}.json").write_text(json.dumps({"environment": facts, **data}) + "\n", encoding="utf-8")


def turns_command(
    script: str,
    title: str,
    about: str | None,
    measure: Measure,
    table: Callable[[list[dict[str, Any]]], str],
    *,
    models: str,
    arms: str,
    processes: int,
) -> click.Command:
    """Make the command of a benchmark whose loops take turns in one process, for several fresh processes.

    Args:
        script: the file that calls this; it is started again for each process.
        measure: is called with an arm, a model and a seed in a process of its own, and returns what JSON can hold.
        table: makes the text of the page from rows with `model`, `arm`, and `processes`: what `measure` returned.
    """

    @click.command(help=(about or "").partition("\n")[0])
    @click.option("--processes", default=processes, show_default=True, help="fresh processes per row")
    @click.option("--models", default=models, show_default=True)
    @click.option("--arms", default=arms, show_default=True)
    @click.option("--out", default=None, help="write OUT.json and OUT.md")
    @click.option("--page", is_flag=True, help="only write OUT.md again, from OUT.json")
    @click.option("--child", default=None, hidden=True)
    @click.option("--seed", default=0, hidden=True)
    def main(
        processes: int, models: str, arms: str, out: str | None, page: bool, child: str | None, seed: int
    ) -> None:
        import torch

        torch.set_num_threads(1)
        if page and out is not None:
            stored = json.loads(Path(f"{out}.json").read_text(encoding="utf-8"))
            write_results(out, title, about, stored["environment"], table(stored["rows"]))
            return
        if child is not None:
            print(json.dumps(measure(child, models, seed)))
            return
        rows = []
        for model in models.split(","):
            for arm in arms.split(","):
                found = [_in_fresh_process(script, arm, model, number) for number in range(processes)]
                rows.append({"model": model, "arm": arm, "processes": found})
        click.echo(table(rows))
        if out is not None:
            chip = torch.backends.cpu.get_cpu_capability()
            facts = f"torch {torch.__version__}, one thread, {chip}, {processes} processes, {load()}"
            write_results(out, title, about, facts, table(rows), {"rows": rows})

    return main


def _in_fresh_process(script: str, arm: str, model: str, seed: int) -> dict[str, Any]:
    command = [sys.executable, script, "--child", arm, "--models", model, "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise click.ClickException(f"{arm} on {model} failed: {done.stderr.strip().splitlines()[-1]}")
    click.echo(f"{arm} on {model}, process {seed + 1}", err=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result
