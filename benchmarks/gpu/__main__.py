"""`scripts/gpu-check`: run the parts, show a line for each, write their figures, and end with 1 where one failed."""

import importlib
import importlib.util
import math
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

import click

from benchmarks.gpu.context import PART_SECONDS, Context
from benchmarks.gpu.report import Report, environment

PARTS = (
    *("smoke", "tasks", "scripts", "tests", "golden", "syncs"),
    *("profile", "speed", "memory", "resume", "comparisons"),
)
LEAST_SECONDS = 20.0  # that a part is begun with
# What `setup.py` asks for, by the names of import, and the runner of tests.
NEEDED = (
    *("torch", "torchvision", "numpy", "scipy", "sklearn", "tabulate", "yaml", "pydantic", "psutil"),
    *("safetensors", "xxhash", "pytest", "rich", "filelock"),
)


@click.command()
@click.option(
    "--part",
    "parts",
    type=click.Choice(PARTS),
    multiple=True,
    help="Repeat it.  [default: all, in order]",
)
@click.option("--out", default="runs/gpu-check", show_default=True, help="Folder for PART.json.")
@click.option("--rehearse", is_flag=True, help="The same on the CPU, small: shows that the programs work.")
@click.option(
    "--minutes", type=click.FloatRange(min=1), help="For all parts together.  [default: 8.5 for each]"
)
@click.option(
    "--apex-src", envvar="APEX_SRC", help="Folder that holds apex/ of Apex 25.05; Python alone is enough."
)
def main(
    parts: tuple[str, ...], out: str, rehearse: bool, minutes: float | None, apex_src: str | None
) -> None:
    """Check ampcompare on one NVIDIA GPU, in parts of less than nine minutes; each ends with one line.

    Exit codes: 0 all checks held; 1 one did not; 2 usage; 4 there is no GPU, or a package is missing.
    """
    source = None if apex_src is None else Path(apex_src).resolve()
    if source is not None and not (source / "apex" / "amp").is_dir():
        raise click.UsageError(
            f"--apex-src {apex_src}: there is no apex/amp in it; give the folder that holds apex/"
        )
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        click.echo(
            f"gpu-check: {sys.executable} has no {', '.join(missing)}: carry their wheels in a folder and name it with "
            "--wheels, or name another interpreter with PYTHON=/path/to/python",
            err=True,
        )
        sys.exit(4)
    if rehearse:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    where = _device(rehearse)
    held = True
    facts = environment(where, rehearse)
    end = math.inf if minutes is None else time.monotonic() + 60 * minutes
    for part in parts or PARTS:
        report = Report(part, folder=Path(out), facts=facts)
        seconds = min(PART_SECONDS, end - time.monotonic())
        if seconds > LEAST_SECONDS:
            _run(report, rehearse, source, seconds)
        else:
            report.leave_out("everything (no time left)")
        report.write()
        click.echo(report.line(f"{where}, a rehearsal" if rehearse else where))
        held = held and report.passes
    sys.exit(0 if held else 1)


def _device(rehearse: bool) -> str:
    """Return the name of the device; end with 4 where it cannot be used."""
    import torch

    if rehearse:
        return "CPU"
    if not torch.cuda.is_available():
        # Only children use CUDA; this process may ask.
        click.echo(
            f"gpu-check: torch {torch.__version__} finds no CUDA device here; --rehearse runs the parts on the CPU",
            err=True,
        )
        sys.exit(4)
    return torch.cuda.get_device_name()


def _run(report: Report, rehearse: bool, apex_src: Path | None, seconds: float) -> None:
    with tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as scratch:
        context = Context(rehearse, Path(scratch), apex_src, time.monotonic() + seconds)
        try:
            importlib.import_module(f"benchmarks.gpu.{report.part}").run(context, report)
        except Exception as error:
            traceback.print_exc()
            report.check("the part ran to its end", False, f"{type(error).__name__}: {error}")
    report.finished = True


if __name__ == "__main__":
    main()
