"""Tail loss of a small language model in each format, less that in bf16, over seeds.

    python benchmarks/formats_table.py [--seeds 5] [--steps 200] [--rows FILE] [--out docs/benchmarks/formats_table]

Trains `small_lm.py`'s network through ampcompare's own arms, as `compare -- benchmarks/small_lm.py` does: the network
has 2 layers of width 64, and reads characters of Python's help topics. Tail loss is the mean over the last fifth of
the steps. Arms are paired with bf16 by seed: weights, batches and their order are equal. `twin` is bf16 from weights
changed by one part in 512, as `compare --twin`: no gap as small as its gap is one. FILE keeps finished trainings.
"""

import json
import statistics
from pathlib import Path
from typing import Any

import click
import torch
from harness import load, make_table, write_results
from small_lm import SmallLM, Text
from torch.nn import functional as F

from ampcompare.training.precision.base import make_precision
from ampcompare.training.precision.cpu_half import choose_cpu_half_mode_and_context
from ampcompare.training.twin import perturb_weights

BASE = "gemm:bf16,keep=none"
TWIN = "twin"
ARMS = (
    *(BASE, "gemm:mxfp8", "gemm:nvfp4", "gemm:mxfp4", TWIN, "gemm:nvfp4,keep=none"),
    *("gemm:bf16,fprop=nvfp4", "gemm:bf16,dgrad=nvfp4", "gemm:bf16,wgrad=nvfp4"),
    *("gemm:fp8_tensorwise", "gemm:fp8_tensorwise,grads_as=e4m3", "gemm:nvfp4,sr,rht,tiles"),
    *("gemm:mxfp4,scale=rceil", "gemm:mxfp4,scale=even"),
    *("gemm:mxfp8,scale=floor", "gemm:mxfp8,grads_as=e5m2"),
    *("gemm:nvfp4,tiles", "gemm:nvfp4,rht", "gemm:nvfp4,sr"),
    *("gemm:fp8_rowwise", "gemm:fp8_blockwise", "native:bf16"),
)
TAIL = 5
RATE = 3e-3
BATCH = 8


def train(arm: str, seed: int, steps: int, text: Text) -> float:
    """Return the tail loss of one training."""
    torch.manual_seed(seed)
    model: Any = SmallLM(text.letters)
    if arm == TWIN:
        perturb_weights(model.parameters())
    precision = make_precision(BASE if arm == TWIN else arm)
    optimizer: Any = torch.optim.AdamW(model.parameters(), RATE, betas=(0.9, 0.95), weight_decay=0.1)
    (model,), (optimizer,) = precision.prepare([model], [optimizer])
    plan = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(1000 + seed)
    losses = []
    # `gemm` multiplies in fp32 itself: nothing is left to emulate
    how = "auto" if arm == "native:bf16" else "native"
    with choose_cpu_half_mode_and_context(how, torch.bfloat16, torch.device("cpu"))[1]:
        for _ in range(steps):
            x, y = text.draw(generator, BATCH)
            with precision.autocast():
                loss = F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())
            optimizer.zero_grad()
            precision.backward(loss, [optimizer])
            precision.step(optimizer)
            plan.step()
            losses.append(loss.item())
    return statistics.mean(losses[-max(1, steps // TAIL) :])


def table(rows: list[dict[str, Any]]) -> str:
    """Return gaps to bf16 in units of 1e-4 nats, mean and standard error over seeds."""
    tails = {(row["arm"], row["seed"]): row["tail"] for row in rows}
    base = {seed: tail for (arm, seed), tail in tails.items() if arm == BASE}
    shown = []
    for arm in ARMS[1:]:
        gaps = [
            1e4 * (tail - base[seed])
            for (name, seed), tail in sorted(tails.items())
            if name == arm and seed in base
        ]
        if gaps:
            error = f"{statistics.stdev(gaps) / len(gaps) ** 0.5:.1f}" if len(gaps) > 1 else "unknown"
            shown.append(
                [arm, len(gaps), f"{statistics.mean(gaps):+.1f}", error, sum(gap > 0 for gap in gaps)]
            )
    between = statistics.stdev(base.values()) if len(base) > 1 else float("nan")
    headers = ["arm", "seeds", "tail loss less that of bf16, 1e-4 nats", "standard error", "seeds above bf16"]
    return (
        f"Tail loss of {BASE}: {statistics.mean(base.values()):.4f} nats, standard deviation between seeds "
        f"{1e4 * between:.0f}e-4.\n\n{make_table(shown, headers)}"
    )


@click.command(help=(__doc__ or "").partition("\n")[0])
@click.option("--seeds", default=5, show_default=True)
@click.option("--steps", default=200, show_default=True)
@click.option(
    "--rows", default="formats_table.jsonl", show_default=True, help="finished trainings, continued"
)
@click.option("--out", default=None, help="write OUT.json and OUT.md")
def main(seeds: int, steps: int, rows: str, out: str | None) -> None:
    """Train what is missing, seed by seed, and print the table."""
    torch.set_num_threads(1)
    path, text = Path(rows), Text()
    found = (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    )
    found = [row for row in found if row["steps"] == steps]
    done = {(row["arm"], row["seed"]) for row in found}
    for seed, arm in ((seed, arm) for seed in range(seeds) for arm in ARMS):
        if (arm, seed) not in done:
            found.append({"arm": arm, "seed": seed, "steps": steps, "tail": train(arm, seed, steps, text)})
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found[-1]) + "\n")
            click.echo(f"{arm}, seed {seed}: {found[-1]['tail']:.4f}", err=True)
    click.echo(table(found))
    if out is not None:
        chip = torch.backends.cpu.get_cpu_capability()
        facts = f"torch {torch.__version__}, one thread, {chip}, {load()}"
        write_results(out, "Formats on a small language model", __doc__, facts, table(found), {"rows": found})


if __name__ == "__main__":
    main()
