"""Refuse what certainly cannot run before torch is imported, a process is started or a folder is made."""

from __future__ import annotations

import itertools
import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path

from ampcompare.backends.apex_levels import require_real_apex
from ampcompare.backends.arm import Arm
from ampcompare.backends.catalog import BUILT_IN, SCRIPT_BACKENDS
from ampcompare.base.environment.gpus import ACCELERATORS, accelerator_of, why_no_accelerator, why_no_cuda
from ampcompare.base.environment.packages import find_module
from ampcompare.base.environment.ranks import is_rank
from ampcompare.base.errors import BackendUnavailable, ConfigError, EnvironmentUnfit, UnsupportedCombination
from ampcompare.experiment.launch.script.refusals import why_refused
from ampcompare.experiment.launch.slurm import require_slurm
from ampcompare.runs.settings.config import RunConfig
from ampcompare.runs.settings.optimizers import require_optimizer
from ampcompare.tasks.catalog import check_task
from ampcompare.training.checkpoint.store.frame import require_checkpoint

__all__ = ["check_cells", "grouped_refusals", "refused_arms"]

REMOTE = ("slurm", "ray")  # whose jobs may see other devices and disks than the machine that submits them


def check_cells(cells: Iterable[RunConfig]) -> None:
    """Check that the names, files and libraries of cells exist, as far as that can be known without torch.

    Raises:
        ConfigError: a name or a file does not exist.
        EnvironmentUnfit: this machine lacks a GPU, a library or Slurm.
    """
    cells = list(cells)
    if not hasattr(os, "fork") and not is_rank() and any(cell.launcher not in REMOTE for cell in cells):
        raise EnvironmentUnfit(
            f"training starts processes by os.fork, which {platform.system() or 'this system'} lacks; use Linux, "
            "macOS, WSL 2 or a container (lint, migrate, explain, report, judge, convert and exec work here)"
        )
    seen: set[tuple[object, ...]] = set()
    for cell in cells:
        recipe = cell.recipe
        here = cell.launcher not in REMOTE
        names = (recipe.task, recipe.model.arch, recipe.optimizer.name)
        key = (cell.arm, cell.device, here, names, recipe.data, cell.saving.resume, cell.parallel.backend)
        if key in seen:
            continue
        seen.add(key)
        if not here:
            require_slurm()
        no_cuda = why_no_cuda(here=here)
        kind = accelerator_of(cell.device)
        if kind and (missing := why_no_accelerator(kind, here=here)):
            title, remedy = ACCELERATORS[kind].title, ACCELERATORS[kind].remedy
            raise EnvironmentUnfit(
                f"device {cell.device} was requested ({title}), but {missing}; use --device cpu ({remedy})"
            )
        if cell.device.startswith("cuda") and no_cuda:
            raise EnvironmentUnfit(
                f"device {cell.device} was requested, but {no_cuda}; use --device cpu, or install torch for CUDA"
            )
        if cell.script is not None:
            _check_script(cell.parsed_arm)
            continue
        on_cpu = cell.device == "cpu" or (cell.device == "auto" and bool(no_cuda))
        _check_arm(Arm.parse(cell.arm), on_cpu=on_cpu)
        check_task(recipe, look=here)
        require_optimizer(recipe.optimizer.name)
        resume = cell.saving.resume
        if here and resume not in (None, "auto") and not os.path.isdir(str(resume)):
            require_checkpoint(Path(str(resume)))
        if cell.parallel.backend == "nccl" and on_cpu and not is_rank():  # ranks report it once, when they meet
            why = no_cuda or f"the device is {cell.device}"
            raise EnvironmentUnfit(f"nccl works between GPUs only, but {why}; use --dist-backend gloo")
    _check_distinct(cells)
    refused = refused_arms(cells)
    if refused and len(refused) == len({cell.arm for cell in cells}):
        raise UnsupportedCombination("; ".join(grouped_refusals(refused)))


def _check_distinct(cells: Iterable[RunConfig]) -> None:
    """Check that no two arms are one under two names: every difference between them would be chance."""
    for one, other in itertools.combinations({cell.arm: cell.parsed_arm for cell in cells}.values(), 2):
        if one.declares_the_same(other):
            raise ConfigError(
                f"{one} and {other} hold and compute every part of a step in the same types, so they are one arm; "
                "leave one out (ampcompare explain shows what an option changes)"
            )


def refused_arms(cells: Iterable[RunConfig]) -> dict[str, str]:
    """Return the arms that certainly cannot train the script of their cells, with the reason."""
    arms = {cell.arm: cell for cell in cells if cell.script is not None}
    reasons = {arm: why_refused(cell.script, cell.parsed_arm) for arm, cell in arms.items() if cell.script is not None}
    return {arm: reason for arm, reason in reasons.items() if reason}


def grouped_refusals(refused: Mapping[str, str]) -> list[str]:
    """Return one sentence for each reason, which begins with its arms."""
    arms: dict[str, list[str]] = {}
    for arm in sorted(refused):
        arms.setdefault(refused[arm], []).append(arm)
    return [f"{', '.join(names)} cannot train this script: {reason}" for reason, names in arms.items()]


def _check_script(arm: Arm) -> None:
    if arm.backend not in SCRIPT_BACKENDS:
        raise UnsupportedCombination(
            f"arm {arm} cannot replace amp in a script: it replaces the training loop or parts of the "
            f"model; arms for scripts are those of {', '.join(SCRIPT_BACKENDS)}"
        )


def _check_arm(arm: Arm, *, on_cpu: bool) -> None:
    if arm.backend == "script":
        raise UnsupportedCombination(
            "the arm script trains a script as it is written, and there is none: put -- SCRIPT ARGS at the end, or "
            "use fp32"
        )
    library = arm.spec.library
    if library is not None and (missing := library.missing()):
        raise BackendUnavailable(f"{arm.backend} is {missing}")
    runs = arm.effective("cpu") if on_cpu and library is not None else None
    if runs is not None and runs.arm is None:
        raise BackendUnavailable(runs.reason)
    if arm.inner is not None:
        _check_arm(arm.inner, on_cpu=on_cpu)
    if arm.backend == "apex" and arm.options.get("engine") == "nvidia":
        require_real_apex("cpu" if on_cpu else "cuda")
    if arm.backend not in BUILT_IN:
        registered = arm.spec.implementation
        if not find_module(registered.partition(":")[0])[0]:
            raise BackendUnavailable(
                f"{arm.backend!r} is registered as {registered}, but there is no such module; reinstall its package"
            )
