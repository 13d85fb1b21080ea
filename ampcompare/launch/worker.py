"""What happens inside the process of a cell: train, and write steps and record beside each other.

`python -m ampcompare.launch.worker FOLDER` trains the configuration that lies in FOLDER.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ampcompare.config import RunConfig, validated
from ampcompare.environment import fingerprint
from ampcompare.errors import AmpCompareError, EnvironmentUnfit
from ampcompare.launch.base import Progress, write_record
from ampcompare.launch.machine import MachineWatch
from ampcompare.parallel.single import Single
from ampcompare.precision.cpu_half import cpu_half
from ampcompare.precision.factory import make_precision
from ampcompare.record import EpochResult, RunRecord, dump_json
from ampcompare.training.assemble import assemble, make_task
from ampcompare.training.measure import make_memory_meter
from ampcompare.training.session import Session
from ampcompare.training.summary import Tally

__all__ = ["resolve_device", "run_cell"]


def resolve_device(name: str) -> torch.device:
    """Return the device for "auto", "cpu", "cuda" or "cuda:INDEX".

    Raises:
        EnvironmentUnfit: CUDA was asked for and is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            built = "this torch is built without CUDA" if torch.version.cuda is None else "torch sees no GPU"
            raise EnvironmentUnfit(
                f"device {name} was asked for and {built}; use --device cpu, or install torch for CUDA"
            )
        if device.index is not None and device.index >= torch.cuda.device_count():
            raise EnvironmentUnfit(
                f"device {name} was asked for and there are {torch.cuda.device_count()} GPUs, from cuda:0"
            )
    return device


def run_cell(
    config: RunConfig,
    folder: Path,
    on_progress: Callable[[Progress], None] | None = None,
) -> RunRecord:
    """Train one cell in this process; write `config.json`, `steps.jsonl` and `record.json` to `folder`.

    Errors of the user's code, of torch and of this package end in a record with status "failed".
    """
    (folder / "config.json").write_text(dump_json(config), encoding="utf-8")
    try:
        record = _train(config, folder, on_progress)
    except torch.OutOfMemoryError as error:
        traceback.print_exc()
        record = _failed(config, f"out of memory: {_first_line(error)}")
    except AmpCompareError as error:
        traceback.print_exc()
        record = _failed(config, str(error), exit_code=error.exit_code)
    except Exception as error:  # whatever a user's model raises is the row of this arm, and the others go on
        traceback.print_exc()
        record = _failed(config, f"{type(error).__name__}: {_first_line(error)}")
    write_record(record, folder)
    return record


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]


def _failed(config: RunConfig, error: str, exit_code: int = 3) -> RunRecord:
    environment = {**fingerprint(), "exit_code": exit_code}
    return RunRecord(
        cell=config.digest(), arm=config.arm, status="failed", config=config, error=error, environment=environment
    )


def _train(config: RunConfig, folder: Path, on_progress: Callable[[Progress], None] | None) -> RunRecord:
    begin = time.perf_counter()
    device = resolve_device(config.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(config.threads)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    sys.path.insert(0, os.getcwd())  # a user's `module:factory` lives beside them
    precision = make_precision(config.arm, device=str(device))
    task = make_task(config.recipe)
    meter = make_memory_meter(device)
    assembly = assemble(config.recipe, task, precision, Single(), device, workers=config.workers)
    session = Session(config, assembly)
    tally = Tally(config.warmup_steps, config.recipe.batch_size)
    how, context = cpu_half(config.cpu_half, precision.half_dtype, device)
    machine = MachineWatch(device)
    with context, (folder / "steps.jsonl").open("w", encoding="utf-8") as steps:
        for event in session.events():
            if isinstance(event, EpochResult):
                tally.epochs.append(event)
                continue
            tally.add_steps(event)
            machine.look()
            steps.writelines(dump_json(record, indent=None) + "\n" for record in event)
            steps.flush()
            if on_progress is not None:
                on_progress(Progress(tally.num_steps, assembly.total_steps, event[-1].epoch))
    summary = tally.summary(session.watch, meter.peak(), time.perf_counter() - begin)
    return RunRecord(
        cell=config.digest(),
        arm=config.arm,
        status="diverged" if summary.diverged_step is not None else "completed",
        config=config,
        engine=precision.engine,
        half=how,
        environment={**fingerprint(), **_device_facts(device, config)},
        summary=summary,
        trace=tally.tracer.trace(tally.seconds),
        readings=machine.readings(tally.seconds),
    )


def _device_facts(device: torch.device, config: RunConfig) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "device": str(device),
        "threads": config.threads,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
        "NVIDIA_TF32_OVERRIDE": os.environ.get("NVIDIA_TF32_OVERRIDE"),
    }
    if device.type == "cuda":
        facts |= {
            "device_name": torch.cuda.get_device_name(device),
            "capability": list(torch.cuda.get_device_capability(device)),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "tf32_matmul": torch.backends.cuda.matmul.allow_tf32,
            "tf32_convolution": torch.backends.cudnn.allow_tf32,
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
        }
    else:
        facts["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
    return facts


def main(arguments: list[str]) -> int:
    """Train the cell whose `config.json` lies in the folder named; the exit code is 0 once a record is written."""
    folder = Path(arguments[0])
    run_cell(validated(RunConfig, json.loads((folder / "config.json").read_text(encoding="utf-8"))), folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
