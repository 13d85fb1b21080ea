"""`floor`: train a script and its twins, which differ by roundings alone, and write how far apart they are."""

from __future__ import annotations

import contextlib
import runpy
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ampcompare.base.environment.fingerprint import environment_fingerprint
from ampcompare.base.errors import LaunchError, UnusableInput
from ampcompare.base.files.run_files import CellFile
from ampcompare.experiment.launch.script.forks import ScriptForkServer
from ampcompare.experiment.launch.script.rows import ScriptRows, read_script_rows
from ampcompare.results.analysis.floor import Envelope, Rows, make_envelope, read_step_rows
from ampcompare.script.recording.summary import is_exec_record
from ampcompare.settings.script import ScriptConfig

AGAIN = "again"
WEIGHTS = "first weights by one unit in the last place"
THREADS = "two threads"
ONEDNN, DETERMINISTIC = "oneDNN off", "deterministic kernels"
TWINS = (AGAIN, WEIGHTS, THREADS, ONEDNN, DETERMINISTIC)
# What a twin changes in its process, as `replay --change` does.
SETTINGS = {THREADS: ("threads", "2"), ONEDNN: ("onednn", "off"), DETERMINISTIC: ("deterministic", "on")}


def measure_floor(
    script: ScriptConfig, *, seed: int, steps: int | None, say: Callable[[str], Any] = lambda line: None
) -> Envelope:
    """Train a script and its twins under the recorder, and return their envelope.

    Args:
        script: with its arguments.
        seed: of all these runs.
        steps: updates after which each is ended; None for all that the script makes.
        say: gets a line for each run.

    Raises:
        LaunchError: the script itself fails, or makes no step.
    """
    from ampcompare.experiment.launch.script.stacks import copy_recorder  # it imports torch

    with contextlib.ExitStack() as stack:
        outer = stack.enter_context(tempfile.TemporaryDirectory(prefix="ampcompare-floor-"))
        folder = Path(outer, "runs")
        folder.mkdir()
        copy_recorder(folder)
        words = _twin_command(script, seed, steps, folder)
        stored = folder / CellFile.WEIGHTS
        forks = stack.enter_context(ScriptForkServer())
        base = _train_twin_in_fork(forks, AGAIN, folder, ["--save-weights", str(stored), *words], script)
        if base.ended is None or base.ended.get("exit_code") or not base.steps:
            why = (base.ended or {}).get("error") or "it made no optimizer step"
            raise LaunchError(f"the script has no floor: {why}")
        say(
            f"the script: {len(base.steps)} steps, loss {base.steps[0].loss:.6g} to {base.steps[-1].loss:.6g}"
        )
        twins: dict[str, Rows | None] = {}
        for name in TWINS:
            options = words
            if name == WEIGHTS:
                _write_weights_moved_one_ulp(stored, folder / "moved.pt")
                options = ["--first-weights", str(folder / "moved.pt"), *words]
            rows = _train_twin_in_fork(forks, name, folder, options, script)
            is_whole = (
                rows.ended is not None
                and not rows.ended.get("exit_code")
                and len(rows.steps) == len(base.steps)
            )
            twins[name] = _losses_and_norms_of_steps(rows) if is_whole else None
            if not is_whole:
                say(
                    f"  {name}: left out: {(rows.ended or {}).get('error') or 'it made another number of steps'}"
                )
        envelope = make_envelope(
            _losses_and_norms_of_steps(base),
            twins,
            script=Path(script.name).name,
            environment=environment_fingerprint(),
        )
        for name, distance in envelope.twins.items():
            if distance is not None:
                say(f"  {name}: loss up to {distance:.2g} apart")
        return envelope


def _twin_command(script: ScriptConfig, seed: int, steps: int | None, folder: Path) -> list[str]:
    limit = ["--max-steps", str(steps)] if steps is not None else []
    module = ["-m"] if script.is_module else []
    arguments = script.arguments_for(seed, "script", folder)
    return ["--seed", str(seed), *limit, *module, script.name, *arguments]


def _train_twin_in_fork(
    forks: ScriptForkServer, twin: str, folder: Path, words: Sequence[str], script: ScriptConfig
) -> ScriptRows:
    record = folder / CellFile.SCRIPT
    record.unlink(missing_ok=True)
    command = [str(folder / CellFile.RECORDER), "--record", str(record), *words]
    forks.run_function(f"{__name__}:train_twin", [twin, *command], folder, script.import_folder)
    return read_script_rows(record)


def train_twin(words: Sequence[str]) -> None:
    """Run the recorder, in a process of its own, which it may end; `words` are the name of a twin and the command."""
    from ampcompare.script.replay.one_step import change_setting

    twin, *command = words
    if twin in SETTINGS:
        change_setting(*SETTINGS[twin])
    sys.argv[:] = command
    runpy.run_path(command[0], run_name="__main__")


def read_losses_and_gradient_norms(path: Path) -> Rows:
    """Return losses and gradient norms, one for each update, of a record of `exec` or a stack, or of JSON lines.

    Args:
        path: the file.

    Raises:
        UnusableInput: it cannot be read, or holds no loss.
    """
    if not is_exec_record(path):
        return read_step_rows(path)
    found = _losses_and_norms_of_steps(read_script_rows(path))
    if not found:
        raise UnusableInput(
            f"{path} is a record without a step: exec --arm script --record FILE records those of any script"
        )
    return found


def _losses_and_norms_of_steps(rows: ScriptRows) -> Rows:
    return [{"loss": step.loss, "grad_norm": step.grad_norm} for step in rows.steps]


def _write_weights_moved_one_ulp(stored_file: Path, moved_file: Path) -> None:
    """Move each first weight by one unit in the last place, up or down at random."""
    import torch

    generator = torch.Generator().manual_seed(0)
    weights = torch.load(stored_file, map_location="cpu", weights_only=True)
    for weight in weights:
        if weight.is_floating_point():
            signs = torch.randint(0, 2, weight.shape, generator=generator) * 2 - 1
            toward = torch.full_like(weight, torch.inf) * signs
            weight.copy_(torch.nextafter(weight, toward.to(weight.dtype)))
    torch.save(weights, moved_file)
