"""What a step costs in the formats of the backend `gemm`, as ratios to a step of native:bf16.

    python benchmarks/formats.py [--widths 128,256] [--rounds 7] [--out docs/benchmarks/formats]

Transformers of 4 layers (`small_lm.py`), 16 rows of 64 symbols, AdamW. All arms take turns in one process, one step
each in random order, on the CPU clock with one thread; a ratio is taken within a round, and shown is the median with
the range. Each step runs as in a cell of `compare`: where the processor has no instructions for bf16, products of bf16
are computed in fp32. `own kernels` is bf16 as torch computes it on this processor without that. Goals: at most 4 times
native:bf16, 5 with all switches. `a/a` is native:bf16 again, the noise.
"""

import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import click
import torch
from harness import load, make_table, ratios, take_turns, write_results
from small_lm import SmallLM, Text
from torch.nn import functional as F

from ampcompare.training.precision.base import make_precision
from ampcompare.training.precision.cpu_half import choose_cpu_half_mode_and_context, has_bf16_instructions

BASE = "native:bf16"
SWITCHES = "sr,rht,tiles"
ARMS = {
    BASE: BASE,
    "a/a": BASE,
    "fp32": "fp32",
    **{
        arm: arm
        for arm in (
            *("gemm:bf16,keep=none", "gemm:fp8_tensorwise"),
            *("gemm:fp8_rowwise", "gemm:fp8_blockwise", "gemm:mxfp8"),
            *(
                "gemm:mxfp4",
                "gemm:nvfp4",
                f"gemm:mxfp8,{SWITCHES}",
                f"gemm:mxfp4,{SWITCHES}",
                f"gemm:nvfp4,{SWITCHES}",
            ),
        )
    },
    "own kernels": BASE,
}
BATCH = 16
LAYERS = 4


def block(name: str, width: int, text: Text) -> Callable[[], None]:
    """Return a step of an arm."""
    torch.manual_seed(0)
    model: Any = SmallLM(text.letters, width, LAYERS)
    precision = make_precision(ARMS[name])
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    (model,), (optimizer,) = precision.prepare([model], [optimizer])
    x, y = text.draw(torch.Generator().manual_seed(0), BATCH)

    def context() -> AbstractContextManager[Any]:
        if name in ("fp32", "own kernels"):
            return nullcontext()
        return choose_cpu_half_mode_and_context("auto", torch.bfloat16, torch.device("cpu"))[1]

    def step() -> None:
        with context():
            with precision.autocast():
                loss = F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())
            optimizer.zero_grad()
            precision.backward(loss, [optimizer])
            precision.step(optimizer)

    return step


def measure(width: int, rounds: int, text: Text) -> dict[str, Any]:
    """Time a step of each arm in each round."""
    blocks = {name: block(name, width, text) for name in ARMS}
    for one in blocks.values():
        one()
    seconds = take_turns(blocks, rounds)
    return {
        "width": width,
        "milliseconds": {name: 1e3 * statistics.median(times) for name, times in seconds.items()},
        "ratios": {name: ratios(seconds, name, BASE) for name in blocks if name != BASE},
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return the table of the page."""
    shown = []
    for name in ARMS:
        line = [name]
        for row in rows:
            found = row["ratios"].get(name)
            line.append(f"{row['milliseconds'][name]:.0f}")
            line.append(
                f"{statistics.median(found):.2f} ({min(found):.2f}-{max(found):.2f})" if found else "1"
            )
        shown.append(line)
    headers = ["arm"]
    for row in rows:
        headers += [f"width {row['width']}, ms", "over native:bf16"]
    return make_table(shown, headers)


@click.command(help=(__doc__ or "").partition("\n")[0])
@click.option("--widths", default="128,256", show_default=True)
@click.option("--rounds", default=7, show_default=True)
@click.option("--out", default=None, help="write OUT.json and OUT.md")
def main(widths: str, rounds: int, out: str | None) -> None:
    """Measure, and print the table."""
    torch.set_num_threads(1)
    text = Text()
    rows = [measure(int(width), rounds, text) for width in widths.split(",")]
    click.echo(table(rows))
    if out is not None:
        kind = "with" if has_bf16_instructions() else "without"
        chip = f"{torch.backends.cpu.get_cpu_capability()} {kind} bf16 instructions"
        facts = f"torch {torch.__version__}, one thread, {chip}, {rounds} rounds, {load()}"
        write_results(out, "Cost of formats", __doc__, facts, table(rows), {"rows": rows})


if __name__ == "__main__":
    main()
