"""`exec --verify-resume`: stop a script that has saved, start it again as its user would, and compare every step."""

from __future__ import annotations

import json
import os
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from ampcompare.base.errors import ConfigError, LaunchError
from ampcompare.base.processes.sandbox import WITHOUT_OVERLAYS, Sandbox, open_sandbox
from ampcompare.base.processes.start import start_command
from ampcompare.experiment.resume_comparison import Answer, Resumption, Trace, compare_traces, losses_apart, read_trace
from ampcompare.experiment.verify import TIME_LIMIT, wait_for
from ampcompare.settings.resume_trace import ResumeRequest

RECORD, TRACE = "record.jsonl", "trace.jsonl"


def verify_script_resume(
    settings: Mapping[str, Any], *, is_module: bool, step: int, resume_args: str | None, say: Callable[[str], None]
) -> int:
    """Run a script without a break, and with one, and print the comparison; return the exit code.

    Args:
        settings: the fields of `ExecSettings`, by their names.
        step: it is stopped after it has saved a file at or behind this step.
        resume_args: added to its arguments when it is started again, with `{checkpoint}` for the file that it saved
            last and `{folder}` for that file's folder; None starts it with the same ones.

    Raises:
        ConfigError: the script saves no file at or behind the step, or trains no step behind it.
        LaunchError: a run failed, or trained nothing.
    """
    with tempfile.TemporaryDirectory(prefix="ampcompare-resume-") as outer:
        runs = _Runs(Path(outer), settings, is_module)
        (whole,) = runs.run([_Run("whole")], say)
        say(f"without a break: {len(whole.steps)} steps, {_files(whole)}")
        _check(whole, step)
        added = shlex.split(resume_args or "")
        broken, *others = runs.run([_Run("stopped", stop_at=step), _Run("started again", added)])
        if broken.stopped is None:
            raise ConfigError(_why_not_stopped(broken, step))
        saved = broken.saves[-1]
        say(f"stopped behind step {broken.stopped}, after {saved['line']} had saved {_name(saved['path'])}")
        (resumed,) = others
        say(f"started again{f' with {resume_args}' if added else ''}: {len(resumed.steps)} steps")
        found = compare_traces(whole, broken, resumed)
        (twin,) = [None] if found.answer is Answer.EXACT else runs.run([_Run("twin", twin=True)])
    for line in resumption_lines(found, None if twin is None else losses_apart(whole, twin)):
        say(line)
    return 0 if found.answer is Answer.EXACT else 1


@dataclass(frozen=True)
class _Run:
    """A run of the script: its name, what is added to its arguments, where it is stopped, and whether it is a twin."""

    name: str
    added: Sequence[str] = ()
    stop_at: int | None = None
    twin: bool = False


class _Runs:
    """Runs of one script in processes of their own, whose traces lie in a folder."""

    def __init__(self, outer: Path, settings: Mapping[str, Any], is_module: bool) -> None:
        self._outer, self._folder = outer, outer / "traces"
        self._folder.mkdir()
        self._settings, self._is_module = settings, is_module

    def run(self, given: Sequence[_Run], say: Callable[[str], None] = lambda line: None) -> list[Trace]:
        """Run the script as often as it is asked, in one sandbox, until a run is not stopped; return the traces."""
        script = str(self._settings["name"])
        roots = [] if self._is_module else [Path(script).parent]
        store = self._outer / f"store of {given[0].name}"
        with open_sandbox(store, shared=[self._folder], roots=roots) as sandbox:
            if sandbox.is_partial:
                say(WITHOUT_OVERLAYS)
            requests = [self._request(each, sandbox) for each in given]
            command = start_command("ampcompare.script.resume_runs", *map(str, requests))
            own = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONWARNINGS": "ignore", "TORCHDYNAMO_DISABLE": "1"}
            code, text = wait_for(command, {"PYTHONHASHSEED": "0", **os.environ, **own, **sandbox.environment})
        traces = [read_trace(path) for each in requests if (path := each.with_name(TRACE)).exists()]
        if code is None:
            raise LaunchError(f"the script had not ended after {TIME_LIMIT:g} s; let it train less")
        if code or not traces:
            last = given[max(len(traces) - 1, 0)]
            why = _error(requests[max(len(traces) - 1, 0)].with_name(RECORD), text)
            raise LaunchError(f"the script ({last.name}) ended with exit code {code}: {why}")
        return traces

    def _request(self, run: _Run, sandbox: Sandbox) -> Path:
        """Write the request for a run, and return its file."""
        folder = self._folder / run.name.replace(" ", "-")
        folder.mkdir()
        name = str(self._settings["name"])
        request = ResumeRequest(
            settings={
                **self._settings,
                "name": name if self._is_module else sandbox.at(os.path.abspath(name)),
                "arguments": [*self._settings["arguments"], *run.added],
                "record": str(folder / RECORD),
                "twin": run.twin,
            },
            is_module=self._is_module,
            ended=str(folder / "ended"),
            trace=str(folder / TRACE),
            stop_at=run.stop_at,
        )
        path = folder / "request.json"
        request.write(path)
        return path


def _error(record: Path, text: str) -> str:
    """Return the error of a run that failed: of its record, or the last line that it wrote."""
    rows = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()] if record.exists() else []
    errors = [str(row["error"]) for row in rows if row.get("kind") == "end" and row["error"]]
    lines = [line for line in text.splitlines() if line.strip()]
    return next(iter(errors), lines[-1] if lines else "it wrote nothing")


def _check(whole: Trace, step: int) -> None:
    """Refuse what leaves nothing to compare.

    Raises:
        ConfigError: there is no file to start from, or no step behind it.
    """
    if not whole.saves:
        raise ConfigError("the script saves no file by torch.save, so that there is nothing to start again from")
    if step >= len(whole.steps):
        raise ConfigError(
            f"the script trains {len(whole.steps)} steps, and none behind step {step}; name an earlier one"
        )


def _why_not_stopped(broken: Trace, step: int) -> str:
    at = sorted({row["step"] for row in broken.saves if row["step"] < len(broken.steps)})
    last = f"the last file before its end is that of step {at[-1]}" if at else "it saves only at its end"
    return f"the script saves no file between step {step} and its last step: {last}; let it save earlier"


def _files(trace: Trace) -> str:
    count = len({row["path"] for row in trace.saves})
    return f"{count} file{'s' * (count != 1)} saved"


def _name(path: str) -> str:
    short = os.path.relpath(path)
    return path if short.startswith("..") else short


def resumption_lines(found: Resumption, twin: float | None) -> list[str]:
    """Return a comparison in words: a table of what differs, and the answer."""
    rows = [[one.role, one.step, one.what, one.cause or "-"] for one in found.differences]
    lines = tabulate(rows, ["what", "first in step", "where", "cause"]).splitlines() if rows else []
    left = found.steps - found.stopped
    if found.answer is Answer.EXACT:
        unused = " (generators differ, and nothing draws from them)" * bool(found.differences)
        return [*lines, f"resumes: exact in the {left} steps behind the break{unused}"]
    first = next((one for one in found.differences if one.role != "generators"), found.differences[0])
    if found.answer is Answer.NOT_RESUMED:
        return [*lines, f"resumes: not resumed; the script starts from its beginning: {first.cause}"]
    causes = [one.cause for one in found.differences if one.step == first.step and one.cause]
    why = f": {causes[0]}" if causes else ""
    words = (
        "same up to data order"
        if found.answer is Answer.DATA_ORDER
        else f"differs from step {first.step} by {first.role}"
    )
    floor = [] if found.parted is None else [f"the last losses are {found.parted:.2g} apart"]
    if floor and twin is not None:
        floor = [f"{floor[0]}, those of a twin, whose first weights differ by one part in 512, {twin:.2g}"]
    return [*lines, *floor, f"resumes: {words}{why}"]
