"""What came of a script that was started again from what killed copies of it have left."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from ampcompare.base.errors import LaunchError
from ampcompare.experiment.resume_comparison import RESTORED, ResumeTrace, read_trace, run_error_text
from ampcompare.settings.resume_trace import ATTEMPTS, TraceRowKind, read_trace_rows

OF_STATE = tuple(role for role in RESTORED if role not in ("buffers",))


@dataclass(frozen=True)
class KillOutcome:
    """A kill, in words, and what came of it: whether a training resumes, from where or why not."""

    point: str
    is_good: bool
    outcome: str


def read_kill_outcomes(folder: Path, trace: Path, unbroken: ResumeTrace, record: str) -> list[KillOutcome]:
    """Return the kills whose remains are in a folder.

    Args:
        trace: of the run that was killed.
        unbroken: of the run without a break.
        record: the name of the record of each start, next to its trace.

    Raises:
        LaunchError: nothing was killed.
    """
    rows = [row for row in read_trace_rows(trace) if row["kind"] == TraceRowKind.KILLED]
    if not rows:
        raise LaunchError("no copy of the script was killed: it has changed no file where it saved before")
    attempts = json.loads((folder / ATTEMPTS).read_text(encoding="utf-8"))
    outcomes = {
        left: _completeness_and_text_of_tries(tries, unbroken, record) for left, tries in attempts.items()
    }
    found = []
    for row in rows:
        if row["state"] == "hung":
            found.append(KillOutcome(row["point"], False, "the copy hung before it could be killed"))
        elif row["state"] == "passed":
            continue  # it wrote less than the one that was left alone
        else:
            found.append(KillOutcome(row["point"], *outcomes[row["left"]]))
    return found


def _completeness_and_text_of_tries(
    tries: list[dict[str, str]], unbroken: ResumeTrace, record: str
) -> tuple[bool, str]:
    if not tries:
        return False, "no file is left to start from"
    first = tries[0]
    name = f" {os.path.basename(first['saved'])}" * bool(first["saved"])
    trace = read_trace(Path(first["place"]) / "trace.jsonl")
    if first["code"] or not trace.steps:
        why = run_error_text(Path(first["place"]) / record)
        rest = ""
        if len(tries) > 1:
            last = tries[-1]
            rest = (
                f"; {os.path.basename(last['saved'])} does"
                if not last["code"]
                else "; nor does any before it"
            )
        return False, f"{name.strip() or 'what is left'} does not load: {why}{rest}"
    return _completeness_and_text_of_trace(trace, unbroken)


def _completeness_and_text_of_trace(trace: ResumeTrace, unbroken: ResumeTrace) -> tuple[bool, str]:
    """Return from which step a start resumes, and whether all of its state is of that step."""
    first = trace.steps[0]
    steps: dict[str, list[int]] = {}
    for role in OF_STATE:
        if first.state.get(role) or role in ("loss scale", "learning rate"):
            alike = [
                _are_equal_on_common_keys(step.value_of_role(role), first.value_of_role(role))
                for step in unbroken.steps
            ]
            steps[role] = [at for at, is_alike in enumerate(alike) if is_alike]
    at = steps["weights"]
    if not at:
        return True, "loads; its weights are those of no step of the run without a break"
    if at[0] == 0:
        return False, "starts from its beginning"
    for role, found in steps.items():
        # Of no step: what a script does not restore, which the table above says.
        if found and not set(found) & set(at):
            return False, f"mixes two files: weights of step {at[0]}, {role} of step {found[-1]}"
    return True, f"resumes behind step {at[0]}"


def _are_equal_on_common_keys(due: Any, resumed: Any) -> bool:
    """Return whether values are equal; of tensors by name those that both have, as a model may be called later."""
    if not isinstance(due, dict) or not isinstance(resumed, dict):
        return bool(due == resumed)
    both = due.keys() & resumed.keys()
    return bool(due == resumed or (both and all(due[name] == resumed[name] for name in both)))


def _no_loss_by_kills_text(count: int, bare: int) -> str:
    """Return what is known where nothing is lost by kills, after some of which there is nothing to start from."""
    if not bare:
        return f"what is left loads after each of {count}"
    first = "this was the first save: a later step shows what becomes of an older file"
    loads = f"what is left loads after {count - bare} of {count}, and " * (bare < count)
    return (
        f"{loads}nothing is left to load after {bare if bare < count else 'each'} of {count}, since {first}"
    )


def kill_outcome_lines_and_is_all_well(
    kills: Sequence[KillOutcome], *, is_first: bool
) -> tuple[list[str], bool]:
    """Return what came of kills in words, equal ones in a row, and whether all is well.

    Args:
        is_first: nothing had been saved before, so that a start from the beginning loses nothing.
    """
    rows: list[list[object]] = []
    bad = bare = 0
    for kill in kills:
        nothing_lost = is_first and kill.outcome in (
            "no file is left to start from",
            "starts from its beginning",
        )
        bad += not (kill.is_good or nothing_lost)
        bare += nothing_lost
        if rows and rows[-1][2] == kill.outcome:
            first = str(rows[-1][1]).partition(" ... ")[0]
            rows[-1][0], rows[-1][1] = int(str(rows[-1][0])) + 1, f"{first} ... {kill.point}"
        else:
            rows.append([1, kill.point, kill.outcome])
    lines = tabulate(rows, ["kills", "at", "started again"], maxcolwidths=[None, 60, 80]).splitlines()
    if not bad:
        return [*lines, f"kills: {_no_loss_by_kills_text(len(kills), bare)}"], True
    advice = "save under another name, and os.replace it when it is complete"
    return [*lines, f"kills: what is left does not serve after {bad} of {len(kills)}: {advice}"], False
