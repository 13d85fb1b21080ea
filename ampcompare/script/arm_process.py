"""Prepare a process for a script under an arm, and run it."""

import contextlib
import ctypes
import dataclasses
import functools
import os
import random
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ampcompare.backends.arm import Arm
from ampcompare.base.environment.variables import CELL_FOLDER, CODE_FOLDER
from ampcompare.base.errors import AmpCompareError
from ampcompare.base.files.loaded_code import UsedInputsRecorder
from ampcompare.base.guard_modes import GuardMode
from ampcompare.base.patches import Layer, Subscriptions
from ampcompare.base.processes.rank_marks import mark_output_with_rank
from ampcompare.base.tensors.cuda_casts import cuda_casts
from ampcompare.results.records.evaluation import emulated_type
from ampcompare.results.records.ledger import Ledger
from ampcompare.results.records.run import SeedCall, nonfinite_statistics_text
from ampcompare.script.beginning.first_weights import FirstWeightsFollower
from ampcompare.script.beginning.seeding import SeedFollower
from ampcompare.script.behind.stand_in import ArmStandIn
from ampcompare.script.invocation.exec_settings import ExecSettings
from ampcompare.script.invocation.stderr import say_once
from ampcompare.script.invocation.target import Target
from ampcompare.script.process import child_processes
from ampcompare.script.process.execute import execute
from ampcompare.script.process.prepare import PreparedProcess, prepare_process
from ampcompare.script.recording.recorder import RecordedSteps
from ampcompare.script.remarks.lost_statistics import LostStatisticsWatch, variance_beyond_fp16_text
from ampcompare.script.watch.cell_facts import CellFactsRecorder
from ampcompare.script.watch.ledger import ScriptLedgerWatch
from ampcompare.settings.script import SEED_STRIDE
from ampcompare.training.precision.base import half_dtype_of
from ampcompare.training.precision.cpu_half import choose_cpu_half_mode_and_context
from ampcompare.training.twin import perturb_weights_given_to_optimizers

PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>

_stand_ins: list[ArmStandIn] = []  # of this process, like the next; kept until it ends
_ledgers: list[ScriptLedgerWatch] = []
_seedings: list[SeedFollower] = []


def run_script(
    target: Target, settings: ExecSettings, prepare: Callable[[ExecSettings], PreparedProcess] | None = None
) -> int:
    """Run a script under an arm in this process, which belongs to the script from then on.

    Args:
        target: the script or module with its arguments.
        settings: arm, seed, record, guards and what else `exec` takes.
        prepare: makes the process ready; None for `prepare_arm_process`.

    Returns:
        The exit code of the script; 3 if it has ended well and trained nothing.
    """
    if CELL_FOLDER in os.environ:
        _end_with_parent()
    status = execute(target, settings, prepare=prepare or prepare_arm_process, explain=_explain_error_by_arm)
    # A child process that trains past the arm refuses to.
    if status == 0 and not _stand_ins[-1].has_acted() and not child_processes.num_started_processes():
        under = "" if current_stand_in().arm.is_as_written else f" under {settings.arm}"
        say_once(
            f"the script has ended, and nothing was trained{under}: no optimizer of torch has updated the weights "
            "of a module that it ran; check that it trains with these arguments"
        )
        return 3
    return status


def current_stand_in() -> ArmStandIn:
    """Return what stands behind the names of amp in this process, which is prepared for an arm."""
    return _stand_ins[-1]


def lifted_types_of_arm() -> list[str]:
    """Return the 16-bit types of weights that the arm of this process has lifted to fp32."""
    return _stand_ins[-1].lifted_types if _stand_ins else []


def end_and_find_script_ledger() -> Ledger | None:
    """Return in which types the script of this process has trained; None if no step was looked at."""
    return _ledgers[-1].end_and_find_ledger() if _ledgers else None


def recorded_seed_calls() -> list[SeedCall]:
    """Return where the script of this process has seeded its generators."""
    return [SeedCall.model_validate(call) for call in _seedings[-1].seed_calls] if _seedings else []


def seed_all_generators(seed: int) -> None:
    """Seed Python, NumPy, and torch on all devices."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _explain_error_by_arm(error: BaseException) -> AmpCompareError | None:
    return _stand_ins[-1].find_refusal_of_error(error) if _stand_ins else None


def _end_with_parent() -> None:
    """Let Linux kill this process when its parent is killed: a server, or torchrun, which could not end it then."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def prepare_arm_process(settings: ExecSettings, *, child: str | None = None) -> PreparedProcess:
    """Prepare this process, or one that the script has started, for an arm; nothing is undone later."""
    assert settings.arm is not None
    if settings.record is not None:
        mark_output_with_rank()
    arm = Arm.parse(settings.arm)

    def stand_in(rows: RecordedSteps | None) -> bool:
        half, emulation = _cpu_half_mode_and_context(arm, settings)
        emulation.__enter__()  # until the process ends
        if settings.autocast_lists == "cuda" and (settings.device == "cpu" or not torch.cuda.is_available()):
            cuda_casts(everywhere=True).__enter__()  # likewise: also for blocks that name the CPU
        watch = None
        if rows is not None and settings.watch and (cell := os.environ.get(CELL_FOLDER)):
            # Of the environment: a process that the script starts may have another working directory.
            base = Path(os.environ.get(CODE_FOLDER, "."))
            rows.recorder.call_before_close(UsedInputsRecorder(Path(cell), base).record_used_inputs)
        if rows is not None:
            statistics = LostStatisticsWatch()
            statistics.follow(Subscriptions(Layer.RECORD))  # until the process ends
            rows.recorder.call_before_close(functools.partial(_record_lost_statistics, rows, statistics))
            # Before the watch, which may end the script at a row.
            under = "" if arm.is_as_written else str(arm)
            _ledgers.append(
                ScriptLedgerWatch(
                    rows, under, emulated_type(half), lambda one: _stand_ins[-1].torch_amp.masters(one)
                )
            )
            _ledgers[-1].install()
        if rows is not None and (settings.watch or settings.max_steps is not None):
            watch = CellFactsRecorder(rows.recorder, settings.max_steps, half)
        for_cuda = settings.device == "cpu"
        _stand_ins.append(ArmStandIn(arm, rows, engine=settings.engine, watch=watch, for_cuda=for_cuda))
        return _stand_ins[-1].keeps_apex

    guards = _guard_mode_under_arm(arm, settings.guards)
    prepared = prepare_process(dataclasses.replace(settings, guards=guards), child=child, stand_in=stand_in)
    if settings.seed is not None:
        seed_all_generators(settings.seed)
    _shift_and_record_script_seeds(settings, prepared)
    if settings.twin:
        perturb_weights_given_to_optimizers()  # until the process ends
    if settings.first_weights is not None:
        _begin_from_stored_weights(Path(settings.first_weights), prepared)
    child_processes.call_first_in_children(
        dataclasses.asdict(settings), target=f"{__name__}:{prepare_child.__name__}"
    )
    return prepared


def _guard_mode_under_arm(arm: Arm, guards: GuardMode) -> GuardMode:
    """Return how mistakes are looked for: guards know Apex and torch.amp as they are, not what stands behind them."""
    return guards if arm.spec.calls_apex or arm.is_as_written else "off"


def _record_lost_statistics(rows: RecordedSteps, watch: LostStatisticsWatch) -> None:
    """Record the layers that have lost their statistics, and print them where no table will."""
    if lost := watch.find_layers_with_lost_statistics():
        rows.recorder.add_row({"kind": "lost_statistics", "layers": lost})
        if CELL_FOLDER not in os.environ:
            say_once(nonfinite_statistics_text(lost))
    if beyond := watch.find_layers_beyond_fp16():
        rows.add_rounding_remark(variance_beyond_fp16_text(beyond))


def _begin_from_stored_weights(file: Path, prepared: PreparedProcess) -> None:
    """Let what optimizers get before the first step begin with the weights of a file, until the process ends."""
    first = FirstWeightsFollower(Subscriptions(Layer.RECORD), file)

    def check(*_: Any) -> None:
        if first.note_step_and_is_first() and prepared.recorder is not None:
            text = f"begins with {first.count} stored first weights, of which {first.changed} differ from its own"
            prepared.recorder.add_row({"kind": "note", "text": text})

    register_optimizer_step_pre_hook(check)


def _shift_and_record_script_seeds(settings: ExecSettings, prepared: PreparedProcess) -> None:
    """Shift what the script seeds, and record it where a cell is recorded."""
    is_watched = prepared.recorder is not None and settings.watch
    if settings.shift_seeds is None and not is_watched:
        return
    seeding = SeedFollower(SEED_STRIDE * (settings.seed or 0), settings.shift_seeds)
    seeding.install()  # until the process ends
    _seedings.append(seeding)
    if prepared.recorder is not None:
        recorder = prepared.recorder
        recorder.call_before_close(lambda: recorder.add_row({"kind": "seeds", "calls": seeding.seed_calls}))


def _cpu_half_mode_and_context(
    arm: Arm, settings: ExecSettings
) -> tuple[str | None, AbstractContextManager[Any]]:
    """Return how this process computes 16-bit types, and the context for it: a CPU's own kernels are slow on fp16."""
    dtype = half_dtype_of(arm)
    if settings.device != "cpu":
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return choose_cpu_half_mode_and_context("auto", dtype, device, settings.autocast_lists)
    # The replaced device casts as it was asked to, and emulates fp16 of every arm: a second mode would add nothing.
    mode, emulation = choose_cpu_half_mode_and_context("auto", dtype, torch.device("cpu"), "cpu")
    return mode, nullcontext() if dtype is torch.float16 else emulation


def prepare_child(values: dict[str, Any], name: str) -> None:
    """Prepare a process that the script has started by multiprocessing."""
    prepare_arm_process(ExecSettings(**values), child=name)
