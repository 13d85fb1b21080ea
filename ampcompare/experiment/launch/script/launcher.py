"""Run a user's script as a cell: `ampcompare exec` with the arm, in a separate process."""

import contextlib
import hashlib
import json
import math
import os
import re
import signal
import statistics
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from ampcompare.base.environment.fingerprint import THREAD_VARIABLES, environment_fingerprint, host_name
from ampcompare.base.environment.variables import CELL_FOLDER, CODE_FOLDER, MASK
from ampcompare.base.files.run_files import CellFile, RunFile
from ampcompare.base.formatting import format_few_names
from ampcompare.base.guard_modes import GuardMode
from ampcompare.base.processes.client import ForkedProcess
from ampcompare.base.processes.sandbox import WITHOUT_OVERLAYS, Sandbox
from ampcompare.base.processes.script_environment import script_environment
from ampcompare.base.processes.start import exit_code_text
from ampcompare.base.secrets.masking import mask_secrets, value_of_secret_names_variable
from ampcompare.experiment.launch.cell_files import (
    drop_cell_outputs_from_code,
    last_lines_of_file,
    make_cell_folder,
    make_finder_of_other_cells_files_read,
    make_finder_of_stale_files_read,
    record_with_loaded_code,
    sandbox_of_cell,
    write_config,
    write_record,
    write_steps,
)
from ampcompare.experiment.launch.contract import Progress, record_of_failed_cell
from ampcompare.experiment.launch.forked import AskedToStopBeforeStart, ForkServerLauncher
from ampcompare.experiment.launch.places import ANYWHERE, Place
from ampcompare.experiment.launch.script.exec_fields import exec_fields_under_arm
from ampcompare.experiment.launch.script.output import OutputReader, PrintedValue
from ampcompare.experiment.launch.script.rows import (
    ScriptRows,
    first_error_of_children,
    read_script_rows,
    rows_of_training_children,
    rows_that_stand_for_cell,
)
from ampcompare.results.records.evaluation import EpochResult
from ampcompare.results.records.metric import metrics_of_script
from ampcompare.results.records.run import EngineInfo, RunRecord, RunSummary, loss_tail_summary_fields
from ampcompare.results.records.step import StepRecord
from ampcompare.script.invocation.exec_settings import ExecSettings
from ampcompare.script.legacy.old_script import COMPAT_HINT, may_compat_torch_prevent
from ampcompare.settings.config import RunConfig
from ampcompare.settings.script import LOSS, ScriptConfig, ScriptMetric
from ampcompare.training.run_summary import StepSampler

POLL_SECONDS = 0.2
PIPE_SECONDS = 2.0
EXIT_SECONDS = 60.0  # of a process that has written the last row of its record
# Exit codes of `ampcompare exec` for errors of ampcompare itself.
OUR_ERRORS = (2, 3, 4)
MAX_LAST_LINES = 40
USAGE = 2  # the exit code of argparse, whose usage comes before its error
MAX_FILES = 200  # that a record names
WORD = re.compile(r"[^\W_]")
NO_REASON = re.compile(r"ampcompare: (\d+ steps?, \d+ skipped|the record has no step|--device cpu: )")
NO_LOSS = (
    "its training loss is not known, as no backward pass began at one, as where gradients are set by hand; name what "
    "it prints or logs by --metric NAME=REGEX, which --list-metrics shows"
)
TAIL_SHARE = 10  # the default metric is over the last tenth of the losses
OPTIONS = ("-W", "ignore::FutureWarning")  # of Python
ONE_PROCESS = (
    "the recorder of a stack sees no processes that a script starts by itself, as by torch.multiprocessing: "
    "let torchrun start them, with --nproc-per-node"
)
EXEC, TORCHRUN = "ampcompare.cli:main", "torch.distributed.run"


class ScriptLauncher(ForkServerLauncher):
    """Forks one process per cell: that of the script, or torchrun's, which starts as many as the configuration says."""

    loaded = (
        *("ampcompare.script.arm_process", "ampcompare.guards.hooks"),
        *("ampcompare.cli.exec_command", "ampcompare.cli.group"),
    )
    python_options = OPTIONS

    def __init__(self, place: Place = ANYWHERE) -> None:
        super().__init__(place)
        self._threads: list[str | None] = []  # of the server
        self._has_copies = False  # scripts run in copies of their folders, which was said
        self._stuck = ""  # why the cell was ended

    def launch(
        self, config: RunConfig, folder: Path, on_progress: Callable[[Progress], None] | None = None
    ) -> RunRecord:
        assert config.script is not None
        make_cell_folder(folder)
        for old in (*folder.glob(CellFile.SCRIPTS), *folder.glob(CellFile.SCRIPT_TAILS)):
            old.unlink()
        write_config(config, folder)
        started, begin = datetime.now(UTC).isoformat(timespec="milliseconds"), time.perf_counter()
        code, self._stuck = 0, ""
        output: OutputReader | None = None
        files_read, readable = (
            make_finder_of_stale_files_read(folder),
            make_finder_of_other_cells_files_read(config),
        )
        with self._process.busy_with_cell(), sandbox_of_cell(config, folder) as sandbox:
            with contextlib.suppress(AskedToStopBeforeStart):
                code, output = self._run_script(config, config.script, folder, sandbox, on_progress)
            self._process.raise_if_closed()
        wall = time.perf_counter() - begin
        rows = rows_that_stand_for_cell(folder)
        write_steps(folder, rows.steps)
        if self._is_asked_to_stop():
            record = failed_script_record(config, "asked to stop", started=started).model_copy(
                update={"status": "interrupted"}
            )
        elif error := self._stuck or _why_script_failed(config.script, code, rows, folder):
            record = failed_script_record(
                config, error, exit_code=_exit_code_of_script_not_ampcompare(code, rows), started=started
            )
        else:
            assert output is not None
            record = script_record(
                config,
                rows,
                output.values,
                wall_seconds=wall,
                started=started,
                faults=output.faults_of_matched_values(),
            )
        record = self._place.record_with_place(record_with_loaded_code(record, folder))
        written = sandbox.written[:MAX_FILES]
        files = {"files": [one.path for one in written], "resumed": files_read()}
        facts = record.script or rows.script_facts()
        if others := readable():
            files["notes"] = [
                *facts.notes,
                f"{format_few_names(others)} is of another cell, which this one could read",
            ]
        record = record.model_copy(update={"script": facts.model_copy(update=files)})
        write_record(record, folder)
        return drop_cell_outputs_from_code(record, folder, sandbox.written)

    def _run_script(
        self,
        config: RunConfig,
        script: ScriptConfig,
        folder: Path,
        sandbox: Sandbox,
        on_progress: Callable[[Progress], None] | None,
    ) -> tuple[int, OutputReader]:
        """Return the exit code, and the output, which has been read."""
        process = self._start_process(config, script, folder, sandbox)
        if self._is_asked_to_stop():
            self._ask_process_to_stop(process)
        assert process.stdout is not None
        reader = OutputReader(process.stdout, folder / CellFile.LOG, script.metrics)
        pump = threading.Thread(target=reader.read_to_end, daemon=True)
        pump.start()
        try:
            counter = _RecordedStepCounter(folder / CellFile.SCRIPT, script.max_steps or 0)
            late = None
            runs = True
            while runs:
                runs = process.poll(POLL_SECONDS) is None
                if (progress := counter.read_progress()) is not None and on_progress is not None:
                    on_progress(progress)
                if runs and not self._stuck and (why := self._why_cell_is_stuck(config, folder)):
                    self._stuck = why
                    process.kill()
                if runs and late is None and counter.has_wait_since_end_passed(EXIT_SECONDS):
                    late = _highest_exit_code_of_ranks(folder)
                    if late is not None:  # as gloo waits where one rank frees its DDP before another
                        self.report_note(
                            f"{config.arm}: a process still runs {EXIT_SECONDS:g} s after its last row; it is ended"
                        )
                        process.kill()
            # a process that the script has left behind may hold the pipe open
            pump.join(timeout=PIPE_SECONDS)
        finally:
            self._process.end_process()
            pump.join(timeout=PIPE_SECONDS)
            code = process.wait()
        return code if late is None else late, reader

    def _why_cell_is_stuck(self, config: RunConfig, folder: Path) -> str:
        """Return why a cell has to be ended; a script that is silent may be in an evaluation."""
        return ""

    def _start_process(
        self, config: RunConfig, script: ScriptConfig, folder: Path, sandbox: Sandbox
    ) -> ForkedProcess:
        outside = {**script_cell_environment(config, folder), **self._place.environment}
        at = {CODE_FOLDER: sandbox.path_seen_in_sandbox(outside[CODE_FOLDER])}
        environment = {**outside, **sandbox.environment, **at}
        command = script_command(config, script, folder)
        start = command.index("ampcompare")
        command[start:] = map(sandbox.path_seen_in_sandbox, command[start:])
        if sandbox.is_partial and not self._has_copies:
            self._has_copies = True
            self.report_note(WITHOUT_OVERLAYS)
        function, words = EXEC, command[start + 1 :]
        if script.torchrun or config.processes > 1:
            function, words = f"{TORCHRUN}:main", command[command.index(TORCHRUN) + 1 :]
        threads = [outside.get(name) for name in THREAD_VARIABLES]
        if threads != self._threads:  # which libraries below torch read when they are loaded
            self._server.end_process()
            self._threads = threads
        return self._fork_cell_process(
            lambda server: server.start_fork(function, words, environment=environment), outside
        )

    def _ask_process_to_stop(self, process: ForkedProcess) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)


def _highest_exit_code_of_ranks(folder: Path) -> int | None:
    """Return the highest exit code that the ranks have recorded; None while one of them has not recorded its end."""
    ends = [
        read_script_rows(path).ended
        for path in (folder / CellFile.SCRIPT, *folder.glob(CellFile.RANK_SCRIPTS))
    ]
    codes = [end["exit_code"] or 0 for end in ends if end is not None]
    return max(codes) if len(codes) == len(ends) else None


def script_cell_environment(config: RunConfig, folder: Path) -> dict[str, str]:
    """Return the environment of a cell with a script."""
    assert config.script is not None
    own = {
        CELL_FOLDER: str(folder.resolve()),
        CODE_FOLDER: str(config.script.import_folder),
        MASK: value_of_secret_names_variable(),
    }
    return {**script_environment(config.threads), **own, "PYTHONUNBUFFERED": "1"}


def script_command(config: RunConfig, script: ScriptConfig, folder: Path) -> list[str]:
    """Return the command line of a cell."""
    start = [sys.executable, *OPTIONS, "-m"]
    if config.processes > 1 or script.torchrun:
        start = [sys.executable, "-m", TORCHRUN, "--standalone", "--nproc-per-node"]
        start += [str(config.processes), "-m"]
    weights = None
    if script.first_weights is not None:
        weights = str(first_weights_folder(config, folder) / CellFile.WEIGHTS)
    mode, passes = _guard_mode_and_last_pass(config)
    settings = ExecSettings(
        **exec_fields_under_arm(config, config.arm),
        twin=config.first_weights == "twin",
        first_weights=weights,
        max_steps=script.max_steps,
        record=str((folder / CellFile.SCRIPT).resolve()),
        guards=mode,
        guard_passes=passes,
    )
    module = ["-m"] if script.is_module else []
    arguments = script.arguments_for(config.recipe.seed, config.arm, folder.resolve())
    return [*start, "ampcompare", "exec", *settings.exec_options, *module, script.name, *arguments]


def _guard_mode_and_last_pass(config: RunConfig) -> tuple[GuardMode, int | None]:
    """Return how a cell looks for mistakes: in the passes that times leave out, or in all where they are errors.

    Returns:
        The mode of its guards, and after how many backward passes they end; None for never.
    """
    if config.guards != "warn":
        return config.guards, None
    return ("warn", config.warmup_steps) if config.warmup_steps else ("off", None)


def first_weights_folder(config: RunConfig, folder: Path) -> Path:
    """Return the folder in which the stack records the first weights of a cell, which cells of the same seed share."""
    above = folder.parent.parent if folder.parent.name == RunFile.CELLS else folder.parent
    return (above / RunFile.FIRST_WEIGHTS / first_weights_config(config).digest()).resolve()


def first_weights_config(config: RunConfig) -> RunConfig:
    """Return the settings under which a stack records the first weights of a cell: one step of the script as it is."""
    assert config.script is not None
    script = config.script.model_copy(update={"first_weights": None, "max_steps": 1, "metrics": ()})
    recording = {
        "arm": "script",
        "stack": config.script.first_weights,
        "first_weights": "seed",
        "script": script,
    }
    return config.model_copy(update=recording)


def _exit_code_of_script_not_ampcompare(code: int, rows: ScriptRows) -> int:
    """Return the exit code of a failed cell: what the script itself passes to `sys.exit` is none of ampcompare's."""
    is_scripts = rows.ended is not None and rows.ended.get("error") is None
    return code if code in OUR_ERRORS and not is_scripts else 3


def _why_script_failed(script: ScriptConfig, code: int, rows: ScriptRows, folder: Path) -> str:
    """Return why a script gave no result; "" if it did."""
    if code < 0:
        return f"the script {exit_code_text(code)}"
    ended = rows.ended or {}
    if str(ended.get("error")).startswith("EOFError: EOF when reading"):
        return "the script reads from standard input, but a cell has none; pass the answer as an option of the script"
    if code != 0 and (error := ended.get("error")):
        if str(error).startswith("ChildFailedError"):  # of torchrun, which quotes no rank
            error = first_error_of_children(folder) or error
        hint = f". {COMPAT_HINT[0].upper()}{COMPAT_HINT[1:]}"
        hint = hint if not script.compat_torch and may_compat_torch_prevent(str(error)) else ""
        untried = " (this cell tried no other arm)" if ended.get("advice") else ""  # as a preflight does
        return f"{error}{untried}{hint}"
    if not rows.steps and (children := len(rows_of_training_children(folder))):
        return (
            f"the script trains in {children} child processes, which are not the ranks of one process group. "
            "Let torchrun start all training processes: remove multiprocessing from the script, or use the "
            f"script's option for that, and put --nproc-per-node {children} before `--`; each process finds "
            "RANK, LOCAL_RANK and WORLD_SIZE in its environment"
        )
    if code != 0:
        return last_line_of_output(code, folder)
    if not rows.steps:
        called = f" (step() of {' and '.join(rows.optimizers)} was not called)" if rows.optimizers else ""
        only = f"; {ONE_PROCESS}" if "recorder" in rows.header and not called else ""
        return f"the script ended with exit code 0, but made no optimizer step{called}{only}"
    return "" if rows.ended else "the script's process ended before its record was complete"


def last_line_of_output(code: int, folder: Path) -> str:
    """Return the last line of a script's output, or ampcompare's own if it is about the end."""
    lines = last_lines_of_file(folder / CellFile.LOG, MAX_LAST_LINES)
    lines = [line for line in lines if not NO_REASON.match(line) and WORD.search(line)]  # no ruled line
    last = lines[-1] if lines else ""
    if last.startswith("ampcompare: "):
        return last.removeprefix("ampcompare: ")
    usage = [at for at, line in enumerate(lines) if line.lower().startswith("usage:")]
    said = (
        f"{last} ({' '.join(' '.join(lines[usage[-1] : -1]).split())})" if code == USAGE and usage else last
    )
    return f"the script ended with exit code {code}" + (f": {said}" if said else "")


class _RecordedStepCounter:
    """Counts the steps in a record that another process writes, and notes its end."""

    def __init__(self, path: Path, total: int) -> None:
        self._path = path
        self._total = total
        self._offset = 0
        self._steps = 0
        self._loss: float | None = None
        self._ended: float | None = None

    def read_progress(self) -> Progress | None:
        """Return the progress if there is any since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                block = file.read()
        except OSError:
            return None
        whole = block[: block.rfind(b"\n") + 1]
        if not whole:
            return None
        self._offset += len(whole)
        for line in whole.splitlines():
            row = json.loads(line)
            self._steps += row.get("kind") == "step" and row["optimizer"] == 0
            if row.get("kind") == "backward" and isinstance(row["loss"], float):
                self._loss = row["loss"]
            if row.get("kind") == "end":
                self._ended = time.monotonic()
        return Progress(self._steps, self._total, 0, loss=self._loss)

    def has_wait_since_end_passed(self, seconds: float) -> bool:
        """Return whether the end of the record was read so many seconds ago; once for each time that has passed."""
        if self._ended is None or time.monotonic() - self._ended < seconds:
            return False
        self._ended = time.monotonic()
        return True


@dataclass
class _MetricValues:
    """What the metrics of a script came to.

    Attributes:
        values: the one that counts, by metric; the training loss where a script has no metric.
        steps: at which step a value was printed, where a line says so.
        seen: how many values there were, those of a progress bar aside.
        notes: for the record.
        lost: why the first metric is no number; "" if it is one.
        failure: why there is no result at all; "" if there is one.
    """

    values: dict[str, float] = field(default_factory=dict)
    steps: dict[str, float] = field(default_factory=dict)
    seen: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    lost: str = ""
    failure: str = ""


def _metric_values_of_script(
    script: ScriptConfig, rows: ScriptRows, printed: Mapping[str, Sequence[float]], faults: Mapping[str, str]
) -> _MetricValues:
    """Return what the metrics of a script came to, up to the first that gives no result."""
    read = _MetricValues()
    for metric in script.metrics:
        known = printed[metric.name] if metric.pattern is not None else rows.scalars.get(metric.name, [])
        if not known:
            read.failure = _why_metric_has_no_value(metric, rows)
            return read
        found, fault, note = _metric_values_fault_and_note(
            metric.name, list(known), is_alone=rows.rank is None or rows.rank[1] == 1
        )
        read.failure = fault or faults.get(metric.name, "")
        if read.failure:
            return read
        value = metric_value_that_counts(metric, found)
        if not read.values:
            read.lost = _why_metric_is_no_number(metric, found, value)
        read.values[metric.name] = value
        read.seen[metric.name] = sum(not getattr(each, "passing", False) for each in found)
        read.notes += [note] if note else []
        if isinstance(value, PrintedValue):
            read.steps[metric.name] = value.step
    if not script.metrics:
        read.values[LOSS] = statistics.fmean(rows.losses[-max(1, len(rows.losses) // TAIL_SHARE) :])
    return read


def _summary_with_metrics(
    config: RunConfig, rows: ScriptRows, metrics: _MetricValues, wall_seconds: float
) -> RunSummary:
    """Return the summary of a script that has results; it has diverged by its losses, or by its first metric."""
    diverged, divergence = _find_diverged_step_and_kind(rows.losses, config.nan_patience)
    if diverged is None and metrics.lost:
        diverged, divergence = max(0, len(rows.losses) - 1), metrics.lost
    (_, first), *others = metrics.values.items()
    is_finished = diverged is None
    epoch = EpochResult(
        epoch=0, samples=1, values=metrics.values, train_seconds=wall_seconds, eval_seconds=0.0
    )
    return _summarize_run(config, rows, rows.losses, wall_seconds).model_copy(
        update={
            "metric_final": first if is_finished else None,
            "metric_best": first if math.isfinite(first) else None,
            "others_final": dict(others) if is_finished else {},
            "epochs": [epoch],
            "diverged_step": diverged,
            "divergence": divergence,
        }
    )


def failed_script_record(config: RunConfig, error: str, *, exit_code: int = 3, **facts: Any) -> RunRecord:
    """Return the record of a script that gave no result."""
    record = record_of_failed_cell(
        config, mask_secrets(error, of_script=True), **environment_fingerprint(), exit_code=exit_code
    )
    return record.model_copy(update={"host": host_name(), **facts})


def script_record(
    config: RunConfig,
    rows: ScriptRows,
    printed: Mapping[str, Sequence[float]],
    *,
    wall_seconds: float,
    started: str,
    faults: Mapping[str, str] | None = None,
) -> RunRecord:
    """Return the record of a script that ended well.

    Args:
        printed: values of metrics with a pattern.
        faults: numbers of which a pattern has matched a part, by metric.
    """
    assert config.script is not None
    if not rows.losses and not config.script.metrics:
        return failed_script_record(config, NO_LOSS, started=started)
    metrics = _metric_values_of_script(config.script, rows, printed, faults or {})
    if metrics.failure:
        return failed_script_record(config, metrics.failure, started=started)
    summary = _summary_with_metrics(config, rows, metrics, wall_seconds)
    tracer = StepSampler()
    skipped = 0
    for step in rows.steps:
        skipped += not all(step.applied)
        tracer.add_step(step, skipped)
    return RunRecord(
        cell=config.digest(),
        arm=config.arm,
        status="completed" if summary.diverged_step is None else "diverged",
        config=config,
        engine=_engine_of_rows(config, rows),
        ledger=rows.ledger,
        half=rows.setup.get("half"),
        host=host_name(),
        environment={**environment_fingerprint(), **rows.setup.get("device", {})},
        metrics=metrics_of_script(config.script),
        unit="steps",
        summary=summary,
        trace=tracer.find_trace_of_run(_seconds_of_timed_steps(config, rows.steps)),
        started=started,
        script=rows.script_facts().model_copy(
            update={"notes": [*rows.notes, *metrics.notes], "printed": metrics.steps, "seen": metrics.seen}
        ),
        guards=rows.guards,
    )


def _metric_values_fault_and_note(
    name: str, values: list[float], *, is_alone: bool
) -> tuple[list[float], str, str]:
    """Return the values of rank 0, or of the rank that printed any; why there are none, and a note if ranks differ."""
    by_rank: dict[int | None, list[float]] = {}
    for value in values:
        by_rank.setdefault(getattr(value, "rank", None), []).append(value)
    if len(by_rank) == 1:
        is_unknown = not is_alone and None in by_rank and isinstance(values[0], PrintedValue)
        unknown = f"{name} was printed by C code, or by a process that is no rank; its last value counts, of whichever"
        return values, "", unknown if is_unknown else ""
    first = min(rank for rank in by_rank if rank is not None)
    others = {rank: its for rank, its in by_rank.items() if repr(its) != repr(by_rank[first])}
    if not others:
        return by_rank[first], "", ""
    other, its = next(iter(others.items()))
    shown = f"{by_rank[first][-1]:g} and {its[-1]:g}"
    whom = f"rank {first} and {'another process' if other is None else f'rank {other}'}"
    if first == 0:
        return (
            by_rank[0],
            "",
            f"{whom} printed different values of {name} ({shown} in the end), and rank 0's count",
        )
    return (
        values,
        f"{whom} printed different values of metric {name} ({shown} in the end); print it on rank 0",
        "",
    )


def _why_metric_is_no_number(metric: ScriptMetric, values: Sequence[float], value: float) -> str:
    """Return that a metric ended as no number, or has none that counts; "" if it is one."""
    if metric.pick != "first" and not math.isfinite(values[-1]):
        return f"the last {metric.name} is {values[-1]:g}"
    return "" if math.isfinite(value) else f"the {metric.pick} {metric.name} is {value:g}"


def metric_value_that_counts(metric: ScriptMetric, values: Sequence[float]) -> float:
    """Return which of several values of a metric counts."""
    if metric.pick == "best":
        known = [value for value in values if math.isfinite(value)]
        choose = max if metric.goal == "max" else min
        return choose(known, default=math.nan)
    return values[0 if metric.pick == "first" else -1]


def _why_metric_has_no_value(metric: ScriptMetric, rows: ScriptRows) -> str:
    if metric.pattern is not None:
        reason = f"no line of the script's output matches metric {metric.name}, {metric.pattern!r}"
    else:
        logged = ", ".join(sorted(rows.scalars)) or "nothing"
        reason = f"the script never logged metric {metric.name}; it logged {logged}"
    return f"{reason}. --list-metrics shows the available metrics"


def _find_diverged_step_and_kind(losses: Sequence[float], patience: int) -> tuple[int | None, str | None]:
    """Return the first of `patience` non-finite losses in a row, or of two or more at the end, and which it is."""
    row = 0
    for step, loss in enumerate(losses):
        row = 0 if math.isfinite(loss) else row + 1
        if row == patience:
            return step - patience + 1, f"{patience} non-finite losses in a row"
    if row > 1:
        return len(losses) - row, f"the last {row} losses are not finite"
    return None, None


def _summarize_run(
    config: RunConfig, rows: ScriptRows, losses: Sequence[float], wall_seconds: float
) -> RunSummary:
    steps, seconds = rows.steps, _seconds_of_timed_steps(config, rows.steps)
    iqr = None
    if len(seconds) >= 4:
        quarter, _, three_quarters = statistics.quantiles(seconds, n=4)
        iqr = three_quarters - quarter
    return RunSummary(
        num_steps=len(steps),
        **loss_tail_summary_fields(losses),
        losses_sha256=hashlib.sha256(struct.pack(f"<{len(losses)}d", *losses)).hexdigest(),
        skipped_steps=sum(not all(step.applied) for step in steps),
        warmup_steps=config.warmup_steps,
        step_seconds_median=statistics.median(seconds) if seconds else None,
        step_seconds_iqr=iqr,
        wall_seconds=wall_seconds,
        epoch_seconds=wall_seconds,
        peak_bytes=rows.peak_bytes,
        peak_reserved_bytes=rows.peak_reserved_bytes,
        final_loss_scale=steps[-1].loss_scales[0] if steps and steps[-1].loss_scales else None,
        first_nonfinite_loss_step=next((step.step for step in steps if not math.isfinite(step.loss)), None),
    )


def _seconds_of_timed_steps(config: RunConfig, steps: Sequence[StepRecord]) -> list[float]:
    return [step.seconds for step in steps if step.step >= config.warmup_steps]


def _engine_of_rows(config: RunConfig, rows: ScriptRows) -> EngineInfo | None:
    if not config.parsed_arm.spec.calls_apex:
        return None
    version = str(rows.header.get("engine_version", "unknown"))
    name: Literal["nvidia", "compat"] = "nvidia" if rows.header.get("engine") == "nvidia" else "compat"
    return EngineInfo(name=name, version=version, reason="what the script imports as apex")
