"""What is lost when a run that saves is killed: SIGKILL at random moments, during writes too, then the same run again.

    python benchmarks/kill.py [--runs 100] [--seed 0] [--out docs/benchmarks/kill]

Each run trains a small network for 24 steps, with an average, clipping and accumulation, and saves after every second
one. It is killed once, at a moment drawn evenly from the time that an undisturbed run takes, and resumed from its
newest checkpoint to the end. A pause in every write, sync and rename of a checkpoint lets many kills meet one at work;
a byte of shared memory says what the run was doing. Nothing older than the last complete save may be lost; at the end
every recorded step and all that the last checkpoint holds must be that of the undisturbed run to the last bit, with no
step missing or twice.
"""

import mmap
import os
import random
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import click
import torch
from harness import load, make_table, write_results

from ampcompare.base.tensors.tree import first_difference_text
from ampcompare.checkpoints.store import file
from ampcompare.checkpoints.store.folder import CheckpointFolder
from ampcompare.experiment.launch.worker.cell import train_cell_and_write_record
from ampcompare.results.records.run import RunRecord, read_record
from ampcompare.results.records.step import iter_steps
from ampcompare.settings.config import RunConfig
from ampcompare.training.checkpoint.saver import CheckpointSaver

ARMS = (
    "fp32",
    "apex:O1,engine=compat",
    "apex:O2,engine=compat",
    "native:fp16,growth_interval=5",
    "half:loss_scale=128",
)
STEPS = 24
PHASES = ("training", "writing", "syncing", "renaming", "tidying")
APART = ("seconds", "data_seconds", "train_seconds", "eval_seconds", "resumed")
WRITE_PAUSE, SYNC_PAUSE, RENAME_PAUSE = 0.0002, 0.004, 0.004
PHASE, STEP = 0, 1


def _config(arm: str, **saving: Any) -> RunConfig:
    recipe = {
        "data": {"name": "synthetic", "train_size": 192, "val_size": 32, "image_size": 8},
        "model": {"arch": "mlp", "args": {"width": 16}},
        "batch_size": 16,
        "epochs": STEPS // 12,
        "grad_accum_steps": 2,
        "clip_grad": 1.0,
        "ema_decay": 0.9,
    }
    values = {
        "recipe": recipe,
        "arm": arm,
        "drain_every": 1,
        "device": "cpu",
        "saving": {"every_steps": 2, **saving},
    }
    return RunConfig.model_validate(values)


def _slow_down(shared: mmap.mmap) -> None:
    """Pause in every part of a save of this process, and say in shared memory which part is at work."""
    write, sync, rename, save = (
        file._HashingWriter.write,
        os.fsync,
        os.replace,
        CheckpointSaver.save_run_unless_saved,
    )

    def slow_write(self: Any, data: Any) -> int:
        time.sleep(WRITE_PAUSE)
        return write(self, data)

    def slow_sync(descriptor: int) -> None:
        saving, shared[PHASE] = shared[PHASE], PHASES.index("syncing") if shared[PHASE] else 0
        time.sleep(SYNC_PAUSE)
        sync(descriptor)
        shared[PHASE] = saving

    def slow_rename(source: Any, target: Any, **options: Any) -> None:
        saving, shared[PHASE] = shared[PHASE], PHASES.index("renaming") if shared[PHASE] else 0
        time.sleep(RENAME_PAUSE)
        rename(source, target, **options)
        time.sleep(RENAME_PAUSE)
        shared[PHASE] = PHASES.index("tidying") if saving else 0

    def noted_save(self: CheckpointSaver, position: Any, state: Any, **options: Any) -> None:
        shared[PHASE] = PHASES.index("writing")
        save(self, position, state, **options)
        shared[STEP] = position.step
        shared[PHASE] = 0

    file._HashingWriter.write, os.fsync, os.replace = slow_write, slow_sync, slow_rename  # type: ignore[method-assign]
    CheckpointSaver.save_run_unless_saved = noted_save  # type: ignore[method-assign]


def _fork_run(config: RunConfig, folder: Path, shared: mmap.mmap) -> int:
    """Start a run and return its process id."""
    folder.mkdir(parents=True, exist_ok=True)
    shared[PHASE], shared[STEP] = 0, 0
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        _slow_down(shared)
        record = train_cell_and_write_record(config, folder)
        code = 0 if record.status == "completed" else 1
    finally:
        os._exit(code)


def _wait_for(child: int, seconds: float) -> bool:
    """Wait for the end of a process, so long at most; return whether it came."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if os.waitpid(child, os.WNOHANG)[0]:
            return True
        time.sleep(0.0005)
    return False


class Undisturbed:
    """What a run comes to that nobody kills."""

    def __init__(self, arm: str, folder: Path, shared: mmap.mmap) -> None:
        begin = time.monotonic()
        child = _fork_run(_config(arm), folder, shared)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            raise click.ClickException(f"the undisturbed run of {arm} failed, see {folder}")
        self.seconds = time.monotonic() - begin
        self.steps = _steps(folder)
        self.state = _newest(folder)

    def difference(self, folder: Path) -> str:
        """Return in what the run of a folder differs; "" where it does not."""
        if _steps(folder) != self.steps:
            return "steps.jsonl"
        return first_difference_text(self.state, _newest(folder), ignored_keys=APART)


def _steps(folder: Path) -> list[str]:
    return [repr(step._replace(seconds=0.0, data_seconds=0.0)) for step in iter_steps(folder / "steps.jsonl")]


def _newest(folder: Path) -> dict[str, Any]:
    found = CheckpointFolder(folder / "checkpoints").read_newest_path_state_and_notes()
    return {} if found is None else found[1]


def _kill_run(
    arm: str, folder: Path, seconds: float, moments: random.Random, shared: mmap.mmap
) -> tuple[float, str, int]:
    """Kill a run; return when, what it was doing, and after how many updates its last save was complete."""
    while True:
        after = moments.uniform(0, seconds)
        child = _fork_run(_config(arm), folder, shared)
        if _wait_for(child, after):  # it was faster than the one that the moments are drawn for
            continue
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return after, PHASES[shared[PHASE]], shared[STEP]


def _gone_on(arm: str, folder: Path, shared: mmap.mmap) -> RunRecord:
    child = _fork_run(_config(arm, resume="auto"), folder, shared)
    os.waitpid(child, 0)
    return read_record(folder / "record.json")


@click.command()
@click.option("--runs", default=100, show_default=True)
@click.option("--seed", default=0, show_default=True, help="of the moments")
@click.option("--out", default=None, help="write OUT.json and OUT.md")
def main(runs: int, seed: int, out: str | None) -> None:
    """Kill runs and let them go on, and compare each with one that was left alone."""
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1)], lr=1.0)  # whose modules each run would import again
    moments = random.Random(seed)
    shared = mmap.mmap(-1, 2)
    rows: list[dict[str, Any]] = []
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        whole = {
            arm: Undisturbed(arm, Path(name) / f"undisturbed{index}", shared)
            for index, arm in enumerate(ARMS)
        }
        for number in range(runs):
            arm = ARMS[number % len(ARMS)]
            folder = Path(name) / str(number)
            after, phase, complete = _kill_run(arm, folder, whole[arm].seconds, moments, shared)
            half = any(folder.glob("checkpoints/.*.tmp"))
            found = _newest(folder).get("progress", {}).get("step", 0)
            record = _gone_on(arm, folder, shared)
            rows.append(
                {
                    "arm": arm,
                    "after_seconds": round(after, 4),
                    "phase": phase,
                    "half_a_file_left": half,
                    "complete_save": complete,
                    "found": found,
                    "resumed_at": record.resumed[-1].step if record.resumed else 0,
                    "status": record.status,
                    "difference": whole[arm].difference(folder)
                    if record.status == "completed"
                    else record.error,
                }
            )
            if (number + 1) % 10 == 0:
                click.echo(f"{number + 1} runs killed", err=True)
    seconds = time.monotonic() - begin
    lost = [row for row in rows if row["found"] < row["complete_save"] or row["resumed_at"] != row["found"]]
    different = [row for row in rows if row["difference"]]
    by_phase, by_arm = Counter(row["phase"] for row in rows), Counter(row["arm"] for row in rows)
    table = [
        [arm, by_arm[arm], *(_count(rows, arm, phase) for phase in PHASES), _wrong(rows, arm)] for arm in ARMS
    ]
    left = [row["half_a_file_left"] for row in rows]
    headers = ["arm", "killed", *(f"while {phase}" for phase in PHASES), "lost or different"]
    text = (
        f"{make_table(table, headers)}\n\n"
        f"{runs} runs killed, {runs - by_phase['training']} of them during a save, {sum(left)} of these with half a "
        f"file left behind. {sum(row['status'] == 'completed' for row in rows)} went on to the end: "
        f"{sum(row['resumed_at'] > 0 for row in rows)} from a checkpoint, and "
        f"{sum(row['resumed_at'] == 0 for row in rows)} that had completed none from the start. A completed checkpoint "
        f"was lost {len(lost)} times. {runs - len(different)} runs ended as the undisturbed one to the last bit."
    )
    click.echo(text)
    if out is not None:
        facts = f"{load()}, {seconds:.0f} s in all, seed {seed}"
        data = {"lost": len(lost), "different": len(different), "runs": rows}
        write_results(out, "Runs killed and resumed", __doc__, facts, text, data)
    if lost or different:
        raise SystemExit(1)


def _count(rows: list[dict[str, Any]], arm: str, phase: str) -> int:
    return sum(row["arm"] == arm and row["phase"] == phase for row in rows)


def _wrong(rows: list[dict[str, Any]], arm: str) -> int:
    mine = [row for row in rows if row["arm"] == arm]
    return sum(row["found"] < row["complete_save"] or bool(row["difference"]) for row in mine)


if __name__ == "__main__":
    main()
