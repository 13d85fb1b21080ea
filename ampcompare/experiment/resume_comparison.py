"""Whether a script that was stopped and started again trains as one that was not: from the traces of both."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from ampcompare.settings.resume_trace import Row, saved_files

HALVES = {"bfloat16": "bf16", "float16": "fp16"}
# What a checkpoint has to restore, in the order in which it is compared: the first difference causes those behind it.
RESTORED = ("masters", "weights", "buffers", "moments", "loss scale", "learning rate")
ROLES = (*RESTORED, "batches", "generators", "loss")
STATES = {"loss scale": "scales", "learning rate": "rates"}
MADE_AGAIN = "masters are rounded to {0}: they are made again from the {0} weights at load"
WORDS = {"scaler": "the GradScaler", "optimizer": "the optimizer", "scheduler": "the schedule"}


class Answer(Enum):
    """What came of a resumption."""

    EXACT = "exact"
    DATA_ORDER = "same up to data order"
    NOT_RESUMED = "not resumed"
    DIFFERS = "differs"


@dataclass
class Step:
    """What one step of a trace started from, and computed."""

    state: dict[str, Any]
    batches: list[str] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)
    has_ended: bool = False

    def value(self, role: str) -> Any:
        """Return what is compared of a role."""
        if role == "batches":
            return self.batches
        return self.losses if role == "loss" else self.state[STATES.get(role, role)]


@dataclass
class Trace:
    """What a run of a script did.

    Attributes:
        steps: all of them, the last perhaps without its end.
        saves: rows of files that were saved.
        loads: rows of files that were loaded.
        restored: rows of what was restored.
        stopped: how many steps had ended where it saved last, before it was stopped; None if it ran to its end.
    """

    steps: list[Step] = field(default_factory=list)
    saves: list[dict[str, Any]] = field(default_factory=list)
    loads: list[dict[str, Any]] = field(default_factory=list)
    restored: list[dict[str, Any]] = field(default_factory=list)
    stopped: int | None = None


@dataclass(frozen=True)
class Difference:
    """The first difference of a role: in which step, counted from 1, where, and its cause if that can be told."""

    role: str
    step: int
    what: str
    cause: str = ""


@dataclass(frozen=True)
class Resumption:
    """The comparison of a run without a break, of `steps` steps, and one that was stopped behind step `stopped`.

    `parted` is by how much the last losses are apart, relative to that without a break.
    """

    answer: Answer
    stopped: int
    steps: int
    resumed_steps: int
    differences: tuple[Difference, ...]
    parted: float | None


def read_trace(path: Path) -> Trace:
    """Return the trace of a run; of one that trained nothing it is empty."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines]
    trace = Trace(saves=saved_files(rows))
    lists = {Row.LOAD: trace.loads, Row.RESTORE: trace.restored}
    for row in rows:
        kind = row["kind"]
        if kind == Row.START:
            trace.steps.append(Step(row["state"]))
        elif kind == Row.STOP:
            trace.stopped = trace.saves[-1]["step"]  # those behind are lost
        elif kind in lists:
            lists[kind].append(row)
        elif trace.steps and kind == Row.BATCH:
            trace.steps[-1].batches.append(row["batch"])
        elif trace.steps and kind == Row.LOSS:
            trace.steps[-1].losses.append(row["loss"])
        elif trace.steps and kind == Row.STEP:
            trace.steps[-1].has_ended = True
    trace.steps = [step for step in trace.steps if step.has_ended]
    return trace


def compare_traces(whole: Trace, broken: Trace, resumed: Trace) -> Resumption:
    """Compare a run without a break with the steps of one that was started again behind `broken.stopped` steps."""
    assert broken.stopped is not None
    at = broken.stopped
    left = whole.steps[at:]
    if resumed.steps and at and _starts_from_scratch(whole, resumed, at):
        found = [Difference("weights", at + 1, "all, as in the first step", _why_not_resumed(broken, resumed))]
        return Resumption(
            Answer.NOT_RESUMED, at, len(whole.steps), len(resumed.steps), tuple(found), losses_apart(whole, resumed)
        )
    found = []
    for role in ROLES:
        difference = _first_difference(role, whole, at, broken, resumed)
        if difference is not None:
            found.append(difference)
    if len(resumed.steps) != len(left):
        text = f"{len(resumed.steps)} steps where {len(left)} were left"
        found.append(Difference("steps", at + 1 + min(len(resumed.steps), len(left)), text, _why_other_steps()))
    found.sort(key=lambda one: (one.step, ROLES.index(one.role) if one.role in ROLES else len(ROLES)))
    roles = {one.role for one in found}
    # A generator that nothing draws from changes nothing.
    if not roles - {"generators"}:
        answer = Answer.EXACT
    elif not {one.role for one in found if one.step == at + 1} & set(RESTORED) and _is_order(found):
        answer = Answer.DATA_ORDER
    else:
        answer = Answer.DIFFERS
    return Resumption(answer, at, len(whole.steps), len(resumed.steps), tuple(found), losses_apart(whole, resumed))


def _is_order(found: list[Difference]) -> bool:
    """Return whether batches are the first that differs, generators aside, which draw them."""
    first = next(one for one in found if one.role != "generators")
    return first.role == "batches"


def _starts_from_scratch(whole: Trace, resumed: Trace, at: int) -> bool:
    first, begun, due = resumed.steps[0].state, whole.steps[0].state, whole.steps[min(at, len(whole.steps) - 1)].state
    return bool(first["weights"] == begun["weights"] != due["weights"])


def _why_not_resumed(broken: Trace, resumed: Trace) -> str:
    saved = {row["path"] for row in broken.saves}
    loads = [row for row in resumed.loads if row["path"] in saved]
    if not loads:
        return "the script loads none of its files: it needs arguments that name one, by --resume-args"
    return f"{loads[0]['line']} loads a file, and the weights are not those in it"


def _why_other_steps() -> str:
    return "the script does not continue its count of steps or epochs"


def losses_apart(whole: Trace, other: Trace) -> float | None:
    """Return how far the losses of the last steps are apart, relative to that without a break; None if one has none."""
    first, second = (trace.steps[-1].losses[-1:] if trace.steps else [] for trace in (whole, other))
    for one, two in zip(first, second, strict=False):
        if one is not None and two is not None:
            return abs(two - one) / max(abs(one), 1e-12)
    return None


def _first_difference(role: str, whole: Trace, at: int, broken: Trace, resumed: Trace) -> Difference | None:
    for index, (first, second) in enumerate(zip(whole.steps[at:], resumed.steps, strict=False)):
        values = first.value(role), second.value(role)
        if role in ("weights", "buffers", "masters", "moments"):
            what = _first_other_tensor(role, *values)
        else:
            what = "" if values[0] == values[1] else _in_words(role, *values)
        if what:
            if role == "masters" and index and (half := _made_again(whole.steps[at], resumed.steps[0])):
                return Difference(role, at + 1, what, MADE_AGAIN.format(half))
            cause = _cause(role, what, at + index, at, whole, broken, resumed)
            return Difference(role, at + index + 1, what, cause)
    return None


def _made_again(due: Step, first: Step) -> str:
    """Return the type of the weights from which masters are made behind the first step's start; "" for none."""
    masters, weights = due.value("masters"), first.value("weights")
    names = sorted(masters.keys() & weights.keys() - first.value("masters").keys())
    return _rounding([(masters[name], weights[name]) for name in names])


def _first_other_tensor(role: str, whole: dict[str, Any], resumed: dict[str, Any]) -> str:
    """Return the name of the first tensor that differs; models that a step has not called yet are left out."""
    for name in whole.keys() & resumed.keys() if role != "moments" else whole:
        if role == "moments":
            if name not in resumed:
                continue  # of an optimizer that is not made yet
            for key, value in whole[name].items():
                if resumed[name].get(key, {}).get("values") != value["values"]:
                    return f"{key} of {name}"
        elif whole[name]["values"] != resumed[name]["values"]:
            return min(each for each in whole.keys() & resumed.keys() if whole[each] != resumed[each])
    return ""


def _in_words(role: str, whole: Any, resumed: Any) -> str:
    if role == "batches":
        return "another batch"
    if role == "generators":
        return ", ".join(name for name in whole if whole[name] != resumed.get(name))
    pairs = [(a, b) for a, b in zip(whole, resumed, strict=False) if a != b]
    if not pairs:
        return f"{len(whole)} values, then {len(resumed)}"
    if role == "loss scale":
        (scale, count), (scale_then, count_then) = pairs[0]
        if scale == scale_then:
            return f"{count_then:g} steps without an overflow in place of {count:g}"
        return f"{scale_then:g} in place of {scale:g}"
    first, second = pairs[0]
    return f"{second:g} in place of {first:g}" if None not in (first, second) else f"{second} in place of {first}"


# Causes.


def _cause(role: str, what: str, index: int, at: int, whole: Trace, broken: Trace, resumed: Trace) -> str:
    """Return why a role differs in the step of an index, where that can be told; only the first step tells."""
    if index != at:
        return (
            _cause_of_generators(index, whole, at, resumed)
            if role == "loss"
            else (_cause_of_batches(index, at, whole, resumed) if role == "batches" else "")
        )
    first, second = whole.steps[at], resumed.steps[0]
    if role in ("weights", "buffers", "masters"):
        return _cause_of_tensors(role, first.value(role), second.value(role), broken)
    if role == "moments":
        return _cause_of_moments(first.value(role), second.value(role), broken, resumed)
    if role == "loss scale":
        return _cause_of_state("scaler", second.value(role) == whole.steps[0].value(role), broken, resumed)
    if role == "learning rate":
        return _cause_of_state("scheduler", second.value(role) == whole.steps[0].value(role), broken, resumed)
    if role == "batches":
        return _cause_of_batches(index, at, whole, resumed)
    return _cause_of_generators(index, whole, at, resumed) if role == "loss" else ""


def _rounding(pairs: list[tuple[dict[str, str], dict[str, str]]]) -> str:
    """Return the 16-bit type to which all tensors were rounded that differ; "" if they were not."""
    apart = [(a, b) for a, b in pairs if a["values"] != b["values"]]
    for name, short in HALVES.items():
        if apart and all(a.get(name) == b["values"] for a, b in apart):
            return short
    return ""


def _cause_of_tensors(role: str, whole: dict[str, Any], resumed: dict[str, Any], broken: Trace) -> str:
    both = sorted(whole.keys() & resumed.keys())
    half = _rounding([(whole[name], resumed[name]) for name in both])
    saved = broken.saves[-1]["line"] if broken.saves else ""
    if half and role == "masters":
        return MADE_AGAIN.format(half)
    if half:
        return f"{role} were saved or loaded in {half}{f' ({saved})' * bool(saved)}"
    return ""


def _cause_of_moments(whole: dict[str, Any], resumed: dict[str, Any], broken: Trace, again: Trace) -> str:
    both = [name for name in whole if name in resumed]
    if all(not resumed[name] for name in both):
        return _cause_of_state("optimizer", True, broken, again)
    pairs = [(value, resumed[name][key]) for name in both for key, value in whole[name].items() if key in resumed[name]]
    half = _rounding(pairs)
    if half:
        return f"moments were saved or loaded in {half}{_line_of(broken.saves)}"
    apart = {key for name in both for key, value in whole[name].items()
             if resumed[name].get(key, {}).get("values") != value["values"]}  # fmt: skip
    return "the optimizer's count of steps starts again" if apart == {"step"} else ""


def _cause_of_state(what: str, starts_again: bool, broken: Trace, resumed: Trace) -> str:
    """Return why the state of a scaler, an optimizer or a schedule is not the saved one."""
    holds = {part for row in broken.saves for part in row["holds"]}
    restored = [row for row in resumed.restored if row["what"] == what]
    begins = f"{WORDS[what]} starts from scratch" if starts_again else f"{WORDS[what]} has another state"
    if what not in holds:
        return f"{begins}: its state is not in the file{_line_of(broken.saves)}"
    if not restored:
        return f"{begins}: its state is in the file, and is not loaded{_line_of(resumed.loads)}"
    return f"{begins}, though {restored[-1]['line']} loads its state"


def _line_of(rows: list[dict[str, Any]]) -> str:
    return f" ({rows[-1]['line']})" if rows else ""


def _cause_of_batches(index: int, at: int, whole: Trace, resumed: Trace) -> str:
    given = resumed.steps[index - at].batches
    earlier = [number for number, step in enumerate(whole.steps[:at]) if step.batches == given]
    if earlier:
        return f"the sampler starts its epoch again: these are the batches of step {earlier[-1] + 1}"
    later = [number for number, step in enumerate(whole.steps) if number > index and step.batches == given]
    if later:
        return f"batches are left out: these are those of step {later[0] + 1}"
    seen = Counter(batch for step in whole.steps for batch in step.batches)
    if all(batch in seen for step in resumed.steps for batch in step.batches):
        return "the batches come in another order"
    return "the sampler draws other batches: the generator that it draws from is not restored"


def _cause_of_generators(index: int, whole: Trace, at: int, resumed: Trace) -> str:
    first, second = whole.steps[index], resumed.steps[index - at]
    if any(first.value(role) != second.value(role) for role in (*RESTORED, "batches")):
        return ""
    names = _in_words("generators", first.value("generators"), second.value("generators"))
    return f"dropout, or what else is random, draws other numbers: generators are not restored ({names})" * bool(names)
