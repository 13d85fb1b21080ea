"""Start a script once per GPU, with `--world-size N --rank i` added to its arguments.

    python -m apex.parallel.multiproc [--world-size N] script.py [arguments]

`--world-size` can be one of the script's arguments instead; without it N is the number of visible GPUs. Rank 0 writes
to the console, rank i to `GPU_<i>.log` in the working directory. When one process fails the others are ended, and its
exit code is returned.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

__all__ = ["main", "split_arguments"]

POLL_SECONDS = 0.1
GRACE_SECONDS = 5.0


def split_arguments(arguments: Sequence[str]) -> tuple[int | None, list[str]]:
    """Return the world size that `arguments` name, or None, and the script with its arguments without sizes and ranks.

    Raises:
        ValueError: a size that is not a positive integer.
    """
    world_size: int | None = None
    script_args: list[str] = []
    pending = iter(arguments)
    for argument in pending:
        name, equals, value = argument.partition("=")
        if name not in {"--world-size", "--rank"}:
            script_args.append(argument)
            continue
        value = value if equals else next(pending, "")
        if name == "--world-size":
            if not value.isdecimal() or int(value) < 1:
                raise ValueError(f"--world-size must be a positive integer, got {value!r}")
            world_size = int(value)
    return world_size, script_args


def main(arguments: Sequence[str]) -> int:
    """Run one process per rank and return the exit code: 0, or that of the first process that failed."""
    try:
        world_size, command = split_arguments(arguments)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if world_size is None:
        world_size = torch.cuda.device_count()
    if world_size == 0 or not command:
        reason = "no script given" if not command else "no GPU is visible: give --world-size N"
        print(
            f"{reason}\nusage: python -m apex.parallel.multiproc [--world-size N] script.py [arguments]",
            file=sys.stderr,
        )
        return 2
    with contextlib.ExitStack() as stack:
        workers = []
        for rank in range(world_size):
            log = None if rank == 0 else stack.enter_context(Path(f"GPU_{rank}.log").open("w", encoding="utf-8"))
            line = [sys.executable, *command, "--world-size", str(world_size), "--rank", str(rank)]
            workers.append(subprocess.Popen(line, stdout=log, stderr=None if log is None else subprocess.STDOUT))
        return _wait(workers)


def _wait(workers: list[subprocess.Popen[bytes]]) -> int:
    failed = 0
    try:
        codes: list[int | None] = [None]
        while not failed and None in codes:
            time.sleep(POLL_SECONDS)
            codes = [worker.poll() for worker in workers]
            failed = next((code for code in codes if code), 0)
    finally:
        # Those left wait for the one that is gone.
        for worker in workers:
            if worker.poll() is None:
                worker.terminate()
        for worker in workers:
            try:
                worker.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
    # A negative code names the signal that ended the process.
    return failed if failed >= 0 else 128 - failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
