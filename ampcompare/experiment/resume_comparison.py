"""Whether a script that was stopped and started again trains as one that was not: from the traces of both."""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from ampcompare.base.tensors.type_names import NAME_BY_TORCH_NAME
from ampcompare.settings.resume_trace import (
    STATISTICS,
    TraceRowKind,
    last_accelerate_state_folder,
    read_trace_rows,
    rows_of_saved_files,
)

# What a checkpoint has to restore, in the order in which it is compared: the first difference causes those behind it.
RESTORED = ("masters", "weights", "buffers", "moments", "averages", "loss scale", "learning rate", "options")
ROLES = (*RESTORED, "steps", "batches", "generators", "loss")
STATES = {"loss scale": "scales", "learning rate": "rates"}
MADE_AGAIN = "masters are rounded to {0}: they are made again from the {0} weights at load"
NO_MASTERS = "the file has the weights rounded to {}, and not their masters"
MIDDLE = "it saves in the middle of a step: the gradients that were accumulated by then are not in the file"
FIRST = "{} are those that the script starts with: {}"
COUNTS = ("num_batches_tracked", "step")  # the least telling names of what differs
HALVES = ("bfloat16", "float16")  # what fits both is called the first
WORDS = {"scaler": "the GradScaler", "optimizer": "the optimizer", "scheduler": "the schedule"}


class ResumptionAnswer(Enum):
    """What came of a resumption."""

    EXACT = "exact"
    DATA_ORDER = "same up to data order"
    NOT_RESUMED = "not resumed"
    DIFFERS = "differs"


@dataclass
class TracedStep:
    """What one step of a trace started from, and computed.

    `made` has the numbers of the optimizers and scalers that are left, in the order in which all were made; `samples`
    those of all `batches`.
    """

    state: dict[str, Any]
    made: dict[str, list[int]] = field(default_factory=dict)
    batches: list[str] = field(default_factory=list)
    samples: list[str] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)
    has_ended: bool = False

    def value_of_role(self, role: str) -> Any:
        """Return what is compared of a role."""
        if role == "batches":
            return self.batches
        return self.losses if role == "loss" else self.state.get(STATES.get(role, role), {})


@dataclass
class ResumeTrace:
    """What a run of a script did.

    Attributes:
        steps: all of them that ended.
        saves: rows of files that were saved.
        loads: rows of files that were loaded.
        restored: rows of what was restored.
        trainers: rows of trainers that were started again.
        states: the folder that Accelerate has filled last; "" for none.
        stopped: how many steps had ended where it saved last, before it was stopped; None if it ran to its end.
        error: with which it ended; "" for none.
        last: a step that did not end.
    """

    steps: list[TracedStep] = field(default_factory=list)
    saves: list[dict[str, Any]] = field(default_factory=list)
    loads: list[dict[str, Any]] = field(default_factory=list)
    restored: list[dict[str, Any]] = field(default_factory=list)
    trainers: list[dict[str, Any]] = field(default_factory=list)
    states: str = ""
    stopped: int | None = None
    error: str = ""
    last: TracedStep | None = None

    def note_error(self, error: str) -> None:
        """Take an error, with which it ended; one that failed in its first step is compared as far as it came."""
        self.error = error
        if not self.steps and self.last is not None:
            self.steps = [self.last]


@dataclass(frozen=True)
class RoleDifference:
    """The first difference of a role: in which step, counted from 1, where, and its cause if that can be told."""

    role: str
    step: int
    what: str
    cause: str = ""


@dataclass(frozen=True)
class ResumptionComparison:
    """The comparison of a run without a break, of `steps` steps, and one that was stopped behind step `stopped`.

    `parted` is by how much the last losses are apart, relative to that without a break.
    """

    answer: ResumptionAnswer
    stopped: int
    steps: int
    resumed_steps: int
    differences: tuple[RoleDifference, ...]
    parted: float | None

    @property
    def is_state_whole(self) -> bool:
        """Whether the first step behind the break starts from all that a checkpoint has to restore."""
        return not any(one.role in RESTORED and one.step == self.stopped + 1 for one in self.differences)


def read_trace(path: Path) -> ResumeTrace:
    """Return the trace of a run; of one that trained nothing it is empty."""
    rows = read_trace_rows(path)
    trace = ResumeTrace(saves=rows_of_saved_files(rows), states=last_accelerate_state_folder(rows))
    lists = {
        TraceRowKind.LOAD: trace.loads,
        TraceRowKind.RESTORE: trace.restored,
        TraceRowKind.TRAINER: trace.trainers,
    }
    for row in rows:
        kind = row["kind"]
        if kind == TraceRowKind.START:
            trace.steps.append(TracedStep(row["state"], row["made"]))
        elif kind == TraceRowKind.STOP:
            trace.stopped = trace.saves[-1]["step"]  # those behind are lost
        elif kind in lists:
            lists[kind].append(row)
        elif trace.steps and kind == TraceRowKind.BATCH:
            trace.steps[-1].batches.append(row["batch"])
            trace.steps[-1].samples += row.get("samples", [])
        elif trace.steps and kind == TraceRowKind.LOSS:
            trace.steps[-1].losses.append(row["loss"])
        elif trace.steps and kind == TraceRowKind.STEP:
            trace.steps[-1].has_ended = True
    trace.last = next((step for step in trace.steps[-1:] if not step.has_ended), None)
    trace.steps = [step for step in trace.steps if step.has_ended]
    return trace


def run_error_text(record: Path, text: str = "") -> str:
    """Return the error of a run that failed: of its record, or the last line that it wrote."""
    errors = [
        str(row["error"]) for row in read_trace_rows(record) if row.get("kind") == "end" and row["error"]
    ]
    lines = [line for line in text.splitlines() if line.strip()]
    return next(iter(errors), lines[-1] if lines else "it wrote nothing")


def compare_traces(
    unbroken: ResumeTrace, interrupted: ResumeTrace, resumed: ResumeTrace
) -> ResumptionComparison:
    """Compare a run without a break with the steps of one that was started again behind `interrupted.stopped` steps."""
    assert interrupted.stopped is not None
    at = interrupted.stopped
    if resumed.steps and at and _is_started_from_scratch(unbroken, resumed, at):
        found = [
            RoleDifference(
                "weights", at + 1, "all, as in the first step", _why_not_resumed(interrupted, resumed)
            )
        ]
        answer, parted = ResumptionAnswer.NOT_RESUMED, distance_of_last_losses(unbroken, resumed)
    else:
        found = _first_difference_of_each_role(unbroken, at, interrupted, resumed)
        answer = _answer_from_differences(found, unbroken, at, resumed)
        # those of other steps tell nothing
        parted = None if resumed.error else distance_of_last_losses(unbroken, resumed)
    return ResumptionComparison(answer, at, len(unbroken.steps), len(resumed.steps), tuple(found), parted)


def _first_difference_of_each_role(
    unbroken: ResumeTrace, break_step: int, interrupted: ResumeTrace, resumed: ResumeTrace
) -> list[RoleDifference]:
    """Return the first difference of each role, those of the first steps first."""
    shift = _num_steps_count_is_behind(unbroken, break_step, resumed)
    found: list[RoleDifference] = []
    for role in ROLES:
        if role == "steps":
            continue
        if (
            shift
            and role in ("batches", "learning rate")
            and _is_role_shifted(role, unbroken, break_step, resumed, shift)
        ):
            continue
        difference = _first_difference_of_role(role, unbroken, break_step, interrupted, resumed)
        if difference is not None:
            found.append(difference)
    if lost := _num_forward_passes_before_save(unbroken, break_step, resumed):
        drawn = ("learning rate", "options", "batches", "generators")
        found = [one for one in found if one.step > break_step + 1 or one.role not in drawn]
        text = f"{lost} of {len(unbroken.steps[break_step].batches)} forward passes left out"
        found.append(
            RoleDifference(
                "steps", break_step + 1, text, f"{MIDDLE}{_line_of_last_row_in_brackets(interrupted.saves)}"
            )
        )
    made, left = len(resumed.steps), len(unbroken.steps[break_step:])
    text = f"{made} steps where {left} were left"
    if shift:
        found.append(RoleDifference("steps", break_step + 1, text, _why_role_is_shifted(shift, break_step)))
    elif made != left and not resumed.error:
        found.append(RoleDifference("steps", break_step + 1 + min(made, left), text, _why_steps_differ()))
    return sorted(found, key=lambda one: (one.step, ROLES.index(one.role)))


def _answer_from_differences(
    differences: list[RoleDifference], unbroken: ResumeTrace, break_step: int, resumed: ResumeTrace
) -> ResumptionAnswer:
    """Return what the differences come to: a generator that nothing draws from changes nothing."""
    others = [one for one in differences if one.role != "generators"]
    if not others:
        return ResumptionAnswer.EXACT
    is_whole = not {one.role for one in differences if one.step == break_step + 1} & set(RESTORED)
    if not is_whole or others[0].role != "batches":  # generators aside, which draw them
        return ResumptionAnswer.DIFFERS
    return (
        ResumptionAnswer.DIFFERS
        if _trains_samples_that_whole_run_lacks(unbroken, resumed)
        else ResumptionAnswer.DATA_ORDER
    )


def _trains_samples_that_whole_run_lacks(unbroken: ResumeTrace, resumed: ResumeTrace) -> bool:
    """Return whether a script that was started again trains samples that the run without a break has not seen.

    Those of an augmentation that is not restored are others, and those of a sampler may be.
    """
    seen = {sample for step in unbroken.steps for sample in step.samples}
    return not {sample for step in resumed.steps for sample in step.samples} <= seen


def _num_steps_count_is_behind(unbroken: ResumeTrace, break_step: int, resumed: ResumeTrace) -> int:
    """Return by how many steps the count of a script is behind that of the run without a break; 0 if it is not.

    Its batches are then those of steps so much earlier, and it trains so many steps more.
    """
    shift = len(resumed.steps) - (len(unbroken.steps) - break_step)
    if not shift or not 0 <= break_step - shift < len(unbroken.steps) or (shift < 0 and resumed.error):
        return 0
    pairs = list(zip(unbroken.steps[break_step - shift :], resumed.steps, strict=False))
    unshifted = list(zip(unbroken.steps[break_step:], resumed.steps, strict=False))
    for numbers in (_digests_of_first_batch, _learning_rates_of_step):  # either goes by the script's count
        is_same = bool(pairs) and all(numbers(one) == numbers(other) for one, other in pairs)
        if is_same and any(numbers(one) != numbers(other) for one, other in unshifted):
            return shift
    return 0


def _digests_of_first_batch(step: TracedStep) -> list[str]:
    """Return the first batch of a step: the next may be noise, say, whose generator goes on."""
    return step.batches[:1]


def _learning_rates_of_step(step: TracedStep) -> Any:
    return step.value_of_role("learning rate")


def _num_forward_passes_before_save(unbroken: ResumeTrace, break_step: int, resumed: ResumeTrace) -> int:
    """Return how many forward passes at the begin of the step behind the break were made before the script saved."""
    has_ended = bool(resumed.steps) and resumed.steps[0].has_ended
    due, given = unbroken.steps[break_step].batches, resumed.steps[0].batches if has_ended else []
    lost = len(due) - len(given)
    return lost if given and lost > 0 and due[lost:] == given != due[: len(given)] else 0


def _is_role_shifted(
    role: str, unbroken: ResumeTrace, break_step: int, resumed: ResumeTrace, shift: int
) -> bool:
    return bool(
        unbroken.steps[break_step - shift].value_of_role(role) == resumed.steps[0].value_of_role(role)
    )


def _why_role_is_shifted(shift: int, break_step: int) -> str:
    is_off = "the count of steps, or the place in the epoch, is"
    if shift == 1:
        return f"step {break_step} is made again: {is_off} off by one"
    if shift == -1:
        return f"step {break_step + 1} is left out: {is_off} off by one"
    if shift > 0:
        return f"steps {break_step - shift + 1} to {break_step} are made again: {is_off} older"
    return f"steps {break_step + 1} to {break_step - shift} are left out: {is_off} ahead"


def _is_started_from_scratch(unbroken: ResumeTrace, resumed: ResumeTrace, break_step: int) -> bool:
    first, begun = resumed.steps[0].state["weights"], unbroken.steps[0].state["weights"]
    return bool(first == begun != unbroken.steps[min(break_step, len(unbroken.steps) - 1)].state["weights"])


def _why_not_resumed(interrupted: ResumeTrace, resumed: ResumeTrace) -> str:
    saved = {row["path"] for row in interrupted.saves}
    loads = [row for row in resumed.loads if row["path"] in saved]
    if not loads:
        return "the script loads none of its files: it needs arguments that name one, by --resume-args"
    return f"{loads[0]['line']} loads a file, and the weights are not those in it"


def _why_steps_differ() -> str:
    return "the script does not continue its count of steps or epochs"


def distance_of_last_losses(unbroken: ResumeTrace, other: ResumeTrace) -> float | None:
    """Return how far the losses of the last steps are apart, relative to that without a break; None if one has none."""
    first, second = (trace.steps[-1].losses[-1:] if trace.steps else [] for trace in (unbroken, other))
    for one, two in zip(first, second, strict=False):
        if one is not None and two is not None:
            return abs(two - one) / max(abs(one), 1e-12)
    return None


def _first_difference_of_role(
    role: str, unbroken: ResumeTrace, break_step: int, interrupted: ResumeTrace, resumed: ResumeTrace
) -> RoleDifference | None:
    if role == "averages":
        return _first_differing_average(unbroken, break_step, interrupted, resumed)
    for index, (first, second) in enumerate(zip(unbroken.steps[break_step:], resumed.steps, strict=False)):
        if not second.has_ended and role in ("batches", "loss"):
            break
        if role == "weights" and first.value_of_role("masters") and not _has_masters(resumed):
            continue  # 16-bit copies of the masters, which the other trains as its weights
        values = _both_values_of_role(role, first, second, resumed)
        if role in ("weights", "buffers", "masters", "moments"):
            what = _first_differing_tensor_name(role, *values)
        elif role == "options":
            what = str(_first_changed_group_option(*values) or "")
        else:
            what = "" if values[0] == values[1] else _resumed_difference_text(role, *values)
        if what:
            if (
                role == "masters"
                and index
                and (half := _weight_type_behind_remade_masters(unbroken.steps[break_step], resumed.steps[0]))
            ):
                return RoleDifference(role, break_step + 1, what, MADE_AGAIN.format(half))
            cause = _why_role_differs(
                role, what, break_step + index, break_step, unbroken, interrupted, resumed
            )
            return RoleDifference(role, break_step + index + 1, what, cause)
    return None


def _both_values_of_role(
    role: str, first: TracedStep, second: TracedStep, resumed: ResumeTrace
) -> tuple[Any, Any]:
    """Return what is compared of a role: with masters, the weights of a script that has none."""
    has_none = role == "masters" and bool(first.value_of_role(role)) and not _has_masters(resumed)
    return first.value_of_role(role), second.value_of_role("weights" if has_none else role)


def _has_masters(trace: ResumeTrace) -> bool:
    return any(step.value_of_role("masters") for step in trace.steps)


def _first_differing_average(
    unbroken: ResumeTrace, break_step: int, interrupted: ResumeTrace, resumed: ResumeTrace
) -> RoleDifference | None:
    """Return the first copy of the weights that follows them from step to step, and is another one at the break.

    One that is still equal a step later, or that the script fills only behind its first step, is none.
    """
    names = (
        unbroken.steps[break_step].value_of_role("averages").keys()
        & resumed.steps[0].value_of_role("averages").keys()
        if resumed.steps
        else ()
    )
    for name in sorted(names):
        values = [step.value_of_role("averages").get(name, {}).get("values") for step in unbroken.steps]
        changes = sum(one != other for one, other in itertools.pairwise(values))
        pairs = zip(values[break_step:], resumed.steps[:2], strict=False)
        if 2 * changes >= len(values) and all(
            one != step.value_of_role("averages").get(name, {}).get("values") for one, step in pairs
        ):
            cause = "the average of the weights is not restored: it is not in the file, or not loaded"
            return RoleDifference(
                "averages", break_step + 1, name, f"{cause}{_line_of_last_row_in_brackets(interrupted.saves)}"
            )
    return None


def _weight_type_behind_remade_masters(due: TracedStep, first: TracedStep) -> str:
    """Return the type of the weights from which masters are made behind the first step's start; "" for none."""
    masters, given = (
        due.value_of_role("masters"),
        {each["values"] for each in first.value_of_role("weights").values()},
    )
    left = [masters[name] for name in masters.keys() - first.value_of_role("masters").keys()]
    for name in HALVES:
        if left and all(each.get(name) in given for each in left):
            return NAME_BY_TORCH_NAME[name]
    return ""


def _names_of_differing_moments(
    unbroken: dict[str, Any], resumed: dict[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yield the moments that differ, of parameters that both runs have: the parameter, and the key of the moment."""
    for name in unbroken:
        if name not in resumed:
            continue
        for key, value in unbroken[name].items():
            if resumed[name].get(key, {}).get("values") != value["values"]:
                yield name, key


def _first_differing_tensor_name(role: str, unbroken: dict[str, Any], resumed: dict[str, Any]) -> str:
    """Return the name of a tensor that differs, the most telling one, the first; "" if none does.

    Models that a step has not called yet, and optimizers that are not made yet, are left out.
    """
    if role == "moments":
        apart = sorted(_names_of_differing_moments(unbroken, resumed), key=lambda one: one[1] in COUNTS)
        return f"{apart[0][1]} of {apart[0][0]}" if apart else ""
    both = sorted(unbroken.keys() & resumed.keys())
    names = [name for name in both if unbroken[name]["values"] != resumed[name]["values"]]
    return min(names, key=lambda name: name.partition(" of model ")[0].endswith(COUNTS), default="")


@dataclass(frozen=True)
class _GroupOptionChangedByResume:
    """An option of a group of parameters that is another one behind the break.

    `optimizer` and `group` are counted from 0; the number of each is said where there are several.
    """

    name: str
    optimizer: int
    group: int
    due: Any
    given: Any
    several_groups: bool
    several_optimizers: bool

    def __str__(self) -> str:
        place = f" of group {self.group + 1}" * self.several_groups
        place += f" of optimizer {self.optimizer + 1}" * self.several_optimizers
        due, given = (
            f"{each:g}" if isinstance(each, float) else str(each) for each in (self.due, self.given)
        )
        return f"{self.name}{place}: {given} in place of {due}"


def _first_changed_group_option(
    unbroken: list[Any], resumed: list[Any]
) -> _GroupOptionChangedByResume | None:
    return next(_group_options_changed_by_resume(unbroken, resumed), None)


def _group_options_changed_by_resume(
    unbroken: list[Any], resumed: list[Any]
) -> Iterator[_GroupOptionChangedByResume]:
    """Yield the options that differ, of those that both runs have."""
    for optimizer, (due, given) in enumerate(zip(unbroken, resumed, strict=False)):
        for group, (one, other) in enumerate(zip(due, given, strict=False)):
            for name in one:
                if name in other and one[name] != other[name]:
                    several = len(due) > 1, len(unbroken) > 1
                    yield _GroupOptionChangedByResume(
                        name, optimizer, group, one[name], other[name], *several
                    )


def _resumed_difference_text(role: str, unbroken: Any, resumed: Any) -> str:
    if role == "batches":
        return "another batch"
    if role == "generators":
        return ", ".join(name for name in unbroken if unbroken[name] != resumed.get(name))
    pairs = [(a, b) for a, b in zip(unbroken, resumed, strict=False) if a != b]
    if not pairs:
        return f"{len(unbroken)} values, then {len(resumed)}"
    if role == "loss scale":
        (scale, count), (scale_then, count_then) = pairs[0]
        if scale == scale_then:
            return f"{count_then:g} steps without an overflow in place of {count:g}"
        return f"{scale_then:g} in place of {scale:g}"
    first, second = pairs[0]
    return (
        f"{second:g} in place of {first:g}"
        if None not in (first, second)
        else f"{second} in place of {first}"
    )


# Causes.


def _why_role_differs(
    role: str,
    what: str,
    index: int,
    break_step: int,
    unbroken: ResumeTrace,
    interrupted: ResumeTrace,
    resumed: ResumeTrace,
) -> str:
    """Return why a role differs in the step of an index, where that can be told."""
    if index != break_step:
        return _why_role_differs_later(role, index, break_step, unbroken, interrupted, resumed)
    first, second = unbroken.steps[break_step], resumed.steps[0]
    if role in ("weights", "buffers", "masters"):
        values = _both_values_of_role(role, first, second, resumed)
        rounded = _why_tensors_differ(role, *values, interrupted, has_masters=_has_masters(resumed))
        average = _name_of_average_taken_as_weights(first, second) if role == "weights" else ""
        if average:
            return f"weights are those of the average {average}{_line_of_last_row_in_brackets(resumed.loads)}"
        return rounded or _why_tensors_are_older(role, break_step, unbroken, interrupted, resumed)
    if role == "moments":
        known = _why_moments_differ(
            first.value_of_role(role), second.value_of_role(role), interrupted, resumed
        )
        return known or _why_tensors_are_older(role, break_step, unbroken, interrupted, resumed)
    if role == "loss scale":
        pairs = zip(first.value_of_role(role), second.value_of_role(role), strict=False)
        place = next((place for place, (one, other) in enumerate(pairs) if one != other), None)
        begins = second.value_of_role(role) == unbroken.steps[0].value_of_role(role)
        return _why_state_differs("scaler", begins, interrupted, resumed, place)
    if role == "learning rate":
        begins = second.value_of_role(role) == unbroken.steps[0].value_of_role(role)
        then = None if begins else _unbroken_step_with_resumed_rates(unbroken, break_step, resumed)
        if then is not None:
            return _why_schedule_resumes_elsewhere(then, break_step, interrupted, resumed)
        return _why_state_differs("scheduler", begins, interrupted, resumed)
    if (
        role == "options"
        and (option := _first_changed_group_option(first.value_of_role(role), second.value_of_role(role)))
        is not None
    ):
        begins = option in _group_options_changed_by_resume(
            first.value_of_role(role), unbroken.steps[0].value_of_role(role)
        )
        return _why_state_differs(
            "optimizer", begins, interrupted, resumed, option.optimizer, state_part="options"
        )
    if role == "batches":
        return _why_batches_differ(index, break_step, unbroken, resumed)
    return _why_loss_differs(index, unbroken, break_step, resumed) if role == "loss" else ""


def _why_role_differs_later(
    role: str,
    index: int,
    break_step: int,
    unbroken: ResumeTrace,
    interrupted: ResumeTrace,
    resumed: ResumeTrace,
) -> str:
    """Return why a role differs in a step behind the first one of a script that was started again."""
    if role in ("weights", "moments", "masters", "loss") and (
        kept := _type_difference_text(unbroken.steps[break_step], resumed.steps[0])
    ):
        return kept
    if role == "learning rate":
        begins = unbroken.steps[index - break_step].value_of_role(role) == resumed.steps[
            index - break_step
        ].value_of_role(role)
        return _why_state_differs("scheduler", begins, interrupted, resumed, only_missing=True)
    if unbroken.steps[index].value_of_role("weights") != resumed.steps[index - break_step].value_of_role(
        "weights"
    ):
        return ""  # what has led to these
    if role == "batches":
        return _why_batches_differ(index, break_step, unbroken, resumed)
    return _why_loss_differs(index, unbroken, break_step, resumed) if role == "loss" else ""


def _unbroken_step_with_resumed_rates(
    unbroken: ResumeTrace, break_step: int, resumed: ResumeTrace
) -> int | None:
    """Return the step without a break from which on the rates are those of the script that was started again."""
    rates = [_learning_rates_of_step(step) for step in resumed.steps]
    due = [_learning_rates_of_step(step) for step in unbroken.steps]
    fitting = [
        then for then in range(1, len(due)) if all(a == b for a, b in zip(due[then:], rates, strict=False))
    ]
    return min(
        (then for then in fitting if then != break_step),
        key=lambda then: abs(then - break_step),
        default=None,
    )


def _why_schedule_resumes_elsewhere(
    schedule_step: int, break_step: int, interrupted: ResumeTrace, resumed: ResumeTrace
) -> str:
    """Return why the schedule resumes from another step than that of an index, at which the script was stopped."""
    steps = f"{abs(schedule_step - break_step)} step{'s' * (abs(schedule_step - break_step) != 1)}"
    restored = [row["line"] for row in resumed.restored if row["what"] == "scheduler"]
    if schedule_step > break_step and restored:
        return (
            f"the schedule is {steps} ahead: it is stepped again behind {restored[-1]}, which loads its state"
        )
    place = f"the schedule is {steps} {'ahead' if schedule_step > break_step else 'behind'}"
    return _why_state_differs("scheduler", False, interrupted, resumed, place=place)


def _name_of_average_taken_as_weights(due_step: TracedStep, resumed_step: TracedStep) -> str:
    """Return the name of the average whose values a model has as its weights; "" for none."""
    averages = due_step.value_of_role("averages")
    apart = [
        one for one in resumed_step.value_of_role("together") if one not in due_step.value_of_role("together")
    ]
    return next((name for name in sorted(averages) if averages[name]["values"] in apart), "")


def _type_difference_text(unbroken: TracedStep, resumed: TracedStep) -> str:
    """Return which tensors have the due values, in another type; "" if none has."""
    for role in ("masters", "weights", "moments"):
        due, given = (_tensors_of_role(role, step) for step in (unbroken, resumed))
        for name in due.keys() & given.keys():
            before, then = (each.get("dtype", "float32") for each in (due[name], given[name]))
            if before != then:
                before, then = (NAME_BY_TORCH_NAME.get(each, each) for each in (before, then))
                return f"{role} are in {before} before the break, and in {then} behind it"
    return ""


def _type_of_rounded_tensors(pairs: list[tuple[dict[str, str], dict[str, str]]]) -> str:
    """Return the 16-bit type to which all tensors were rounded that differ; "" if they were not."""
    apart = [(a, b) for a, b in pairs if a["values"] != b["values"]]
    for name in HALVES:
        if apart and all(a.get(name) == b["values"] for a, b in apart):
            return NAME_BY_TORCH_NAME[name]
    return ""


def _why_tensors_differ(
    role: str,
    unbroken: dict[str, Any],
    resumed: dict[str, Any],
    interrupted: ResumeTrace,
    *,
    has_masters: bool,
) -> str:
    both = sorted(unbroken.keys() & resumed.keys())
    half = _type_of_rounded_tensors([(unbroken[name], resumed[name]) for name in both])
    saved = interrupted.saves[-1]["line"] if interrupted.saves else ""
    if half and role == "masters":
        return (
            MADE_AGAIN.format(half)
            if has_masters
            else f"{NO_MASTERS.format(half)}{_line_of_last_row_in_brackets(interrupted.saves)}"
        )
    if half:
        return f"{role} were saved or loaded in {half}{f' ({saved})' * bool(saved)}"
    return ""


def _why_tensors_are_older(
    role: str, break_step: int, unbroken: ResumeTrace, interrupted: ResumeTrace, resumed: ResumeTrace
) -> str:
    """Return why tensors are those of an earlier step: an older file, or one that was written before they changed."""
    due, given = (
        _digests_by_tensor_name(role, step) for step in (unbroken.steps[break_step], resumed.steps[0])
    )
    apart = [name for name in due.keys() & given.keys() if due[name] != given[name]]
    for then in reversed(range(break_step)):
        earlier = _digests_by_tensor_name(role, unbroken.steps[then])
        if not apart or any(earlier.get(name) != given[name] for name in apart):
            continue
        last = {row["path"]: row for row in interrupted.saves}
        old = [row for row in resumed.loads if row["path"] in last and last[row["path"]]["step"] == then]
        if old and then:
            name = os.path.basename(old[-1]["path"])
            return f"an older file is loaded: {name}, of step {then} ({old[-1]['line']})"
        if not then:
            return FIRST.format(role, _file_of_unrestored_tensors_phrase(role, apart, interrupted, resumed))
        line = _line_of_last_row_in_brackets(interrupted.saves)
        return f"{role} are those behind step {then}: they were taken before step {then + 1}{line}"
    return ""


def _file_of_unrestored_tensors_phrase(
    role: str, differing_names: list[str], interrupted: ResumeTrace, resumed: ResumeTrace
) -> str:
    """Return whether tensors that are not restored are in the file; of statistics of a batch norm it is known."""
    if role != "buffers" or not all(
        name.partition(" of model ")[0].endswith(STATISTICS) for name in differing_names
    ):
        return (
            f"they are not in the file, or are not loaded{_line_of_last_row_in_brackets(interrupted.saves)}"
        )
    if any("buffers" in row["holds"] for row in interrupted.saves):
        return f"they are in the file, and are not loaded{_line_of_last_row_in_brackets(resumed.loads)}"
    return f"they are not in the file{_line_of_last_row_in_brackets(interrupted.saves)}"


def _digests_by_tensor_name(role: str, step: TracedStep) -> dict[str, str]:
    """Return the digests of a role's values, by names of one tensor each."""
    return {name: each["values"] for name, each in _tensors_of_role(role, step).items()}


def _tensors_of_role(role: str, step: TracedStep) -> dict[str, Any]:
    values: dict[str, Any] = step.value_of_role(role)
    if role != "moments":
        return values
    return {f"{key} of {name}": each for name, state in values.items() for key, each in state.items()}


def _are_moments_permuted(unbroken: dict[str, Any], resumed: dict[str, Any]) -> bool:
    """Return whether the moments are the saved ones, of other parameters."""
    both = unbroken.keys() & resumed.keys()

    def count(found: dict[str, Any]) -> Counter[tuple[str, Any]]:
        return Counter((key, each["values"]) for name in both for key, each in found[name].items())

    saved = count(unbroken)
    return bool(saved) and saved == count(resumed)


def _why_moments_differ(
    unbroken: dict[str, Any], resumed: dict[str, Any], interrupted: ResumeTrace, resumed_trace: ResumeTrace
) -> str:
    both = [name for name in unbroken if name in resumed]
    owners = {name: name.partition(" of optimizer ")[2] for name in both}
    empty = {owner for owner in owners.values()
             if all(unbroken[name] and not resumed[name] for name in both if owners[name] == owner)}  # fmt: skip
    if empty:
        number = int(min(empty) or 1) - 1
        return _why_state_differs("optimizer", True, interrupted, resumed_trace, number)
    if _are_moments_permuted(unbroken, resumed):
        return "moments are those of other parameters: the optimizer is given its parameters in another order"
    pairs = [
        (value, resumed[name][key])
        for name in both
        for key, value in unbroken[name].items()
        if key in resumed[name]
    ]
    if half := _type_of_rounded_tensors(pairs):
        return _why_moments_are_rounded(half, both, pairs, interrupted, resumed_trace)
    apart = {key for _, key in _names_of_differing_moments(unbroken, resumed)}
    return "the optimizer's count of steps starts again" if apart == {"step"} else ""


def _why_moments_are_rounded(
    half: str,
    names: list[str],
    pairs: list[tuple[dict[str, str], dict[str, str]]],
    interrupted: ResumeTrace,
    resumed_trace: ResumeTrace,
) -> str:
    """Return where moments were rounded to a 16-bit type: at load, to the type of their weights, or else.

    Args:
        names: of the weights.
        pairs: digests of a moment without a break and with one.
    """
    weights = resumed_trace.steps[0].value_of_role("weights")
    loads = [row for row in resumed_trace.restored if row["what"] == "optimizer"]
    short = {NAME_BY_TORCH_NAME.get(weights.get(name, {}).get("dtype", "")) for name in names}
    types = {
        NAME_BY_TORCH_NAME.get(given.get("dtype", ""))
        for due, given in pairs
        if due["values"] != given["values"]
    }
    if loads and short == types == {half}:
        line = _line_of_last_row_in_brackets(loads)
        return (
            f"moments are rounded to {half} at load: load_state_dict gives them the type of the weights{line}"
        )
    return f"moments were saved or loaded in {half}{_line_of_last_row_in_brackets(interrupted.saves)}"


def _why_state_differs(
    what: str,
    starts_again: bool,
    interrupted: ResumeTrace,
    resumed: ResumeTrace,
    number: int | None = None,
    *,
    only_missing: bool = False,
    place: str = "",
    state_part: str = "",
) -> str:
    """Return why the state of a scaler, a schedule or the optimizer of a number is not the saved one.

    Args:
        number: of the scaler or the optimizer, among those that are left.
        only_missing: say nothing where it is saved and loaded.
        place: at which step it is, in words.
        state_part: the part of its state that is not, a plural; all by default.
    """
    of_kind = [row for row in resumed.restored if row["what"] == what]
    left = resumed.steps[0].made.get(what, [])
    own = left[number] if number is not None and number < len(left) else None
    name = (
        f"optimizer {number + 1}"
        if number is not None and len(left) > 1 and what == "optimizer"
        else WORDS[what]
    )
    if state_part:
        begins = f"{state_part} of {name} {'are those that the script starts with' if starts_again else 'are others'}"
    else:
        begins = place or f"{name} {'starts from scratch' if starts_again else 'has another state'}"
    if what not in {part for row in interrupted.saves for part in row["holds"]}:
        return f"{begins}: its state is not in the file{_line_of_last_row_in_brackets(interrupted.saves)}"
    restored = [row for row in of_kind if own is None or row["number"] in (None, own)]
    if restored:
        return "" if only_missing else f"{begins}, though {restored[-1]['line']} loads its state"
    replaced = [row for row in of_kind if row["number"] is not None and row["number"] not in left]
    if replaced:
        return f"{begins}: {replaced[-1]['line']} loads its state into another one, which is replaced then"
    return f"{begins}: its state is in {_file_of_unloaded_state_phrase(what, interrupted, resumed)}"


def _file_of_unloaded_state_phrase(what: str, interrupted: ResumeTrace, resumed: ResumeTrace) -> str:
    """Return the file that holds a state which was not loaded, and whether that was loaded."""
    loaded = {row["path"] for row in resumed.loads}
    read = {part for row in interrupted.saves if row["path"] in loaded for part in row["holds"]}
    if loaded and read and what not in read:
        name = next(
            os.path.basename(row["path"]) for row in reversed(interrupted.saves) if what in row["holds"]
        )
        return f"{name}, which is not loaded"
    return f"the file, and is not loaded{_line_of_last_row_in_brackets(resumed.loads)}"


def _line_of_last_row_in_brackets(rows: list[dict[str, Any]]) -> str:
    return f" ({rows[-1]['line']})" if rows else ""


def _why_batches_differ(index: int, break_step: int, unbroken: ResumeTrace, resumed: ResumeTrace) -> str:
    given = resumed.steps[index - break_step].batches
    earlier = [number for number, step in enumerate(unbroken.steps[:break_step]) if step.batches == given]
    if earlier:
        return f"the sampler starts its epoch again: these are the batches of step {earlier[-1] + 1}"
    later = [number for number, step in enumerate(unbroken.steps) if number > index and step.batches == given]
    if later:
        return f"batches are left out: these are those of step {later[0] + 1}"
    seen = Counter(batch for step in unbroken.steps for batch in step.batches)
    if all(batch in seen for step in resumed.steps for batch in step.batches):
        return "the batches come in another order"
    at_step = (
        unbroken.steps[index].value_of_role("generators"),
        resumed.steps[index - break_step].value_of_role("generators"),
    )
    names = ", ".join(name for name in at_step[0] if at_step[0][name] != at_step[1].get(name))
    others = f" ({names})" * bool(names)
    if _trains_samples_that_whole_run_lacks(unbroken, resumed):
        return f"samples are others: generators from which a sampler or an augmentation draws are not restored{others}"
    return f"the sampler draws other batches: the generator that it draws from is not restored{others}"


def _why_loss_differs(index: int, unbroken: ResumeTrace, break_step: int, resumed: ResumeTrace) -> str:
    """Return why the same weights and batches have another loss: another scale by a power of two, or random numbers."""
    first, second = unbroken.steps[index], resumed.steps[index - break_step]
    if any(first.value_of_role(role) != second.value_of_role(role) for role in (*RESTORED, "batches")):
        return ""
    pairs = zip(first.losses, second.losses, strict=False)
    factors = {two / one for one, two in pairs if one and two is not None and one != two}
    factor = factors.pop() if len(factors) == 1 else 0.0
    if abs(math.frexp(factor)[0]) == 0.5:
        return f"the loss is {factor:g} times as large: a loss scale of the script's own is not the one that it was"
    return _why_generators_differ(index, unbroken, break_step, resumed)


def _why_generators_differ(index: int, unbroken: ResumeTrace, break_step: int, resumed: ResumeTrace) -> str:
    first, second = unbroken.steps[index], resumed.steps[index - break_step]
    names = _resumed_difference_text(
        "generators", first.value_of_role("generators"), second.value_of_role("generators")
    )
    return (
        f"dropout, or what else is random, draws other numbers: generators are not restored ({names})"
        * bool(names)
    )
