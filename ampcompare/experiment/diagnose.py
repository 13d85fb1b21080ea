"""A diagnosis of a recipe, of a loop, or of a user's own script."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ampcompare.backends.arm import Arm
from ampcompare.base.environment.extras import require_torch
from ampcompare.base.environment.variables import CELL_FOLDER
from ampcompare.base.errors import AmpCompareError, LaunchError
from ampcompare.base.files.run_files import CellFile
from ampcompare.base.formatting import format_count, printable_line
from ampcompare.base.processes.sandbox import WITHOUT_OVERLAYS, can_sandbox
from ampcompare.base.processes.script_environment import EXAMINING, script_environment
from ampcompare.base.processes.start import kill_with_descendants, module_command
from ampcompare.diagnosis.options import DiagnoseOptions, StepWatchRequest, diagnose_in_child
from ampcompare.diagnosis.remedies import (
    DEVICE_OF_SCRIPT,
    TestedCandidate,
    diagnosis_sentence,
    diagnosis_with_tested_cure,
)
from ampcompare.experiment.launch.cell_files import sandbox_of_cell
from ampcompare.experiment.launch.places import places_for_cells
from ampcompare.experiment.launch.script.exec_fields import exec_fields_under_arm
from ampcompare.experiment.launch.script.rows import read_script_rows
from ampcompare.results.records.diagnosis import Diagnosis
from ampcompare.results.report.base import write_result_in_formats
from ampcompare.settings.config import RunConfig
from ampcompare.settings.examination import ERRORS, ExaminedScriptRequest

if TYPE_CHECKING:
    from ampcompare.diagnosis.loops import Loop

MAX_RUNS = 12  # of candidates: each trains the script from its start
TIME_LIMIT = 3600.0
SECONDS_TO_END = 3.0  # for other ranks, behind the watched one
SECONDS_BETWEEN_LOOKS = 0.1
SECONDS_OF_TORCHRUN = 40.0  # it kills a rank that ignores SIGTERM for 30 s
ENDED = "ended.txt"
NOTE = "ampcompare: "
NUMBER = re.compile(r"[-+]?\d[\d.]*(?:e[-+]?\d+)?")
REFUSALS = (*ERRORS, LaunchError.exit_code)  # whose reason ampcompare has printed


def diagnose(
    options: DiagnoseOptions,
    loop: Loop | None = None,
    *,
    output_dir: Path | None = None,
    say: Callable[[str], Any] = lambda line: None,
) -> Diagnosis:
    """Diagnose a loop in this process, or else the recipe or script of the configuration in separate processes.

    Args:
        options: the arm, its recipe or script, and what to look for.
        loop: gets the precision and trains a few steps in this process; None for what the configuration names.
        output_dir: folder of `diagnosis.json` and, where the extra is installed, `diagnosis.html`; by default none.
        say: called with a line about GPUs that are left out, before each run of a script, and with the files that are
            written.

    Raises:
        ConfigError: options that cannot be used together.
        ExtraMissing: torch is not installed, or too old.
        LaunchError: a process died, took too long, or watched no step.
    """
    require_torch()
    if loop is not None:
        from ampcompare.diagnosis.diagnose import diagnose_loop_by_options

        found = diagnose_loop_by_options(loop, options)
    else:
        # Of the places that a comparison would have, the first.
        places = places_for_cells([options.config], None)
        for note in places.notes:
            say(note)
        environment = places.all[0].gpu_environment
        if options.config.script is not None:
            found = diagnose_script(options, say, environment)
        else:
            found = diagnose_in_child(options, environment=environment)
    if output_dir is not None:
        for path in write_result_in_formats(found, output_dir, ("json", "html")):
            say(f"wrote {path}")
    return found


def diagnose_script(
    options: DiagnoseOptions,
    say: Callable[[str], None] = lambda line: None,
    environment: Mapping[str, str] | None = None,
) -> Diagnosis:
    """Run a script under the arm of a configuration, watched, and again under candidates of a cure."""
    options.check()
    arm = options.config.parsed_arm
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="ampcompare-diagnose-") as name:
        say_writable_files(say)
        say(f"running the script under {arm}, watched, for {format_count(options.steps, 'step')}")
        found, _, device_type = _diagnosis_kept_functions_and_device_type(
            options, arm, (), Path(name), environment
        )
        once = time.perf_counter() - begun
        if found.faults and found.faults[0].kind == "error":
            say(
                f"running it from its start under fp32, to see whether it ends so there too (about {once:.0f} s)"
            )
            found = _without_error_that_fp32_has_too(found, options, arm, Path(name), environment)
        if not options.cures or not found.faults:
            return found

        def test_arm(other: Arm, lines: Sequence[str]) -> TestedCandidate:
            what = f"{other}, with {' and '.join(lines)} in fp32" if lines else str(other)
            say(
                f"running it again from its start under {what} (about {once:.0f} s, at most {MAX_RUNS} such runs)"
            )
            seen, functions, _ = _diagnosis_kept_functions_and_device_type(
                options, other, lines, Path(name), environment
            )
            return TestedCandidate(seen.faults, functions)

        script = options.config.script
        found = diagnosis_with_tested_cure(
            found,
            arm,
            test_arm,
            # whose calls of CUDA run on the CPU
            device_type=DEVICE_OF_SCRIPT if options.config.device == "cpu" else device_type,
            folder="" if script is None or script.is_module else os.path.dirname(script.name),
            max_trials=MAX_RUNS,
        )
    if not found.trials:
        return found
    seconds = time.perf_counter() - begun
    cost = f"the script ran {1 + len(found.trials)} times from its start, {seconds:.0f} s in all"
    return found.model_copy(update={"notes": [*found.notes, cost]})


def _without_error_that_fp32_has_too(
    found: Diagnosis,
    options: DiagnoseOptions,
    arm: Arm,
    parent: Path,
    environment: Mapping[str, str] | None,
) -> Diagnosis:
    """Return the diagnosis of a script that ended by itself, without that fault where it ends so in fp32 too.

    Raises:
        LaunchError: it does, and made no step.
    """
    try:
        seen, _, _ = _diagnosis_kept_functions_and_device_type(
            options, Arm.parse("fp32"), (), parent, environment
        )
        failure = seen.failure if seen.steps <= found.steps else ""
    except AmpCompareError as error:
        failure = str(error)
    is_equal = _without_numbers(found.failure) in _without_numbers(failure)
    if failure and not is_equal:
        note = f"whether the script ends so in fp32 too is not known: {failure}"
        return found.model_copy(update={"notes": [*found.notes, note]})
    if is_equal and not found.steps:
        raise LaunchError(f"the script showed no step to watch, in fp32 neither: {found.failure}")
    first, *others = found.faults
    text = first.text.replace("ends by itself", "ends by itself, which it does not in fp32", 1)
    faults = others if is_equal else [first.model_copy(update={"text": text}), *others]
    failure = f"{found.failure}; in fp32 too" if is_equal else found.failure
    found = found.model_copy(update={"faults": faults, "failure": failure})
    return found.model_copy(update={"verdict": diagnosis_sentence(arm, found)})


def _without_numbers(text: str) -> str:
    """Return an error without its numbers, of which two runs have others."""
    return NUMBER.sub("", text)


def _diagnosis_kept_functions_and_device_type(
    options: DiagnoseOptions,
    arm: Arm,
    lines: Sequence[str],
    parent: Path,
    environment: Mapping[str, str] | None,
) -> tuple[Diagnosis, list[str], str]:
    """Run a script, watched, in a separate process.

    Args:
        lines: file:line of calls that run in fp32.

    Returns:
        What was seen, the functions kept in fp32 by their line, and the device's type.
    """
    config, script = options.config, options.config.script
    assert script is not None
    folder = Path(tempfile.mkdtemp(dir=parent))
    answer = folder / "answer.json"
    request = StepWatchRequest(
        settings=exec_settings_for_watching(config, arm, folder),
        is_module=script.is_module,
        steps=options.steps,
        reference=options.reference,
        lines=list(lines),
        answer=str(answer),
        ended=str(folder / ENDED),
    )
    code = run_examined_script(config, folder, "diagnosed", request, answer, "step to watch", environment)
    read = json.loads(answer.read_text(encoding="utf-8"))
    failure = exit_code_error_text(code, folder) if code else ""
    found = Diagnosis.model_validate({**read["diagnosis"], "script": script.command, "failure": failure})
    return (
        found.model_copy(update={"verdict": diagnosis_sentence(arm, found)}),
        read["functions"],
        read["device"],
    )


def exec_settings_for_watching(config: RunConfig, arm: Arm, folder: Path) -> dict[str, Any]:
    """Return the fields of `ExecSettings` for a script that is watched under an arm, by their names."""
    assert config.script is not None
    return {
        **exec_fields_under_arm(config, str(arm)),
        "record": str(folder / CellFile.SCRIPT),
        "guards": "off",
        "arguments": config.script.arguments_for(config.recipe.seed, config.arm, folder),
    }


def say_writable_files(say: Callable[[str], Any]) -> None:
    """Say which files of the user a script that is examined could change, where there are any."""
    if not can_sandbox(tempfile.gettempdir()):
        say(WITHOUT_OVERLAYS)


def run_examined_script(
    config: RunConfig,
    folder: Path,
    kind: str,
    request: ExaminedScriptRequest,
    answer: Path,
    what: str,
    environment: Mapping[str, str] | None = None,
) -> int:
    """Run the script of a configuration under examination, to its end, and return its exit code.

    Args:
        kind: of `ampcompare.script.examination.examined_run`, which runs once or on each rank.
        answer: file that it leaves.
        what: it leaves one for.
    """
    request.write(folder / "request.json")
    start = [sys.executable]
    if config.processes > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(config.processes)]
    own = {CELL_FOLDER: str(folder), "PYTHONUNBUFFERED": "1", **EXAMINING}
    start += ["-m", "ampcompare.script.examination.examined_run", kind, str(folder / "request.json")]
    command = module_command("ampcompare.experiment.launch.script.supervise", *start)
    with sandbox_of_cell(config, folder) as sandbox, (folder / CellFile.LOG).open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # held open: the run ends with this process
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**script_environment(config.threads), **(environment or {}), **own, **sandbox.environment},
            start_new_session=True,
        )
        try:
            code = _exit_code_of_watched_run(process, folder / ENDED)
        finally:
            _stop_process_and_ranks(process)
            assert process.stdin is not None
            process.stdin.close()
    if answer.exists():
        return code
    if code:
        raise ERRORS.get(code, LaunchError)(
            f"the script showed no {what}: {exit_code_error_text(code, folder)}"
        )
    raise LaunchError(
        f"the script ended without a {what}: a step is a backward pass and an optimizer step, in the started process "
        "or its ranks (--nproc-per-node); let it train longer, or lower --steps"
    )


def _stop_process_and_ranks(process: subprocess.Popen[bytes]) -> None:
    """Stop all running processes; torchrun gets time to end its ranks, which are in their own sessions."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=SECONDS_OF_TORCHRUN)
    kill_with_descendants(process.pid)
    process.wait()


def _exit_code_of_watched_run(process: subprocess.Popen[bytes], ended: Path) -> int:
    """Return the exit code of the watched process of a run, at its end.

    Other ranks get some seconds after the watched one has ended: they may still be running, waiting for it.
    """
    deadline = time.monotonic() + TIME_LIMIT
    while time.monotonic() < deadline:
        seconds = SECONDS_TO_END if ended.exists() else SECONDS_BETWEEN_LOOKS
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            if seconds == SECONDS_BETWEEN_LOOKS:
                continue
            code = 0
        text = ended.read_text(encoding="utf-8") if ended.exists() else ""
        return int(text) if text else code
    raise LaunchError(f"the script had not made its steps after {TIME_LIMIT:g} s and was ended")


def _last_own_line_in_log(log: Path) -> str:
    """Return the last line of ampcompare in the output of a run; torchrun may have written more after it."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.removeprefix(NOTE) for line in reversed(lines) if line.startswith(NOTE)), "")


def exit_code_error_text(code: int, folder: Path) -> str:
    """Return why a script ended with an exit code other than 0: its error, a refusal, or its last line."""
    from ampcompare.experiment.launch.script.launcher import last_line_of_output

    error = (read_script_rows(folder / CellFile.SCRIPT).ended or {}).get("error")
    refusal = _last_own_line_in_log(folder / CellFile.LOG) if code in REFUSALS else ""
    killed = f"killed by {signal.Signals(-code).name}" if code < 0 else ""
    text = str(error or refusal or killed or last_line_of_output(code, folder))
    return printable_line(text, 1000, keep_end=600)
