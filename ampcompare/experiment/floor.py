"""`floor`: train a script and its twins, which differ by roundings alone, and write how far apart they are."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ampcompare.base.environment.fingerprint import THREAD_VARIABLES, fingerprint
from ampcompare.base.errors import LaunchError
from ampcompare.base.files.run_files import CellFile
from ampcompare.base.processes.sandbox import open_sandbox
from ampcompare.base.processes.start import start_command
from ampcompare.experiment.launch.script.rows import ScriptRows, read_rows
from ampcompare.results.analysis.floor import Envelope, Rows, make_envelope
from ampcompare.settings.script import ScriptConfig

# What a twin does before the script; the words behind it are those of the recorder.
CHANGES = {
    "again": "",
    "first weights by one unit in the last place": "",
    "two threads": "",
    "oneDNN off": "torch._C._set_mkldnn_enabled(False)",
    "deterministic kernels": "torch.use_deterministic_algorithms(True, warn_only=True)",
}
WEIGHTS, THREADS = "first weights by one unit in the last place", "two threads"
START = """import runpy, sys
import torch
{change}
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def find_floor(
    script: ScriptConfig, *, seed: int, steps: int | None, say: Callable[[str], Any] = lambda line: None
) -> Envelope:
    """Train a script and its twins under the recorder, and return their envelope.

    Raises:
        LaunchError: the script itself fails, or makes no step.
    """
    from ampcompare.experiment.launch.script.stacks import copy_recorder  # it imports torch

    with tempfile.TemporaryDirectory(prefix="ampcompare-floor-") as outer:
        folder = Path(outer, "runs")
        folder.mkdir()
        copy_recorder(folder)
        words = _words(script, seed, steps, folder)
        stored = folder / "first.pt"
        base = _train("the script", folder, ["--save-weights", str(stored), *words], script)
        if base.ended is None or base.ended.get("exit_code") or not base.steps:
            why = (base.ended or {}).get("error") or "it made no optimizer step"
            raise LaunchError(f"the script has no floor: {why}")
        say(f"the script: {len(base.steps)} steps, loss {base.steps[0].loss:.6g} to {base.steps[-1].loss:.6g}")
        twins: dict[str, Rows | None] = {}
        for name, change in CHANGES.items():
            options, variables = words, {}
            if name == WEIGHTS:
                _move_weights(stored, folder / "moved.pt")
                options = ["--first-weights", str(folder / "moved.pt"), *words]
            if name == THREADS:
                variables = dict.fromkeys(THREAD_VARIABLES, "2")
            rows = _train(name, folder, options, script, change, variables)
            is_whole = rows.ended is not None and not rows.ended.get("exit_code") and len(rows.steps) == len(base.steps)
            twins[name] = _rows_of(rows) if is_whole else None
            if not is_whole:
                say(f"  {name}: left out: {(rows.ended or {}).get('error') or 'it made another number of steps'}")
        envelope = make_envelope(_rows_of(base), twins, script=Path(script.name).name, environment=fingerprint())
        for name, distance in envelope.twins.items():
            if distance is not None:
                say(f"  {name}: loss up to {distance:.2g} apart")
        return envelope


def _words(script: ScriptConfig, seed: int, steps: int | None, folder: Path) -> list[str]:
    limit = ["--max-steps", str(steps)] if steps is not None else []
    module = ["-m"] if script.is_module else []
    arguments = script.arguments_for(seed, "script", folder)
    return ["--seed", str(seed), *limit, *module, script.name, *arguments]


def _train(
    name: str, folder: Path, words: Sequence[str], script: ScriptConfig, change: str = "",
    variables: Mapping[str, str] | None = None,
) -> ScriptRows:  # fmt: skip
    record = folder / CellFile.SCRIPT
    record.unlink(missing_ok=True)
    start = folder / "start.py"
    start.write_text(START.format(change=change), encoding="utf-8")
    with open_sandbox(folder.parent / "store", shared=[folder], roots=[script.folder]) as sandbox:
        environment = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, "1"), "PYTHONHASHSEED": "0"}
        environment = {**environment, **(variables or {}), **sandbox.environment}
        command = [sys.executable, str(start), str(folder / CellFile.RECORDER), "--record", str(record), *words]
        supervised = start_command("ampcompare.experiment.launch.script.supervise", *map(sandbox.at, command))
        with subprocess.Popen(
            supervised, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
        ) as process:
            process.wait()
    return read_rows(record)


def _rows_of(rows: ScriptRows) -> Rows:
    return [{"loss": step.loss, "grad_norm": step.grad_norm} for step in rows.steps]


def _move_weights(stored: Path, moved: Path) -> None:
    """Move each first weight by one unit in the last place, up or down at random."""
    import torch

    generator = torch.Generator().manual_seed(0)
    weights = torch.load(stored, map_location="cpu", weights_only=True)
    for weight in weights:
        if weight.is_floating_point():
            signs = torch.randint(0, 2, weight.shape, generator=generator) * 2 - 1
            toward = torch.full_like(weight, torch.inf) * signs
            weight.copy_(torch.nextafter(weight, toward.to(weight.dtype)))
    torch.save(weights, moved)
