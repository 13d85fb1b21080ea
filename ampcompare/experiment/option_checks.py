"""Refuse words of options that mean nothing, before torch is imported, a process is started or a folder is made.

What depends on devices, files and the user's code is refused where it is used, in the cell.
"""

from __future__ import annotations

import itertools
import os
import platform
from collections.abc import Iterable

from ampcompare.backends.arm import Arm
from ampcompare.backends.script_arms import require_in_script
from ampcompare.base.environment.extras import require_torch
from ampcompare.base.environment.ranks import is_one_of_several_ranks
from ampcompare.base.errors import BackendUnavailable, ConfigError, EnvironmentUnfit, UnsupportedCombination
from ampcompare.experiment.launch.cell_files import require_writable_folders_exist
from ampcompare.experiment.launch.dispatch.slurm import require_slurm
from ampcompare.settings.config import REMOTE_LAUNCHERS, RunConfig
from ampcompare.settings.optimizers import require_optimizer
from ampcompare.tasks.catalog import check_task_of_recipe


def check_cells(cells: Iterable[RunConfig]) -> None:
    """Check that cells name arms, tasks, models, data sets, optimizers and launchers that there are, and torch is.

    Raises:
        ConfigError: something that a cell names does not exist, such as a folder of `--allow-writes` on this machine,
            or two cells are the same run.
        EnvironmentUnfit: this system cannot fork, or lacks torch, Slurm or the package of an arm or an optimizer.
    """
    cells = list(cells)
    forks = not is_one_of_several_ranks() and any(cell.launcher not in REMOTE_LAUNCHERS for cell in cells)
    if forks and not hasattr(os, "fork"):
        raise EnvironmentUnfit(
            f"training starts processes by os.fork, which {platform.system() or 'this system'} lacks; use Linux, "
            "macOS, WSL 2 or a container (lint, migrate, explain, report, judge, convert and exec work here)"
        )
    require_torch()
    if any(cell.launcher == "slurm" for cell in cells):
        require_slurm()
    for cell in cells:
        if cell.launcher not in REMOTE_LAUNCHERS:
            require_writable_folders_exist(cell)
        if cell.script is not None:
            require_in_script(cell.parsed_arm)
            continue
        _check_arm_can_train(cell.parsed_arm, is_elsewhere=cell.stack is not None)
        check_task_of_recipe(cell.recipe)
        if cell.stack is None:
            require_optimizer(cell.recipe.optimizer.name)
    _check_distinct_arms(cells)


def _check_distinct_arms(cells: Iterable[RunConfig]) -> None:
    """Check that no two arms are one under two names: every difference between them would be chance."""
    for one, other in itertools.combinations({cell.arm: cell.parsed_arm for cell in cells}.values(), 2):
        if one.declares_same_types(other):
            raise ConfigError(
                f"{one} and {other} hold and compute every part of a step in the same types, so they are one arm; "
                "leave one out (ampcompare explain shows what an option changes)"
            )


def _check_arm_can_train(arm: Arm, *, is_elsewhere: bool) -> None:
    """Check that an arm can train, as far as is known before its cell: packages of a stack are those that are there."""
    if arm.is_as_written:
        raise UnsupportedCombination(
            "the arm script trains a script as it is written, and there is none: put -- SCRIPT ARGS at the end, or "
            "use fp32"
        )
    library = arm.spec.library
    if library is not None and not is_elsewhere and (missing := library.why_missing()):
        raise BackendUnavailable(f"{arm.backend} is {missing}")
    if arm.inner is not None:
        _check_arm_can_train(arm.inner, is_elsewhere=is_elsewhere)
