"""Whether `profile` names planted causes of lost time and memory, and gives no reason in healthy trainings.

    python benchmarks/profile_causes.py [--only TEXT] [--note TEXT] [--out docs/benchmarks/profile]

A training of `planted_causes.py` is right if the first reason is the planted one (the emulation of 16 bits on a CPU
is no reason of the training, and is left out). A healthy one is right if there is none. Step off: by how much the parts
of a step differ from its time. Workspace: share of the peak of memory that operations use inside, which no tensor of
the training holds; the other parts are weights, gradients, activations and so on. Those held out were written after
the thresholds were set, and changed none.
"""

import os
import platform
from pathlib import Path
from typing import Any

import click
import torch
from harness import ROOT, write_results
from planted_causes import HEALTHY, HELD_OUT_HEALTHY, HELD_OUT_PLANTED, PLANTED, Training
from tabulate import tabulate

import ampcompare
from ampcompare.results.records.profile import ArmProfile, MemoryAtPeak

os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
KINDS = {
    "planted": PLANTED,
    "healthy": HEALTHY,
    "planted, held out": HELD_OUT_PLANTED,
    "healthy, held out": HELD_OUT_HEALTHY,
}
HEADERS = ("training", "arm", "planted", "first reason", "others", "step off %", "workspace %", "right")


def profile_training(training: Training) -> ArmProfile:
    """Return the profile of the arm of a training."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"device": "cpu", **training.settings}
    found = ampcompare.profile(training.loop, arms=[training.arm], steps=6, profiled_steps=2, **options)
    return found.arms[0]


def workspace(memory: MemoryAtPeak) -> int:
    """Return the bytes at the peak that no tensor of the training holds."""
    return abs(memory.rest_bytes)


def row_of(training: Training) -> dict[str, Any]:
    """Return what `profile` says of a training."""
    found = profile_training(training)
    reasons = [reason for reason in found.reasons if reason.kind != "emulation"]
    kinds = [reason.kind for reason in reasons]
    memory = found.memory
    return {
        "training": training.name,
        "arm": training.arm,
        "planted": training.expected[0] if training.expected else "",
        "first reason": kinds[0] if kinds else "",
        "others": ", ".join(kinds[1:]),
        "step off %": round(100 * abs(found.accounted_seconds / found.seconds - 1), 2),
        "workspace %": None if memory is None else round(100 * workspace(memory) / memory.measured_bytes, 1),
        "right": kinds[0] in training.expected
        if training.expected and kinds
        else kinds == list(training.expected),
        "text": reasons[0].text if reasons else "",
    }


def table(found: list[dict[str, Any]]) -> str:
    """Return the table of a kind; where all are right, the first reason is the planted one, and there is one column.

    Healthy trainings that are all right are a sentence with the largest figures.
    """
    if all(row["right"] and not row["planted"] for row in found):
        off, inside = (max(row[name] or 0 for row in found) for name in ("step off %", "workspace %"))
        return f"Step off by at most {off} %, workspace at most {inside} %; each training is in the JSON."
    rows = [{name: row[name] for name in HEADERS} for row in found]
    if all(row["right"] for row in rows):
        rows = [
            {name: value for name, value in row.items() if name not in ("first reason", "right")}
            for row in rows
        ]
    shown = [name for name in rows[0] if any(row[name] not in ("", None) for row in rows)]
    text: str = tabulate([[row[name] for name in shown] for row in rows], headers=shown, tablefmt="github")
    return text


@click.command()
@click.option("--only", default="", help="trainings with this text in their name")
@click.option("--note", default="", help="about the machine")
@click.option("--out", type=click.Path(path_type=Path), default=None, help="files without suffix")
def main(only: str, note: str, out: Path | None) -> None:
    """Profile the planted causes and the healthy trainings."""
    torch.set_num_threads(1)
    parts, rows = [], {}
    for kind, trainings in KINDS.items():
        found = []
        for training in trainings:
            if only in training.name:
                found.append(row_of(training))
                click.echo(f"{found[-1]}")
        if not found:
            continue
        rows[kind] = found
        right = sum(row["right"] for row in found)
        parts.append(f"{kind}: {right} of {len(found)} right")
        parts.append(table(found))
    click.echo("\n\n".join(parts))
    if out is not None:
        machine = f"torch {torch.__version__}, one thread, {platform.machine()}{f', {note}' if note else ''}"
        write_results(str(out), "Which causes profile finds", __doc__, machine, "\n\n".join(parts), rows)


if __name__ == "__main__":
    main()
