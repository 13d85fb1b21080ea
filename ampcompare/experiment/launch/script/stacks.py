"""Run a cell in another environment of Python and torch: by the ampcompare that is there, or under one recorder file.

The recorder (`script/recording/recorder.py.txt`) is copied into the folder of the cell and needs torch alone, so that
it can be run by hand where this command cannot reach: `write_record_of_recorded_cell` makes a record of what it has
written.
"""

import contextlib
import dataclasses
import json
import os
import shlex
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock

from ampcompare.backends.arm import Arm
from ampcompare.base.errors import (
    ConfigError,
    EnvironmentUnfit,
    LaunchError,
    RecordError,
    UnsupportedCombination,
)
from ampcompare.base.files.run_files import CellFile
from ampcompare.base.files.write import write_atomically
from ampcompare.base.formatting import printable_line
from ampcompare.base.processes.sandbox import Sandbox
from ampcompare.base.processes.start import kill_with_descendants, module_command
from ampcompare.base.secrets.masking import hide_secrets_in_words, mask_secrets
from ampcompare.base.version import __version__
from ampcompare.experiment.launch.cell_files import (
    last_lines_of_file,
    make_cell_folder,
    make_forwarder_of_new_progress,
    write_cell_inputs,
    write_config,
    write_record,
    write_steps,
)
from ampcompare.experiment.launch.contract import (
    BY_HAND,
    Progress,
    StoppableProcess,
    record_of_interrupted_cell,
)
from ampcompare.experiment.launch.places import ANYWHERE, Place
from ampcompare.experiment.launch.script.launcher import (
    POLL_SECONDS,
    ScriptLauncher,
    failed_script_record,
    first_weights_config,
    first_weights_folder,
    script_cell_environment,
    script_record,
)
from ampcompare.experiment.launch.script.output import OutputReader
from ampcompare.experiment.launch.script.rows import ScriptRows, rows_that_stand_for_cell
from ampcompare.results.records.run import RECORDER_RUN, EngineInfo, RunRecord, read_record
from ampcompare.script.invocation.exec_settings import ExecSettings
from ampcompare.settings.config import RunConfig
from ampcompare.settings.script import ScriptConfig
from ampcompare.settings.stack import StackConfig

TEMPLATE = Path(__file__).parents[3] / "script" / "recording" / "recorder.py.txt"
MAX_SHOWN = 400
# of this one, not of the stack
OTHER_PYTHON = ("PYTHONHOME", "PYTHONSAFEPATH", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
TORCHRUN, OLD_LAUNCHER = "torch.distributed.run", "torch.distributed.launch"
MIN_TORCHRUN = (1, 9)
START_SECONDS = 300.0  # until a stack answers, and a script there has imported torch
# Fields of `ExecSettings` that the recorder reads.
READ_BY_RECORDER = ("arm", "record", "seed", "max_steps", "shift_seeds", "first_weights")

_known: dict[tuple[str, ...], "StackFacts"] = {}  # what was seen of stacks since this process began


class StackFacts:
    """What a stack has.

    Attributes:
        facts: versions, processor and Apex; empty where it could not be started.
        fault: why no cell can train there; "" if one can.
    """

    def __init__(self, name: str, facts: Mapping[str, Any], fault: str = "") -> None:
        self.name, self.facts = name, dict(facts)
        self.fault = fault
        if facts.get("no_torch"):
            self.fault = f"the stack {name} has no torch that can be imported: {facts['no_torch']}"

    @property
    def has_this_ampcompare(self) -> bool:
        """Whether it has this version of ampcompare."""
        return self.facts.get("ampcompare") == __version__

    @property
    def apex_version(self) -> str:
        """The version of the genuine Apex there; "" if there is none."""
        return str(self.facts.get("apex") or "")

    @property
    def versions_text(self) -> str:
        """What is there, in words."""
        found = [f"Python {self.facts.get('python')}", f"torch {self.facts.get('torch')}"]
        return ", ".join([*found, *[f"the genuine Apex {self.apex_version}"] * bool(self.apex_version)])

    def can_train_by_own_ampcompare(self, config: RunConfig) -> bool:
        """Return whether its own ampcompare trains a cell; a script for the genuine Apex runs as it does today."""
        return self.has_this_ampcompare and not (self.apex_version and _script_if_as_written(config))


def _script_if_as_written(config: RunConfig) -> ScriptConfig | None:
    """Return the script of a cell under the arm `script`, which changes nothing of it; None for any other cell."""
    return config.script if config.parsed_arm.is_as_written else None


def inspect_stack(stack: StackConfig, folder: Path) -> StackFacts:
    """Start the Python of a stack once, and return what it has; the recorder was copied into the folder."""
    if stack.command in _known:
        return _known[stack.command]
    words = [*stack.python_command_for_cell(folder), str(folder.resolve() / CellFile.RECORDER), "--probe"]
    shown = printable_line(shlex.join(hide_secrets_in_words(stack.command)), MAX_SHOWN)
    try:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=environment_without_own_python(), start_new_session=True,
        )  # fmt: skip
    except (OSError, ValueError) as error:
        return StackFacts(
            stack.name, {}, f"the stack {stack.name} cannot be started: {shown}: {_one_line_of_error(error)}"
        )
    try:
        out, err = process.communicate(timeout=START_SECONDS)
    except subprocess.TimeoutExpired:
        kill_with_descendants(process.pid)
        process.communicate()
        fault = f"the stack {stack.name} does not answer: {shown} printed nothing of its Python in {START_SECONDS:g} s"
        found = StackFacts(stack.name, {}, fault)
    else:
        found = _parse_stack_facts(stack.name, shown, process.returncode, out, err)
    _known[stack.command] = found
    return found


def current_stack_facts(config: RunConfig) -> dict[str, Any]:
    """Return what the stack of a cell has now; nothing where it cannot be started."""
    assert config.stack is not None
    with tempfile.TemporaryDirectory(prefix=".stack.") as place:
        copy_recorder(Path(place))
        found = inspect_stack(config.stack, Path(place))
    return {} if found.fault else found.facts


def _parse_stack_facts(name: str, shown: str, code: int, out: bytes, err: bytes) -> StackFacts:
    for line in reversed(out.decode(errors="replace").splitlines()):
        with contextlib.suppress(ValueError):
            facts = json.loads(line)
            if isinstance(facts, dict) and "python" in facts:
                return StackFacts(name, facts)
    said = [line for line in err.decode(errors="replace").splitlines() if line.strip()]
    last = f": {printable_line(said[-1].strip(), MAX_SHOWN)}" if said else ""
    return StackFacts(
        name, {}, f"the stack {name} cannot be started: {shown} ended with exit code {code}{last}"
    )


def _one_line_of_error(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or str(error)


def environment_without_own_python(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables for another Python: without those that say where this one finds its modules.

    Args:
        environment: from which they are taken; None for those of this process.
    """
    given = os.environ if environment is None else environment
    return {name: value for name, value in given.items() if name not in OTHER_PYTHON}


def copy_recorder(folder: Path) -> None:
    """Copy the recorder into the folder of a cell."""
    write_atomically(folder / CellFile.RECORDER, TEMPLATE.read_text(encoding="utf-8"))


def recorder_command_words(config: RunConfig, folder: Path) -> list[str]:
    """Return the words after the Python of a stack that record a cell of a script."""
    script = config.script
    assert script is not None
    seed = config.recipe.seed
    options = ["--seed", str(seed), *(["--shift-seeds"] if script.shift_seeds else [])]
    options += ["--max-steps", str(script.max_steps)] if script.max_steps is not None else []
    options += ["-m"] if script.is_module else []
    return [*options, script.name, *script.arguments_for(seed, config.arm, folder.resolve())]


class _StartedProcess:
    """A process of the system, as the launcher of scripts works with one."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self.pid, self.stdout = process.pid, process.stdout

    def poll(self, seconds: float = 0.0) -> int | None:
        """Return the exit code, or None if the process has not ended in some seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def wait(self) -> int:
        """Return the exit code when the process has ended."""
        code = self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        return code

    def kill(self) -> None:
        """Kill it with its descendants."""
        kill_with_descendants(self.pid)


class StackLauncher(ScriptLauncher):
    """Starts one process per cell, by the words of its stack."""

    keeps_weights = False  # the recorder does, whatever else the stack has

    def __init__(self, place: Place = ANYWHERE) -> None:
        super().__init__(place)
        self._process: StoppableProcess[Any] = StoppableProcess(lambda process: process.kill())
        self._changed: tuple[object, float] = ((), 0.0)

    def launch(
        self, config: RunConfig, folder: Path, on_progress: Callable[[Progress], None] | None = None
    ) -> RunRecord:
        assert config.stack is not None
        started = datetime.now(UTC).isoformat(timespec="milliseconds")
        make_cell_folder(folder)
        copy_recorder(folder)
        write_config(config, folder)
        if config.script is not None:
            _write_recorder_command(config, folder)
        stack = inspect_stack(config.stack, folder)
        own = stack.can_train_by_own_ampcompare(config) and not self.keeps_weights
        fault = stack.fault or ("" if own else _why_recorder_cannot_train(config, stack))
        if fault:
            is_by_hand = config.script is not None and not stack.facts
            by_hand = f"; {CellFile.BY_HAND} in {folder} says how to record it by hand" if is_by_hand else ""
            record = failed_script_record(config, fault + by_hand, started=started)
            if is_by_hand:
                record = record.model_copy(update={"environment": {**record.environment, BY_HAND: True}})
        elif own:
            return self._launch_inside_stack(config, folder, stack, on_progress)
        else:
            self._changed = ((), time.monotonic())
            record = super().launch(config, folder, on_progress)
            record = record_with_stack(record, rows_that_stand_for_cell(folder), stack.facts)
        write_record(record, folder)
        return record

    def _start_process(self, config: RunConfig, script: Any, folder: Path, sandbox: Sandbox) -> Any:
        assert config.stack is not None
        environment = {
            **script_cell_environment(config, folder),
            **self._place.environment,
            **sandbox.environment,
        }
        if config.device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        words = list(map(sandbox.path_seen_in_sandbox, recorder_command_words(config, folder)))
        record = ["--record", str((folder / CellFile.SCRIPT).resolve())]
        record += ["--save-weights", str((folder / CellFile.WEIGHTS).resolve())] if self.keeps_weights else []
        if script.first_weights is not None and not begins_with_own_stack_weights(config):
            record += ["--first-weights", str(first_weights_folder(config, folder) / CellFile.WEIGHTS)]
        start = config.stack.python_command_for_cell(folder)
        if config.processes > 1 or script.torchrun:
            start += _words_that_start_ranks(_known[config.stack.command].facts, config.processes)
        command = [*start, str((folder / CellFile.RECORDER).resolve()), *record, *words]
        return self._open_process(command, environment_without_own_python(environment))

    def _open_process(
        self, command: Sequence[str], environment: Mapping[str, str], **options: Any
    ) -> _StartedProcess:
        """Start a command that ends with this process, in the sandbox that the environment names."""
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **options}
        start = module_command("ampcompare.experiment.launch.script.supervise", *command)

        def start_command() -> _StartedProcess:
            try:
                with self._place.processes_kept_on_cores():
                    process = subprocess.Popen(
                        start, stdin=subprocess.PIPE, env=dict(environment), start_new_session=True, **options
                    )
            except OSError as error:
                raise LaunchError(f"cannot start {start[0]}: {_one_line_of_error(error)}") from None
            return _StartedProcess(process)

        process: _StartedProcess = self._process.start(start_command)
        return process

    def _ask_process_to_stop(self, process: Any) -> None:
        super()._ask_process_to_stop(process)

    def _why_cell_is_stuck(self, config: RunConfig, folder: Path) -> str:
        """Return that a cell has done nothing for long: the recorder touches its file while its process computes."""
        seen = [
            path.stat() for path in (*folder.glob(CellFile.SCRIPTS), folder / CellFile.LOG) if path.exists()
        ]
        state, now = tuple((one.st_mtime_ns, one.st_size) for one in seen), time.monotonic()
        if state != self._changed[0]:
            self._changed = state, now
        limit = (
            config.stall_timeout
            if (folder / CellFile.SCRIPT).exists()
            else max(START_SECONDS, config.stall_timeout)
        )
        if now - self._changed[1] < limit:
            return ""
        name = config.stack.name if config.stack is not None else ""
        return (
            f"the script hangs in the stack {name}: it printed, recorded and computed nothing for "
            f"{limit:g} s, and was ended; --stall-timeout sets that time"
        )

    def _launch_inside_stack(
        self,
        config: RunConfig,
        folder: Path,
        stack: StackFacts,
        on_progress: Callable[[Progress], None] | None,
    ) -> RunRecord:
        """Train a cell by the ampcompare of its stack, as a scheduler would."""
        assert config.stack is not None
        write_cell_inputs(config.model_copy(update={"stack": None}), folder)
        read = make_forwarder_of_new_progress(folder, on_progress)
        (folder / CellFile.PROGRESS).unlink(missing_ok=True)  # else the cell would count as one that was lost
        words = [
            *config.stack.python_command_for_cell(folder),
            "-m",
            "ampcompare.experiment.launch.dispatch.cell",
            str(folder.resolve()),
        ]
        environment = {**environment_without_own_python(), **self._place.environment}
        with self._process.busy_with_cell(), (folder / CellFile.LAUNCHER_LOG).open("wb") as log:
            process = self._open_process(words, environment, stdout=log, stderr=log)
            if self._is_asked_to_stop():
                self._ask_process_to_stop(process)
            while process.poll(POLL_SECONDS) is None:
                read()
            read()
            self._process.raise_if_closed()
            self._process.end_process()
            code = process.wait()
        path = folder / CellFile.RECORD
        if path.exists():
            record = read_record(path)
        elif self._is_asked_to_stop():
            record = record_of_interrupted_cell(config)
        else:
            said = "".join(last_lines_of_file(folder / CellFile.LAUNCHER_LOG, 1))
            record = failed_script_record(
                config, f"the stack {stack.name} ended with exit code {code}: {said}"
            )
        record = record.model_copy(update={"cell": config.digest(), "config": config})
        write_config(config, folder)
        write_record(record, folder)
        return record


class FirstWeightsLauncher(StackLauncher):
    """Records a step of a script in a stack, and keeps the weights with which it begins."""

    keeps_weights = True

    def record_first_weights_once_per_seed(self, config: RunConfig, folder: Path) -> RunRecord | None:
        """Record the first weights that a cell is to begin with, unless that was done for another cell of its seed.

        Returns:
            The record of a cell for which there are none; None if there are, or it needs none.
        """
        if (
            config.script is None
            or config.script.first_weights is None
            or begins_with_own_stack_weights(config)
        ):
            return None
        started = datetime.now(UTC).isoformat(timespec="milliseconds")
        target, recorded = first_weights_folder(config, folder), first_weights_config(config)
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock"):
            record = None
            with contextlib.suppress(OSError, RecordError):
                record = read_record(target / CellFile.RECORD)
            if record is None or not _has_first_weights(record, target):
                (target / CellFile.WEIGHTS).unlink(missing_ok=True)
                record = self.launch(recorded, target)
        if _has_first_weights(record, target):
            return None
        make_cell_folder(folder)
        write_config(config, folder)
        if self._is_asked_to_stop():
            return record_of_interrupted_cell(config)
        why = f"there are no first weights of the stack {config.script.first_weights.name}: {record.error}"
        found = failed_script_record(config, why, started=started)
        write_record(found, folder)
        return found


def _has_first_weights(record: RunRecord, folder: Path) -> bool:
    return record.status == "completed" and (folder / CellFile.WEIGHTS).exists()


def begins_with_own_stack_weights(config: RunConfig) -> bool:
    """Return whether the first weights of a cell are those of its stack anyway: the script as it is trains there."""
    script = _script_if_as_written(config)
    return script is not None and config.stack is not None and config.stack == script.first_weights


def trace_command_and_stack_facts(
    stack: StackConfig,
    script: str,
    arguments: Sequence[str],
    folder: Path,
    *,
    seed: int,
    steps: int,
    request: str,
) -> tuple[list[str], StackFacts]:
    """Return the command that runs a script for some steps in a stack and leaves what it trained in a folder.

    Where the stack has this ampcompare, and no genuine Apex, `request` asks `script.examination.rewrite_run` for that.
    Else the recorder writes `record.jsonl`, `first.pt` and `last.pt`.

    Raises:
        EnvironmentUnfit: the stack cannot be started, or has no torch.
    """
    copy_recorder(folder)
    found = inspect_stack(stack, folder)
    if found.fault:
        raise EnvironmentUnfit(found.fault)
    if found.has_this_ampcompare and not found.apex_version:
        words = ["-m", "ampcompare.script.examination.rewrite_run", request]
    else:
        files = {"record": "record.jsonl", "save-weights": CellFile.WEIGHTS, "save-last": "last.pt"}
        options = [word for name, file in files.items() for word in (f"--{name}", str(folder / file))]
        limits = ["--seed", str(seed), "--max-steps", str(steps)]
        words = [str(folder / CellFile.RECORDER), *options, *limits, script, *arguments]
    return module_command(f"{__package__}.supervise", *stack.python_command_for_cell(folder), *words), found


def run_script_in_stack(stack: StackConfig, settings: ExecSettings, words: Sequence[str]) -> int:
    """Run a script in a stack, with the output and the standard input of this process; return its exit code.

    Args:
        stack: the environment, by the command of its Python.
        settings: how the script is run; the path of its record is absolute. The recorder keeps a record in any case,
            which is removed where none is asked for.
        words: the script or module with its arguments.

    Raises:
        EnvironmentUnfit: the stack cannot be started, or has no torch.
        UnsupportedCombination: the arm or an option needs an ampcompare there.
    """
    with tempfile.TemporaryDirectory(prefix="ampcompare-stack-") as place:
        copy_recorder(Path(place))
        found = inspect_stack(stack, Path(place))
        if found.fault:
            raise EnvironmentUnfit(found.fault)
        if found.has_this_ampcompare and not (_is_as_written(settings) and found.apex_version):
            start = ["-m", "ampcompare", "exec", *settings.exec_options]
            start += ["--ledger"] if settings.ledger else []
        else:
            kept = settings.record or str(Path(place, CellFile.SCRIPT))
            start = [
                str(Path(place, CellFile.RECORDER)),
                "--record",
                kept,
                *_recorder_options(stack, settings),
            ]
        process = subprocess.run(
            [*stack.python_command_for_cell(Path(place)), *start, *words],
            env=environment_without_own_python(),
            check=False,
        )
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _is_as_written(settings: ExecSettings) -> bool:
    return settings.arm is not None and Arm.parse(settings.arm).is_as_written


def _recorder_options(stack: StackConfig, settings: ExecSettings) -> list[str]:
    """Return the words that ask the recorder for what `exec` was asked for.

    Raises:
        UnsupportedCombination: the recorder alone cannot do what is asked.
    """
    if not _is_as_written(settings):
        raise UnsupportedCombination(_text_of_need(f"arm {settings.arm}", stack))
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        is_read = field.name in READ_BY_RECORDER and not (field.name == "shift_seeds" and value == "all")
        if value != field.default and not is_read:
            raise UnsupportedCombination(_text_of_need(f"--{field.name.replace('_', '-')}", stack))
    words = [] if settings.seed is None else ["--seed", str(settings.seed)]
    words += ["--shift-seeds"] if settings.shift_seeds else []
    words += [] if settings.max_steps is None else ["--max-steps", str(settings.max_steps)]
    return [*words, *([] if settings.first_weights is None else ["--first-weights", settings.first_weights])]


def _text_of_need(what: str, stack: StackConfig) -> str:
    return f"{what} needs ampcompare {__version__}, which the stack {stack.name} lacks"


def _why_recorder_cannot_train(config: RunConfig, stack: StackFacts) -> str:
    """Return why the recorder cannot train a cell; "" if it can."""
    there = stack.facts.get("ampcompare")
    has = f"has ampcompare {there}, not {__version__}" if there else "has no ampcompare"
    if config.script is None and not stack.has_this_ampcompare:
        return f"the stack {stack.name} {has}, which trains a recipe; the recorder can only run a script after --"
    if (script := _script_if_as_written(config)) is None:
        of_apex = (
            " or is to train with its own Apex" if stack.apex_version and stack.has_this_ampcompare else ""
        )
        return f"the stack {stack.name} {has}{of_apex}: only the arm script, of a script after --, can train there"
    if config.first_weights == "twin":
        return f"the stack {stack.name} {has}, which a twin needs"
    if script.shift_seeds == "all":
        return f"the stack {stack.name} {has}, which --shift-seeds all needs; global generators can be shifted there"
    return ""


def _words_that_start_ranks(facts: Mapping[str, Any], processes: int) -> list[str]:
    version = tuple(
        int(word) for word in str(facts.get("torch", "")).split("+")[0].split(".")[:2] if word.isdecimal()
    )
    if version >= MIN_TORCHRUN:
        return ["-m", TORCHRUN, "--standalone", f"--nproc_per_node={processes}"]
    return ["-m", OLD_LAUNCHER, f"--nproc_per_node={processes}", "--use_env"]


def record_with_stack(
    record: RunRecord, rows: ScriptRows, facts: Mapping[str, Any] | None = None
) -> RunRecord:
    """Return the record of a cell that the recorder has written, with the versions of its stack."""
    header = rows.header.get("environment") or facts or {}
    code = {name: record.environment[name] for name in ("exit_code",) if name in record.environment}
    told = {name: value for name, value in header.items() if value not in (None, [])}
    told = {name: value for name, value in told.items() if name not in ("host", "no_torch")}
    if "apex_kernels" in told:
        told["apex_kernels"] = " ".join(told["apex_kernels"])
    environment = {**told, **rows.setup.get("device", {}), **code, RECORDER_RUN: rows.header.get("run")}
    engine = None
    if apex := header.get("apex"):
        engine = EngineInfo(name="nvidia", version=str(apex), reason="the genuine Apex of the stack")
    return record.model_copy(
        update={"environment": environment, "host": header.get("host") or record.host, "engine": engine}
    )


def _write_recorder_command(config: RunConfig, folder: Path) -> None:
    """Write the command that records a cell by hand, on another machine too."""
    assert config.stack is not None
    words = [
        "python",
        str(folder.resolve() / CellFile.RECORDER),
        *hide_secrets_in_words(recorder_command_words(config, folder)),
    ]
    text = (
        f"To record this cell by hand, copy this folder and the script to where the stack {config.stack.name} is, and "
        f"run there:\n\n    cd {shlex.quote(os.getcwd())}\n    {shlex.join(words)} 2>&1 | tee {CellFile.LOG}\n\n"
        f"Then bring {CellFile.SCRIPT} and {CellFile.LOG} back into this folder, and run the same comparison again.\n"
    )
    write_atomically(folder / CellFile.BY_HAND, mask_secrets(text))


def write_record_of_recorded_cell(
    config: RunConfig, folder: Path, say: Callable[[str], Any] = lambda text: None
) -> None:
    """Make a record of a cell that the recorder has finished, by hand or for a command that was killed since."""
    if config.stack is None or config.script is None or not (folder / CellFile.SCRIPT).exists():
        return
    rows = rows_that_stand_for_cell(folder)
    run = rows.header.get("run")
    if run is None or rows.ended is None or rows.ended.get("exit_code") != 0 or not rows.steps:
        return
    with contextlib.suppress(Exception):  # one that cannot be read is no reason to leave this one out
        if read_record(folder / CellFile.RECORD).environment.get(RECORDER_RUN) == run:
            return
    wrong = [name for name, there, here in (
        ("script", rows.header.get("sha256"), config.script.sha256),
        ("seed", rows.header.get("seed"), str(config.recipe.seed)),
    ) if there != here and there is not None]  # fmt: skip
    if wrong:
        say(f"{folder / CellFile.SCRIPT} is of another {wrong[0]} than the cell, and is not used")
        return
    try:
        record = record_from_recorded_folder(config, folder, rows)
    except ConfigError as error:
        say(f"{folder / CellFile.SCRIPT} is not used: {error}")
        return
    make_cell_folder(folder)
    write_config(config, folder)
    write_steps(folder, rows.steps)
    write_record(record, folder)


def record_from_recorded_folder(config: RunConfig, folder: Path, rows: ScriptRows) -> RunRecord:
    """Return the record of a cell from what lies in its folder: the rows of the recorder, and the output."""
    assert config.script is not None
    values: dict[str, list[float]] = {}
    faults: dict[str, str] = {}
    if any(metric.pattern is not None for metric in config.script.metrics):
        log = folder / CellFile.LOG
        if not log.exists():
            raise ConfigError(
                f"there is no {CellFile.LOG} with the output of the script, which metrics are read from"
            )
        with tempfile.TemporaryDirectory() as place:
            reader = OutputReader(log.open("rb"), Path(place, "log"), config.script.metrics)
            pump = threading.Thread(target=reader.read_to_end)
            pump.start()
            pump.join()
        values, faults = reader.values, reader.faults_of_matched_values()
    seconds = sum(step.seconds for step in rows.steps)
    started = datetime.fromtimestamp((folder / CellFile.SCRIPT).stat().st_mtime, UTC).isoformat(
        timespec="milliseconds"
    )
    record = script_record(config, rows, values, wall_seconds=seconds, started=started, faults=faults)
    return record_with_stack(record, rows)
