"""Keep a step of a script that `exec` runs, and repeat one in a process that is prepared as `exec` prepares it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from ampcompare.base.errors import UnsupportedCombination
from ampcompare.script.invocation.exec_settings import ExecSettings
from ampcompare.script.invocation.stderr import say_once
from ampcompare.script.invocation.target import Target
from ampcompare.script.process.execute import execute
from ampcompare.script.process.prepare import PreparedProcess, prepare_process
from ampcompare.script.replay.one_step import StepKeeper, StepPrecision, main, seed_all_generators

FAILED = 3


def keep_step_in_capsule(target: Target, settings: ExecSettings, step: int, path: Path) -> int:
    """Run a script, and keep one of its steps in a file.

    Args:
        target: the script or module with its arguments.
        settings: seed, device, engine and what else `exec` takes.
        step: the number of the step that is kept.
        path: of the file.

    Returns:
        The exit code of the script; 3 if that is 0 and there is no file.

    Raises:
        UnsupportedCombination: torchrun has started several processes.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UnsupportedCombination("a capsule has a step of one process, and torchrun has started several")
    facts = {
        "script": target.name,
        "arguments": list(target.arguments),
        "is_module": target.is_module,
        "seed": settings.seed,
        "device": settings.device,
        "engine": settings.engine,
        "compat_torch": settings.compat_torch,
    }
    keeper = StepKeeper(str(path), step, facts)

    def prepare(given: ExecSettings) -> PreparedProcess:
        prepared = prepare_process(given)
        seed_all_generators(settings.seed)
        keeper.install()
        return prepared

    code = execute(target, dataclasses.replace(settings, seed=None), prepare=prepare)
    keeper.stop_following()
    if keeper.fault:
        say_once(f"no capsule: {keeper.fault}")
        return code or FAILED
    say_once(
        f"step {step} is in {path.name} ({keeper.size / 1e6:.1f} MB): ampcompare replay {path.name} --change onednn=off"
    )
    return code


def repeat_step_here(words: Sequence[str]) -> None:
    """Repeat a step in this process, which it may end: the settings that `exec` had, an arm or "", and the command."""
    engine, device, compat_torch, arm, *command = words
    settings = ExecSettings(
        engine=engine, device=device or None, compat_torch=bool(compat_torch), guards="off", name="replay"
    )

    def prepare() -> StepPrecision | None:
        if not arm:
            prepare_process(settings)
            return None
        # Imported here: nothing else of this file needs what stands behind torch.amp.
        from ampcompare.script.replay.arm import prepare_process_for_replay

        return prepare_process_for_replay(dataclasses.replace(settings, arm=arm))

    main(command, prepare, goes_on=True)  # what the script writes stays in a sandbox
