"""One line of the doctor's report, and how what it says is asked."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ampcompare.base.processes.call import call_in_child

# Runs a probe of `probes.py`, by its name, in a child process with a time limit.
ask = partial(call_in_child, Path(__file__).resolve().with_name("probes.py"))

Verdict = Literal["ok", "note", "warning", "problem"]
VERDICTS: tuple[Verdict, ...] = ("ok", "note", "warning", "problem")


@dataclass(frozen=True)
class Check:
    """What was seen of one thing, and what to make of it.

    Attributes:
        group: heading that it stands under, such as "GPU".
        name: what was looked at; no two findings of a report share a name.
        value: what was seen.
        verdict: ok; note (good to know); warning (results, times or some arms suffer); problem (something is broken).
        reason: why that verdict; may be empty where the value says it all.
        remedy: lines for a shell, each to be pasted as it stands; empty where nothing needs to be done.
        facts: the same for programs.
    """

    group: str
    name: str
    value: str
    verdict: Verdict
    reason: str = ""
    remedy: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
