"""`--verify-resume`: stop a script that has saved, start it again as its user would, and compare every step."""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tabulate import tabulate

from ampcompare.base.environment.ranks import read_distributed_env
from ampcompare.base.errors import ConfigError, LaunchError
from ampcompare.base.processes.sandbox import WITHOUT_OVERLAYS, Sandbox, open_sandbox
from ampcompare.base.processes.script_environment import EXAMINING, script_environment
from ampcompare.base.processes.start import module_command
from ampcompare.experiment.killed_saves import kill_outcome_lines_and_is_all_well, read_kill_outcomes
from ampcompare.experiment.resume_comparison import (
    ResumeTrace,
    ResumptionAnswer,
    ResumptionComparison,
    compare_traces,
    distance_of_last_losses,
    read_trace,
    run_error_text,
)
from ampcompare.experiment.script_process import TIME_LIMIT, require_script, run_command_with_time_limit
from ampcompare.experiment.verify import migrate_whole_files
from ampcompare.script.invocation.exec_settings import exec_fields_for_resume_check
from ampcompare.settings.resume_trace import ResumeTraceRequest

RECORD, TRACE = "record.jsonl", "trace.jsonl"
KILLS = 20  # points at which `--fault kill` kills
OF_RANKS = ("torch.distributed.run", "torch.distributed.launch", "torch.distributed.launcher")


@dataclass(frozen=True)
class ResumeCheck:
    """How a script is stopped and started again.

    Attributes:
        step: it is stopped after it has saved a file at or behind this step.
        arguments: added to its own when it is started again, with `{checkpoint}` for the file that it saved last and
            `{folder}` for that file's folder; None starts it with the same ones, and a trainer of a library that it
            calls without a checkpoint with the last one.
        kills: copies of it are killed while they save, and it is started again from what each leaves.
        rewrite: it is started again as `migrate` rewrites it: for "torch", or for the "adapter".
        convert: its file is converted to that of torch.amp before.
    """

    step: int
    arguments: str | None = None
    kills: bool = False
    rewrite: str | None = None
    convert: bool = False


def verify_script_resume(
    settings: Mapping[str, Any], check: ResumeCheck, *, is_module: bool, say: Callable[[str], None]
) -> int:
    """Run a script without a break, and with one, and print the comparison; return the exit code.

    Args:
        settings: the fields of `ExecSettings`, by their names.
        check: where it is stopped, and how it is started again.
        is_module: whether the script is named as by `python -m`.
        say: prints a line.

    Raises:
        ConfigError: the script saves no file at or behind the step, or trains no step behind it.
        LaunchError: a run failed, or trained nothing.
    """
    _refuse_ranks(str(settings["name"]), is_module=is_module)
    found, is_safe = resumption_comparison_and_is_kill_safe(settings, check, is_module=is_module, say=say)
    return 0 if found.answer is ResumptionAnswer.EXACT and is_safe else 1


def resumption_comparison_and_is_kill_safe(
    settings: Mapping[str, Any], check: ResumeCheck, *, is_module: bool, say: Callable[[str], None]
) -> tuple[ResumptionComparison, bool]:
    """Return the comparison of such runs, and whether all that kills have left loads; errors are those from above."""
    with tempfile.TemporaryDirectory(prefix="ampcompare-resume-") as outer:
        runs = _ResumeRunner(Path(outer), settings, is_module)
        whole, step = _run_without_break(runs, check.step, say)
        added = shlex.split(check.arguments or "")
        again = {"trainers": check.arguments is None, "rewrite": check.rewrite, "convert": check.convert}
        broken, resumed = runs.run_until_stop_and_again(
            _ResumeRun("stopped", options={"stop_at": step}), _ResumeRun("started again", added, again)
        )
        saved = broken.saves[-1]
        where = f"after {saved['line']} had saved {_shown_path(saved['path'])}"
        say(f"stopped behind step {broken.stopped}, {where}")
        say(f"started again{_how_started_again(check, resumed)}: {_step_count_text(resumed)}")
        _refuse_untrained_resumption(resumed)
        found = compare_traces(whole, broken, resumed)
        if resumed.error and found.answer is ResumptionAnswer.EXACT:  # as far as it came
            raise LaunchError(resumed.error)
        twin = None
        if found.answer is not ResumptionAnswer.EXACT and found.parted is not None:
            (trace,) = runs.run_until_not_stopped([_ResumeRun("twin", settings={"twin": True})])
            twin = distance_of_last_losses(whole, trace)
        _say_lines(say, resumption_lines(found, twin, check.rewrite))
        if resumed.error:
            raise LaunchError(resumed.error)
        if not check.kills:
            return found, True
        lines, is_safe = runs.kill_saving_copies(whole, broken, added, check)
        _say_lines(say, lines)
    return found, is_safe


def _run_without_break(
    runs: _ResumeRunner, asked_step: int, say: Callable[[str], None]
) -> tuple[ResumeTrace, int]:
    """Run the script to its end; return its trace and the step to stop behind, in steps of the optimizer that ends one.

    Raises:
        ConfigError: the run leaves nothing to compare.
    """
    step = asked_step
    (whole,) = runs.run_until_not_stopped([_ResumeRun("whole")], say)
    at = next((row for row in whole.saves if row["step"] >= asked_step), None)
    if at is not None and at["behind"]:  # a script with two optimizers, say
        runs.ends_with, step = at["behind"], at["counts"][str(at["behind"])]
        counted_by_other = _ResumeRun("whole, its steps counted by another optimizer")
        (whole,) = runs.run_until_not_stopped([counted_by_other], say)
        then = f": step {asked_step} of the first is in step {step}" if step != asked_step else ""
        say(f"steps are those of its optimizer {at['number'] + 1}, behind which it saves{then}")
    say(f"without a break: {_step_count_text(whole)}, {_saved_files_text(whole)}")
    _refuse_incomparable_run(whole, step)
    return whole, step


def _how_started_again(check: ResumeCheck, resumed: ResumeTrace) -> str:
    """Return with what a script was started again, behind a space or a comma; "" as it was."""
    how = [f"with {check.arguments}"] if shlex.split(check.arguments or "") else []
    how += [f"with {row['by']}" for row in resumed.trainers[:1]]
    if check.rewrite:
        by = "with the adapter" if check.rewrite == "adapter" else "as migrate rewrites it"
        how.append(f"{by}, from a file that convert has made" if check.convert else by)
    return "".join(f" {each}" for each in how) if len(how) < 2 else f", {', '.join(how)}"


def _refuse_untrained_resumption(resumed: ResumeTrace) -> None:
    if not resumed.steps and resumed.last is not None and not resumed.error:
        raise ConfigError(
            "started again, the script steps no optimizer that it has made: one that pickle or torch.load brings "
            "as a whole is not followed. Save its state_dict(), and load that into one that the script makes"
        )


def _say_lines(say: Callable[[str], None], lines: Sequence[str]) -> None:
    for line in lines:
        say(line)


@dataclass(frozen=True)
class _ResumeRun:
    """A run of the script: its name, what is added to its arguments, and fields of its request and its settings."""

    name: str
    added: Sequence[str] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


class _ResumeRunner:
    """Runs of one script in processes of their own, whose traces lie in a folder."""

    def __init__(self, outer: Path, settings: Mapping[str, Any], is_module: bool) -> None:
        self._outer, self._folder = outer, outer / "traces"
        self._folder.mkdir()
        self._settings, self._is_module = settings, is_module
        self.ends_with = 0  # the optimizer whose step ends a step

    def run_until_not_stopped(
        self, runs: Sequence[_ResumeRun], say: Callable[[str], None] = lambda line: None
    ) -> list[ResumeTrace]:
        """Run the script as often as it is asked, in one sandbox, until a run is not stopped; return the traces."""
        requests, code, text = self._run_in_one_sandbox(runs, say)
        traces = [read_trace(path) for each in requests if (path := each.with_name(TRACE)).exists()]
        if code or not traces:
            # One that was stopped did not fail: the next has, before it has begun a trace.
            failed = len(traces) if not traces or traces[-1].stopped is not None else len(traces) - 1
            why = run_error_text(requests[failed].with_name(RECORD), text)
            error = f"the script ({runs[failed].name}) ended with exit code {code}: {why}"
            if failed and failed < len(traces):
                traces[failed].note_error(error)  # its steps may tell why
            if not failed or len(traces) < len(runs) or not traces[failed].steps:
                raise LaunchError(error)
        return traces

    def run_until_stop_and_again(
        self, run_to_stop: _ResumeRun, run_again: _ResumeRun
    ) -> tuple[ResumeTrace, ResumeTrace]:
        """Run the script until it is stopped, and again, in one sandbox; return both traces.

        Raises:
            ConfigError: it saved no file at which it could be stopped.
        """
        broken, *others = self.run_until_not_stopped([run_to_stop, run_again])
        if broken.stopped is None:
            raise ConfigError(_why_not_stopped(broken, run_to_stop.options["stop_at"]))
        (resumed,) = others
        return broken, resumed

    def kill_saving_copies(
        self, unbroken: ResumeTrace, interrupted: ResumeTrace, added: Sequence[str], check: ResumeCheck
    ) -> tuple[list[str], bool]:
        """Kill copies of the script while they save; return what came of it in words, and whether all of it loads."""
        assert interrupted.stopped is not None
        folder = self._folder / "left"
        folder.mkdir()
        files = list(
            dict.fromkeys(
                row["path"] for row in reversed(unbroken.saves) if row["step"] <= interrupted.stopped
            )
        )
        kill = {"step": interrupted.stopped, "points": KILLS, "folder": str(folder)}
        again = {
            "trainers": check.arguments is None,
            "first_only": True,
            "candidates": files,
            "states": interrupted.states,
            "rewrite": check.rewrite,
            "convert": check.convert,
        }
        given = [
            _ResumeRun("killed", options={"kill": kill}),
            _ResumeRun("started from what is left", added, again),
        ]
        requests, code, text = self._run_in_one_sandbox(given)
        if code:
            raise LaunchError(f"the script (killed) ended with exit code {code}: "
                              f"{run_error_text(requests[0].with_name(RECORD), text)}")  # fmt: skip
        is_first = not any(row["step"] < interrupted.stopped for row in unbroken.saves)
        return kill_outcome_lines_and_is_all_well(
            read_kill_outcomes(folder, requests[0].with_name(TRACE), unbroken, RECORD), is_first=is_first
        )

    def _run_in_one_sandbox(
        self, given: Sequence[_ResumeRun], say: Callable[[str], None] = lambda line: None
    ) -> tuple[list[Path], int, str]:
        """Run the script in one sandbox; return the files of the requests, the last exit code, and what was written."""
        script = str(self._settings["name"])
        roots = [] if self._is_module else [Path(script).parent]
        store = self._outer / f"store of {given[0].name}"
        with open_sandbox(store, shared_paths=[self._folder], roots=roots) as sandbox:
            if sandbox.is_partial:
                say(WITHOUT_OVERLAYS)
            requests = [self._write_request(each, sandbox) for each in given]
            command = module_command("ampcompare.script.examination.resume_runs", *map(str, requests))
            own = {**EXAMINING, "PYTHONDONTWRITEBYTECODE": "1"}
            code, text = run_command_with_time_limit(
                command, {**script_environment(), **own, **sandbox.environment}
            )
        if code is None:
            raise LaunchError(f"the script had not ended after {TIME_LIMIT:g} s; let it train less")
        return requests, code, text

    def _write_request(self, run: _ResumeRun, sandbox: Sandbox) -> Path:
        """Write the request for a run, and return its file."""
        folder = self._folder / run.name.replace(" ", "-")
        folder.mkdir()
        name = str(self._settings["name"])
        request = ResumeTraceRequest(
            settings={
                **self._settings,
                "name": name if self._is_module else sandbox.path_seen_in_sandbox(os.path.abspath(name)),
                "arguments": [*self._settings["arguments"], *run.added],
                "record": str(folder / RECORD),
                "twin": False,
                **run.settings,
            },
            is_module=self._is_module,
            ended=str(folder / "ended"),
            trace=str(folder / TRACE),
            **{"stop_at": None, "ends_with": self.ends_with, **run.options},
        )
        path = folder / "request.json"
        request.write(path)
        return path


def _refuse_ranks(name: str, *, is_module: bool) -> None:
    """Refuse several ranks: each would be stopped at a step of its own, and the others would wait for it.

    Raises:
        ConfigError: this is one of several ranks, or the script is what starts ranks.
    """
    world = read_distributed_env()
    if world is not None and world.size > 1:
        who = f"this is rank {world.rank} of {world.size}, by {world.launcher}"
    elif is_module and name in OF_RANKS:
        who = f"{name} starts ranks"
    else:
        return
    raise ConfigError(
        f"{who}, and --verify-resume follows a script of one process: start ampcompare itself without a launcher, with "
        "the script on one rank"
    )


def _refuse_incomparable_run(unbroken: ResumeTrace, step: int) -> None:
    """Refuse what leaves nothing to compare.

    Raises:
        ConfigError: there is no file to start from, or no step behind it.
    """
    if not unbroken.steps:
        raise ConfigError(
            "the script trained no step in the process that was started; one that starts others for it, such as ranks "
            "by multiprocessing, cannot be verified"
        )
    if not unbroken.saves:
        raise ConfigError(
            "the script saves nothing by torch.save, safetensors, torch.distributed.checkpoint or pickle, so that "
            "there is nothing to start again from"
        )
    if step >= len(unbroken.steps):
        raise ConfigError(
            f"the script trains {len(unbroken.steps)} steps, and none behind step {step}; name an earlier one"
        )


def _why_not_stopped(interrupted: ResumeTrace, step: int) -> str:
    at = sorted({row["step"] for row in interrupted.saves if row["step"] < len(interrupted.steps)})
    last = f"the last file before its end is that of step {at[-1]}" if at else "it saves only at its end"
    return f"the script saves no file between step {step} and its last step: {last}; let it save earlier"


def _step_count_text(trace: ResumeTrace) -> str:
    count = sum(step.has_ended for step in trace.steps)
    return f"{count} step{'s' * (count != 1)}"


def _saved_files_text(trace: ResumeTrace) -> str:
    count = len({row["path"] for row in trace.saves})
    return f"{count} file{'s' * (count != 1)} saved"


def _shown_path(path: str) -> str:
    short = os.path.relpath(path)
    return path if short.startswith("..") else short


def resumption_lines(
    comparison: ResumptionComparison, twin_distance: float | None, rewrite: str | None = None
) -> list[str]:
    """Return a comparison in words: a table of what differs, and the answer."""
    rows = [[one.role, one.step, one.what, one.cause or "-"] for one in comparison.differences]
    lines = tabulate(rows, ["what", "first in step", "where", "cause"]).splitlines() if rows else []
    floor = [] if comparison.parted is None else [f"the last losses are {comparison.parted:.2g} apart"]
    if floor and twin_distance is not None:
        floor = [
            f"{floor[0]}, those of a twin, whose first weights differ by one part in 512, {twin_distance:.2g}"
        ]
    if comparison.answer is not ResumptionAnswer.EXACT:
        lines += [] if comparison.answer is ResumptionAnswer.NOT_RESUMED else floor
        if rewrite is not None and comparison.is_state_whole:
            lines.append(
                "all that a checkpoint has to restore is taken over: what differs is how the steps compute"
            )
    return [*lines, f"resumes: {answer_and_cause_text(comparison)}"]


def answer_and_cause_text(comparison: ResumptionComparison) -> str:
    """Return the answer and its cause, without the table."""
    left = comparison.steps - comparison.stopped
    if comparison.answer is ResumptionAnswer.EXACT:
        unused = " (generators differ, and nothing draws from them)" * bool(comparison.differences)
        return f"exact in the {left} steps behind the break{unused}"
    first = next(
        (one for one in comparison.differences if one.role != "generators"), comparison.differences[0]
    )
    if comparison.answer is ResumptionAnswer.NOT_RESUMED:
        return f"not resumed; the script starts from its beginning: {first.cause}"
    why = f": {first.cause}" * bool(first.cause)
    if comparison.answer is ResumptionAnswer.DATA_ORDER:
        return f"same up to data order{why}"
    return f"differs from step {first.step} by {first.role}{why}"


def verify_migrated_resume(
    path: str,
    arguments: list[str],
    *,
    step: int,
    resume_args: str | None,
    how: str,
    convert: bool,
    say: Callable[[str], None],
) -> int:
    """Let a rewritten script resume from what the Apex script has saved; print the comparison, return the exit code.

    Args:
        path: of the Apex script.
        arguments: of the script.
        step: it is stopped after it has saved a file at or behind this step.
        resume_args: added to its arguments when it is started again, as of `ResumeCheck.arguments`.
        how: it is rewritten, as of `verify_rewritten_script`.
        convert: its checkpoint is converted to that of torch.amp before.
        say: prints a line.

    Returns:
        0 if the steps behind the stop are equal to the last bit, else 1.

    Raises:
        ConfigError: there is no such script, it cannot be rewritten, it saves no file at or behind the step, or it
            has several ranks.
        LaunchError: a run failed.
    """
    _refuse_ranks(path, is_module=False)
    moved = migrate_whole_files([require_script(path)], how)
    for line in moved.reasons:
        say(line)
    settings = exec_fields_for_resume_check({"device": "cpu", "compat_torch": True}, path, arguments)
    check = ResumeCheck(step, resume_args, rewrite="adapter" if moved.adapter else "torch", convert=convert)
    found, _ = resumption_comparison_and_is_kill_safe(settings, check, is_module=False, say=say)
    return 0 if found.answer is ResumptionAnswer.EXACT else 1


def verify_resumption_under_arms(
    arms: Sequence[str],
    settings: Mapping[str, Any],
    check: ResumeCheck,
    *,
    is_module: bool,
    say: Callable[[str], None],
) -> int:
    """Verify a script under each arm, from the arm's own checkpoint, and print a table; return the exit code.

    An arm that fails has its error in the table, and the others are still verified.

    Args:
        arms: texts of arms that can train a script.
        settings: the fields of `ExecSettings` by their names; their arm gives way.
        check: how the script is stopped and started again.
        is_module: whether its name is that of a module.
        say: prints a line.

    Returns:
        0 if all resume exactly; else 1, or the largest exit code of an arm that failed.

    Raises:
        ConfigError: the script has several ranks.
    """
    _refuse_ranks(str(settings["name"]), is_module=is_module)
    rows: list[list[str]] = []
    codes: list[int] = []
    for arm in arms:
        say(f"{arm}:")
        try:
            found, is_safe = resumption_comparison_and_is_kill_safe(
                {**settings, "arm": arm}, check, is_module=is_module, say=lambda line: say(f"  {line}")
            )
        except (ConfigError, LaunchError) as error:
            say(f"  {error}")
            rows.append([arm, f"failed: {error}"])
            codes.append(error.exit_code)
            continue
        rows.append([arm, answer_and_cause_text(found) + "; what kills leave does not load" * (not is_safe)])
        codes.append(0 if found.answer is ResumptionAnswer.EXACT and is_safe else 1)
    for line in tabulate(rows, ["arm", "resumes"], maxcolwidths=[None, 90]).splitlines():
        say(line)
    return max(codes, default=0)
