"""`replay`: repeat the step of a capsule as it is and changed, and judge the difference module by module."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ampcompare.backends.arm import Arm
from ampcompare.backends.script_arms import require_in_script
from ampcompare.base.errors import ConfigError, EnvironmentUnfit
from ampcompare.base.processes.script_environment import ONE_THREAD
from ampcompare.base.processes.start import kill_with_descendants
from ampcompare.experiment.launch.script.forks import ScriptForkServer
from ampcompare.results.analysis.replay import ReplayJudgment, judge_replay
from ampcompare.settings.script import ScriptConfig, script_config
from ampcompare.settings.stack import StackConfig

PROGRAM = Path(__file__).parents[1] / "script" / "replay" / "one_step.py"
TIME_LIMIT = 3600.0  # of one side
# The settings of `--change`, with the values that each takes.
CHANGES = {
    "threads": re.compile(r"[1-9]\d{0,2}"),
    "onednn": re.compile("on|off"),
    "sdpa": re.compile("math|flash|efficient|cudnn"),
    "compile": re.compile("inductor|eager|aot_eager"),
    "tf32": re.compile("on|off"),
    "deterministic": re.compile("on|off"),
    "denormals": re.compile("kept|flushed"),
    "arm": re.compile(".+"),
}
OPEN = {"threads": "N", "arm": "ARM"}  # what stands for their values, which are not listed


@dataclass(frozen=True)
class ReplayVariant:
    """What a step is repeated with: settings, another environment, or another script; none of them is as it is."""

    name: str
    changes: Mapping[str, str] = field(default_factory=dict)
    stack: StackConfig | None = None
    script: ScriptConfig | None = None


def replay_variants_of_changes(
    changes: Sequence[str],
    stacks: Mapping[str, StackConfig],
    script: Sequence[str] | None,
    capsule_script: Sequence[str],
) -> list[ReplayVariant]:
    """Return what to repeat a step with: each change alone, and in each stack.

    Args:
        changes: texts such as `onednn=off`.
        stacks: other environments, by their names; the step is repeated in each.
        script: another script with its arguments.
        capsule_script: that of the capsule.

    Raises:
        ConfigError: there is no such change, or nothing is changed.
    """
    sides = []
    for text in changes:
        name, equals, value = text.partition("=")
        if not equals or name not in CHANGES or not CHANGES[name].fullmatch(value):
            values = {name: OPEN.get(name, values.pattern) for name, values in CHANGES.items()}
            known = ", ".join(f"{name}={value}" for name, value in values.items())
            raise ConfigError(f"--change {text}: there is no such change; there are {known}")
        value = _canonical_arm_text(value) if name == "arm" else value
        sides.append(ReplayVariant(f"{name}={value}", {name: value}))
    sides += [ReplayVariant(f"stack {name}", stack=stack) for name, stack in stacks.items()]
    if script is not None and list(script) != list(capsule_script):
        sides.append(ReplayVariant(f"script {shlex.join(script)}", script=script_config(list(script))))
    if not sides:
        raise ConfigError(
            "nothing is changed: give --change onednn=off, --stack new=/envs/new/bin/python, or another script after --"
        )
    return sides


def _canonical_arm_text(text: str) -> str:
    """Return an arm in its one spelling.

    Raises:
        ConfigError: there is no such arm, or its modules are others than those of the capsule.
        UnsupportedCombination: it cannot train a script.
    """
    arm = Arm.parse(text)
    require_in_script(arm)
    if arm.is_as_written:
        raise ConfigError(f"--change arm={text} changes nothing: it is the step as it is")
    roles = arm.roles
    if roles is None or roles.linear_formats:
        raise ConfigError(
            f"--change arm={text}: its products have number formats of their own, and there is no rule here for how "
            "far those may be off; give an arm that computes in fp32, TF32 or 16 bits"
        )
    if {roles.weights, roles.step, roles.state} != {"fp32"} or roles.masters:
        held = "weights" if roles.weights != "fp32" or roles.masters else "the state of the optimizer"
        other = f"arm=native:{roles.half}" if roles.half else "arm=fp32"
        raise ConfigError(
            f"--change arm={text}: it holds {held} in 16 bits, so that its step does not start from the numbers of the "
            f"capsule; {other} computes from those, and compare trains {arm}"
        )
    return str(arm)


def read_capsule_facts(capsule: Path) -> dict[str, Any]:
    """Return which script a capsule is of, and of which step.

    Raises:
        ConfigError: it is none.
    """
    from ampcompare.script.replay.one_step import StepRefused, read_capsule

    try:
        found = read_capsule(str(capsule))
    except StepRefused as error:
        raise ConfigError(str(error)) from None
    names = ("script", "arguments", "is_module", "step", "engine", "device", "compat_torch")
    return {name: found.get(name) for name in names}


def replay(
    capsule: Path,
    facts: Mapping[str, Any],
    sides: Sequence[ReplayVariant],
    capsule_script: ScriptConfig,
    say: Callable[[str], Any] = lambda line: None,
) -> list[ReplayJudgment]:
    """Repeat the step of a capsule as it is and with each change, and return what differs.

    Args:
        capsule: the file, as `exec --capsule` has written it.
        facts: what it says of its process: "engine", "device" and "compat_torch".
        sides: the changes, each of which is made alone.
        capsule_script: the script of the capsule, with its arguments.
        say: called with a line for each change as soon as it is judged.

    Returns:
        A judgment for each of `sides`, in their order; one of a step that failed says why, and so do all where the step
        fails as it is.
    """
    with contextlib.ExitStack() as stack:
        outer = stack.enter_context(tempfile.TemporaryDirectory(prefix="ampcompare-replay-"))
        folder = Path(outer, "step")
        folder.mkdir()
        for source in (capsule, PROGRAM):
            (folder / source.name).write_bytes(source.read_bytes())
        settings = [
            facts["engine"] or "compat",
            facts["device"] or "",
            "yes" if facts["compat_torch"] else "",
        ]
        run = _StepRunner(stack.enter_context(ScriptForkServer()), folder, folder / capsule.name, settings)
        base = run.repeat_step("base", ReplayVariant(""), capsule_script)
        found = []
        for side in sides:
            changed = (
                {"fault": "nothing to compare with"}
                if base.get("fault")
                else run.repeat_step("change", side, capsule_script)
            )
            found.append(judge_replay(side.name, base, changed))
            say(found[-1].sentence)
        return found


class _StepRunner:
    """Repeats a step, each time in a process of its own."""

    def __init__(self, forks: ScriptForkServer, folder: Path, capsule: Path, settings: Sequence[str]) -> None:
        self._forks = forks
        self._folder = folder
        self._capsule = capsule
        self._settings = settings

    def repeat_step(self, mode: str, side: ReplayVariant, capsule_script: ScriptConfig) -> dict[str, Any]:
        """Return what `one_step.py` has written, or why it wrote nothing."""
        script = side.script or capsule_script
        rows = self._folder / "rows.json"
        rows.unlink(missing_ok=True)
        words = [
            str(self._folder / PROGRAM.name),
            mode,
            str(self._capsule),
            str(self._folder / "answers.pt"),
            str(rows),
        ]
        words += [f"{name}={value}" for name, value in side.changes.items() if name != "arm"]
        words += ["-m"] * script.is_module
        words += [script.name, *script.arguments_for(0, "script", self._folder)]
        if side.stack is None:
            settings = [*self._settings, side.changes.get("arm", "")]
            # The program itself is for other environments.
            code = self._forks.run_function(
                "ampcompare.script.replay.keep:repeat_step_here",
                [*settings, *words[1:]],
                self._folder,
                script.import_folder,
            )
            said = ""
        else:
            code, said = _exit_code_and_output_in_stack(side.stack, words, self._folder)
        try:
            found: dict[str, Any] = json.loads(rows.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {"fault": f"the process ended with exit code {code}{said}"}
        return found


def _exit_code_and_output_in_stack(stack: StackConfig, words: Sequence[str], folder: Path) -> tuple[int, str]:
    from ampcompare.experiment.launch.script.stacks import (
        copy_recorder,
        environment_without_own_python,
        inspect_stack,
    )

    copy_recorder(folder)
    found = inspect_stack(stack, folder)
    if found.fault:
        raise EnvironmentUnfit(found.fault)
    command = [*stack.python_command_for_cell(folder), *words]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        env={**environment_without_own_python(), **ONE_THREAD}, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            _, err = process.communicate(timeout=TIME_LIMIT)
        except BaseException:
            kill_with_descendants(process.pid)
            raise
    lines = [line for line in err.decode(errors="replace").splitlines() if line.strip()]
    return process.returncode, f": {lines[-1]}" if lines else ""
