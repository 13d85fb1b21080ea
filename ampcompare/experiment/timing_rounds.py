"""Timing rounds: after the runs of a seed, every arm is timed again for some steps, in turns close to each other.

Over minutes the state of the machine changes from one arm to the next; rounds of seconds, in balanced order, see the
same state. Each turn is a separate process, and its median step time is one measurement.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from ampcompare.base.errors import Ended
from ampcompare.base.files.run_files import CellFile
from ampcompare.base.formatting import format_count
from ampcompare.experiment.launch.cell_files import write_record
from ampcompare.experiment.launch.contract import Launcher
from ampcompare.experiment.plan import Plan, balanced_arm_orders
from ampcompare.results.records.run import RunRecord, TimingRound
from ampcompare.settings.config import RunConfig, SavingConfig

TIMED_STEPS = 60  # of one round; the median of fewer steps depends on single ones


def run_timing_rounds(
    plan: Plan,
    block: Sequence[int],
    records: Sequence[RunRecord | None],
    folders: Sequence[Path],
    launcher: Launcher,
    note: Callable[[str], None],
) -> dict[int, RunRecord]:
    """Run the timing rounds of one seed that its completed cells lack, and add them to their records.

    A round that any of the cells lacks runs again for all of them, since its turns are compared with each other.

    Args:
        records: by index of the cell; cells that did not complete are left out.

    Raises:
        Ended: a turn was stopped by SIGTERM; rounds before it are kept.
    """
    completed: dict[int, RunRecord] = {}
    for cell in block:
        record = records[cell]
        if record is not None and record.status == "completed":
            completed[cell] = record
    made = [{done.number for done in record.timing_rounds} for record in completed.values()]
    made_by_all = set.intersection(*made) if made else set()
    missing = [number for number in range(1, plan.timing_rounds + 1) if number not in made_by_all]
    if not missing or len(completed) < 2:
        return {}
    seed = plan.cells[block[0]].recipe.seed
    note(f"seed {seed}: {format_count(len(missing), 'timing round')} of {len(completed)} arms")
    labels = {plan.labels[cell]: cell for cell in completed}
    rows = balanced_arm_orders(list(labels), [], len(missing), plan.order_seed + seed)
    for number, row in zip(missing, rows, strict=True):
        cells = [labels[label] for label in row]
        turns = {cell: _run_timing_round(completed[cell], number, folders[cell], launcher) for cell in cells}
        failed = [plan.labels[cell] for cell, turn in turns.items() if turn is None]
        if failed:
            note(f"timing round {number} of seed {seed} does not count: {', '.join(failed)} failed in it")
            continue
        for cell, turn in turns.items():
            assert turn is not None
            others = [done for done in completed[cell].timing_rounds if done.number != number]
            rounds = sorted([*others, turn], key=lambda done: done.number)
            completed[cell] = completed[cell].model_copy(update={"timing_rounds": rounds})
            write_record(completed[cell], folders[cell])
    return completed


def config_of_timing_round(record: RunRecord) -> RunConfig:
    """Return the configuration of one turn: the cell's, ended after the timed steps instead of evaluated.

    It trains for as many epochs as that takes, and nothing else may end it.
    """
    config, summary = record.config, record.summary
    steps = config.warmup_steps + TIMED_STEPS
    steps_per_epoch = max(1, summary.num_steps // max(1, len(summary.epochs)))
    changes = {
        "epochs": max(config.recipe.epochs, math.ceil((steps + config.drain_every) / steps_per_epoch)),
        "max_steps": None,
        "early_stop": None,
        "target": None,
    }
    recipe = config.recipe.model_copy(update=changes)
    return config.model_copy(update={"recipe": recipe, "saving": SavingConfig(stop_at_step=steps)})


def _run_timing_round(record: RunRecord, number: int, folder: Path, launcher: Launcher) -> TimingRound | None:
    """Run one turn in `folder/rounds/NUMBER`; None if it failed or diverged."""
    config = config_of_timing_round(record)
    round_folder = folder / CellFile.ROUNDS / str(number)
    turn = launcher.launch(config, round_folder)
    # A run that is asked to stop saves a checkpoint.
    shutil.rmtree(round_folder / CellFile.CHECKPOINTS, ignore_errors=True)
    asked = config.saving.stop_at_step or 0
    if turn.status == "interrupted" and turn.summary.num_steps < asked:
        raise Ended(
            f"{record.arm} was stopped in timing round {number}; the same command runs the round again"
        )
    if turn.status not in ("completed", "interrupted"):
        return None
    return TimingRound(
        number=number,
        started=turn.started,
        step_seconds_median=turn.summary.step_seconds_median,
        data_seconds_median=turn.summary.data_seconds_median,
        readings=turn.readings,
    )
