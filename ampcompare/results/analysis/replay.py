"""One step on two sides, module by module: is a difference another function, less exact, or noise?

Each module is compared with itself in fp64 on equal inputs and output gradients. Where the fp64 answers of both sides
differ, the function does. Where a side is farther from its fp64 answer than roundings explain, it is less exact. What
roundings explain is no factor between the two sides, of which another order of a sum makes any: it follows from
the type that the module computes in, and from how much a change of its inputs by half a unit in the last place moves
its fp64 answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ampcompare.base.formatting import format_count, format_few_names

Answer = Literal["noise", "less exact", "another function", "cannot tell"]
EXIT_CODES: dict[Answer, int] = {"noise": 0, "less exact": 1, "another function": 1, "cannot tell": 3}
PARTS = {
    "fwd": "forward",
    "dgrad": "gradient of inputs",
    "wgrad": "gradient of weights",
    "state": "state",
    "update": "update",
}
BATCH, LOSS, GRADIENTS = "(batch)", "(loss)", "(gradients)"
LEFT = "(left)"  # gradients that a step leaves to the next one
FP64 = 2.0**-53
# fp64 answers of one function differ by no more, or by so many units that inputs move
SAME, OF_FP64 = 1e-9, 2.0**10
# Units by which one function is off: sums of fp32 in any order, and 16-bit results, whose sums are in fp32.
OF_FP32 = 128.0
OF_HALF = 8.0
HALF = 2.0**-20
OF_BASE = 4.0
OF_ROUNDING = 4.0  # units of a weight that hold its update
OF_LOSS = 2.0**-12
MOST_MOVED = 0.125  # by half a unit in the last place of its inputs: what moves more has no digits
# What is compared without fp64, and up to where.
WITHOUT_FP64 = {BATCH: OF_LOSS, LOSS: OF_LOSS, GRADIENTS: 2.0**-10}
OF_MODULES = 8.0  # errors of a module that those of a whole step are at most, where modules are less exact


@dataclass(frozen=True)
class ReplayFinding:
    """A difference of a module between two replays that is not noise of rounding.

    Attributes:
        module: its name; `(batch)`, `(loss)`, `(gradients)` and the optimizer in parentheses are no modules.
        kind: its class.
        part: forward, dgrad, wgrad, state (buffers, moments) or update.
        tensor: the output, input or weight that is farthest off.
        apart: relative distance of the fp64 answers of both sides, or the error of the change against its fp64 answer.
        base: the error of the base.
        operation: of the forward pass, the first inside of the module that differs, with its line; "" if none is known.
    """

    module: str
    kind: str
    answer: Answer
    part: str
    tensor: str
    apart: float
    base: float | None = None
    operation: str = ""

    @property
    def finding_text(self) -> str:
        """Return the finding in words: the module, what differs, by how much, and the first operation."""
        return self._text_without_operation + (f", from {self.operation} on" if self.operation else "")

    @property
    def _text_without_operation(self) -> str:
        if self.module == BATCH:
            apart = "" if math.isinf(self.apart) else f", {self.apart:.1e} apart"
            return f"the script gives its models other inputs{apart}: data, masks, their order"
        if self.tensor == LEFT:
            return (
                "gradients that one side leaves to the next backward pass, which adds to them, are not there on the "
                "other: zero_grad"
            )
        if self.module == GRADIENTS:
            return f"equal gradients arrive at the optimizer {self.apart:.1e} apart: clipping, accumulation, unscaling"
        if self.module == LOSS:
            return f"equal outputs give another loss or other gradients, {self.apart:.1e} apart"
        if self.answer == "another function":
            return (
                "the definition differs"
                if math.isinf(self.apart)
                else f"fp64 answers are {self.apart:.1e} apart"
            )
        return f"error {self.base or 0.0:.1e} -> {self.apart:.1e}"


@dataclass(frozen=True)
class ModuleErrors:
    """How far a module is from its fp64 answer, at most, in units in the last place: of each part, base and change."""

    module: str
    kind: str
    units: Mapping[str, tuple[float, float]]
    answer: Answer


def _module_and_kind_text(finding: ReplayFinding) -> str:
    """Return the module of a finding with its kind; in brackets stands what is no module, such as the gradients."""
    has_kind = bool(finding.kind) and not finding.module.startswith("(")
    return f"{finding.module} ({finding.kind})" if has_kind else finding.module


@dataclass(frozen=True)
class ReplayJudgment:
    """Whether a change of torch, settings or script does more to one step than noise, and in which modules.

    Attributes:
        findings: the lowest modules that differ, in the order of the step, the heaviest part first.
        above: modules that contain one of them and differ as well.
        modules: how many were judged.
        unjudged: modules without an answer, with the reason.
    """

    change: str
    answer: Answer
    findings: Sequence[ReplayFinding] = ()
    above: Sequence[str] = ()
    modules: int = 0
    unjudged: Mapping[str, str] = field(default_factory=dict)
    errors: Sequence[ModuleErrors] = ()
    notes: Sequence[str] = ()
    why: str = ""

    @property
    def exit_code(self) -> int:
        """0 for noise, 1 where something differs, and 3 where that cannot be told."""
        return EXIT_CODES[self.answer]

    @property
    def module_names(self) -> list[str]:
        """The modules that findings name, each once."""
        return list(dict.fromkeys(one.module for one in self.findings))

    @property
    def sentence(self) -> str:
        """The answer in one sentence."""
        if self.answer == "cannot tell":
            return f"{self.change}: cannot tell: {self.why}"
        count = format_count(self.modules, "module")
        if self.answer == "noise":
            return f"{self.change}: noise: {count} and the update are the same functions, and as exact"
        names = format_few_names(
            [_module_and_kind_text(one) for one in _first_finding_of_each_module(self.findings)]
        )
        return f"{self.change}: {self.answer}: {names}; judged were {count}"

    def data(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {"sentence": self.sentence, **asdict(self)}


def _first_finding_of_each_module(findings: Sequence[ReplayFinding]) -> list[ReplayFinding]:
    return list({one.module: one for one in reversed(findings)}.values())[::-1]


def judge_replay(change: str, base: Mapping[str, Any], changed: Mapping[str, Any]) -> ReplayJudgment:
    """Judge what a change of torch, of settings or of the script does to one step.

    Args:
        change: its name.
        base, changed: what `one_step.py` wrote of both sides.
    """
    for side, found in (("the step as it is", base), (change, changed)):
        if found.get("fault"):
            return ReplayJudgment(change, "cannot tell", why=f"{side}: {found['fault']}")
    before = {_module_and_call_of_row(row): row for row in base["rows"]}
    findings: list[ReplayFinding] = []
    errors: list[ModuleErrors] = []
    unjudged: dict[str, str] = {}
    tops: dict[str, str] = {}
    losses: set[str] = set()
    for row in changed["rows"]:
        name, known = row["module"], before.get(_module_and_call_of_row(row))
        tops[name] = row.get("top", "")
        if row.get("top") == name and not row.get("parts", {}).get("wgrad"):
            losses.add(name)
        if "why" in row or (known is not None and "why" in known):
            unjudged[name] = row.get("why") or (known or {})["why"]
            continue
        mine = list(_findings_in_row(row, known))
        findings += mine
        if name not in WITHOUT_FP64:
            answer: Answer = mine[0].answer if mine else "noise"
            errors.append(ModuleErrors(name, row["kind"], _errors_in_units(row, known), answer))
    judged = len({one.module for one in errors if one.module[0] != "("})
    if not findings and (why := _why_noise_not_shown(judged, unjudged)):
        return ReplayJudgment(change, "cannot tell", unjudged=unjudged, errors=errors, why=why)
    named, above = _lowest_findings_and_explained_modules(findings, tops, losses)
    answers = {one.answer for one in named}
    answer = next((one for one in ("another function", "less exact") if one in answers), "noise")
    return ReplayJudgment(
        change, answer, named, above, judged, unjudged, errors, [*base.get("notes", ()), *changed.get("notes", ())]
    )  # fmt: skip


def _why_noise_not_shown(num_judged: int, reasons_by_unjudged: Mapping[str, str]) -> str:
    """Return why no finding does not mean noise; "" if it does."""
    if not num_judged:
        return "no module could be judged" + next(
            (f": {name}: {why}" for name, why in reasons_by_unjudged.items()), ""
        )
    update = next((f"{name}: {why}" for name, why in reasons_by_unjudged.items() if name[0] == "("), "")
    return f"modules are the same, but not judged is {update}" if update else ""


def _module_and_call_of_row(row: Mapping[str, Any]) -> tuple[str, int]:
    return ("(update)" if _is_update_row(row) else row["module"]), row["call"]


def _is_update_row(row: Mapping[str, Any]) -> bool:
    return "update" in row.get("parts", {})


def _changed_and_base_tensors(
    row: Mapping[str, Any], base_row: Mapping[str, Any] | None
) -> Iterator[tuple[str, str, Any, Any]]:
    for part, tensors in row["parts"].items():
        for name, entry in tensors.items():
            yield part, name, entry, ((base_row or {}).get("parts", {}).get(part, {})).get(name)


def _findings_in_row(row: Mapping[str, Any], base_row: Mapping[str, Any] | None) -> Iterator[ReplayFinding]:
    """Yield the worst of each part, functions before errors."""
    found: dict[tuple[bool, str], tuple[float, ReplayFinding]] = {}
    for part, name, entry, first in _changed_and_base_tensors(row, base_row):
        answer: Answer
        if row["module"] in WITHOUT_FP64:
            line = WITHOUT_FP64[row["module"]]
            answer, apart = "another function", _number_or_infinity(entry["error"])
        elif _number_or_infinity(entry.get("same", 0.0)) > (
            line := _least_function_change_that_counts(entry, first)
        ):
            answer, apart = "another function", _number_or_infinity(entry["same"])
        else:
            line = _least_error_change_that_counts(entry, first)
            answer = "less exact"
            apart = _number_or_infinity(entry["error"])
        if not apart > line:
            continue
        finding = ReplayFinding(
            row["module"],
            row["kind"],
            answer,
            part,
            name,
            apart,
            first and _number_or_infinity(first["error"]),
            _first_operation_with_other_answer(row, base_row, answer) if part == "fwd" else "",
        )
        key = (answer == "less exact", part)
        weight = apart / line if line else math.inf
        if key not in found or weight > found[key][0]:
            found[key] = weight, finding
    for key in sorted(found, key=lambda key: key[0]):
        yield found[key][1]


def _first_operation_with_other_answer(
    row: Mapping[str, Any], base_row: Mapping[str, Any] | None, answer: Answer
) -> str:
    """Return the first operation of a module with another fp64 answer than any of the base, or with a larger error.

    An operation has the answer of another one, whatever they are called and in which order they are, if size and mark
    of both agree. "" where no operation differs, or none is known, and for a module of a single one.
    """
    mine, theirs = row.get("operations", ()), (base_row or {}).get("operations", ())
    if len(mine) < 2 or not theirs:
        return ""
    for number, one in enumerate(mine):
        if answer == "another function":
            is_apart = not any(_have_equal_answers(one, other) for other in theirs)
        else:
            before = theirs[number]["error"] if number < len(theirs) else 0.0
            line = max(OF_BASE * before, (OF_FP32 if one["unit"] < HALF else OF_HALF) * theirs[0]["unit"])
            is_apart = _number_or_infinity(one["error"]) > line
        if is_apart:
            return f"{one['name']} ({one['line']})" if one["line"] else str(one["name"])
    return ""


def _have_equal_answers(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    most = SAME * max(one["size"], other["size"])
    return all(not abs(one[key] - other[key]) > most for key in ("size", "mark"))


def _number_or_infinity(value: Any) -> float:
    return float(value) if value is not None and not math.isnan(float(value)) else math.inf


def _rounding_unit_of_entry(entry: Mapping[str, Any], base_entry: Mapping[str, Any] | None) -> float:
    return float((base_entry or entry)["unit"])


def _largest_movement_in_units(entry: Mapping[str, Any], base_entry: Mapping[str, Any] | None) -> float:
    return max(
        _number_or_infinity(entry["moved"]), _number_or_infinity(base_entry["moved"]) if base_entry else 0.0
    )


def _least_function_change_that_counts(
    entry: Mapping[str, Any], base_entry: Mapping[str, Any] | None
) -> float:
    condition = _number_or_infinity(entry["moved"]) / float(entry["unit"])
    if math.isinf(_number_or_infinity(entry.get("same", 0.0))) and math.isfinite(condition):
        return SAME
    return max(SAME, OF_FP64 * FP64 * condition)


def _least_error_change_that_counts(entry: Mapping[str, Any], base_entry: Mapping[str, Any] | None) -> float:
    unit = _rounding_unit_of_entry(entry, base_entry)
    of_unit = OF_FP32 if unit < HALF else OF_HALF
    # Of the base alone: what the change computes in is what is judged.
    moved = _number_or_infinity(base_entry["moved"]) if base_entry else _number_or_infinity(entry["moved"])
    own = OF_BASE * _number_or_infinity(base_entry["error"]) if base_entry else 0.0
    return max(own, of_unit * max(unit, moved)) + OF_ROUNDING * float(
        (base_entry or entry).get("rounding", 0.0)
    )


def _errors_in_units(
    row: Mapping[str, Any], base_row: Mapping[str, Any] | None
) -> dict[str, tuple[float, float]]:
    units: dict[str, tuple[float, float]] = {}
    for part, _, entry, first in _changed_and_base_tensors(row, base_row):
        if _number_or_infinity((first or entry)["moved"]) > MOST_MOVED:
            continue  # terms that cancel out leave no digits
        unit = _rounding_unit_of_entry(entry, first) + float((first or entry).get("rounding", 0.0))
        before, now = (_number_or_infinity(one["error"]) / unit if one else 0.0 for one in (first, entry))
        most = units.get(part, (0.0, 0.0))
        units[part] = max(most[0], before), max(most[1], now)
    return units


def _lowest_findings_and_explained_modules(
    findings: Sequence[ReplayFinding], top_level_modules: Mapping[str, str], losses: Set[str]
) -> tuple[list[ReplayFinding], list[str]]:
    """Return the findings that none below explains, and the modules whose own ones are explained so.

    A child that is less exact does not make its parent another function, so that both are named then. Another batch has
    other targets.
    """
    named: list[ReplayFinding] = []
    above: list[str] = []
    modules = [one for one in findings if one.module not in WITHOUT_FP64]
    batches = [one for one in findings if one.module == BATCH]
    for one in findings:
        if one.tensor == LEFT:  # of which nothing in the step is a cause
            named.append(one)
            continue
        below = [other for other in modules if _contains_module(one.module, other.module, top_level_modules)]
        if one.module == GRADIENTS:
            below = [other for other in findings if other is not one]
        if one.module == LOSS:  # the loss may be a module that the script calls
            below = [other for other in modules if other.module in losses]
        explains = _findings_that_explain(one, below)
        if one.module in (LOSS, GRADIENTS):
            explains += modules if one.apart <= OF_MODULES * _largest_error(modules) else batches
        if not explains:
            named.append(one)
        elif one.module not in above:
            above.append(one.module)
    return named, [name for name in above if name not in {one.module for one in named}]


def _findings_that_explain(
    one: ReplayFinding, lower_findings: Sequence[ReplayFinding]
) -> list[ReplayFinding]:
    return [other for other in lower_findings if other.answer in (one.answer, "another function")]


def _largest_error(findings: Sequence[ReplayFinding]) -> float:
    """Return the largest error of what is less exact, without tensors that the base has no digits of."""
    errors = [one.apart for one in findings if one.answer == "less exact" and (one.base or 0.0) < OF_LOSS]
    return max(errors, default=0.0)


def _contains_module(name: str, other: str, top_level_modules: Mapping[str, str]) -> bool:
    if name == other:
        return False
    return top_level_modules.get(other) == name or other.startswith(f"{name}.")
