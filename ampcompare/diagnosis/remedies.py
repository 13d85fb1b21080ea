"""Add a tested cure to a diagnosis, as code and as an arm. Needs no torch: other processes may train candidates."""

from __future__ import annotations

import ast
import linecache
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ampcompare.backends.arm import Arm
from ampcompare.base.errors import AmpCompareError
from ampcompare.base.formatting import printable_line
from ampcompare.results.records.diagnosis import (
    CandidateTrial,
    Cure,
    Diagnosis,
    Fault,
    LossScaleHeadroom,
    OperationPlace,
    PlaceReport,
)

_MAX_TRIALS = 40
MAX_SCALE = 2.0**24
ROOM = 4.0  # between the scale that is tried and the largest one
MAX_ROUNDS = 5
PER_ROUND = 8
MAX_TOGETHER = 4
MOST_LEFT = 0.1  # of the size of a fault, where a candidate that removes none of it is named
FROM_GRADIENTS = ("gradient overflow", "underflow")
NARROWING = re.compile(r"\.(half|bfloat16|type_as)\(|torch\.(b?float16|half)\b|dtype\b")
# a cast that undoes what a line is kept in fp32 for
CAST_TO_HALF = re.compile(
    r"\.(?:half|bfloat16)\(\)|\.type_as\([\w.]+\)|\.(?:to|type)\((?:dtype=)?(?:[\w.]+\.dtype|torch\.(?:b?float16|half))\)"
)
# of a line that does nothing else: `y = y.half()`, `return y.to(x.dtype)`
CAST_ALONE = re.compile(r"(?:[\w., ]+ = |return )?[\w.]+\.float\(\)")
DEVICE_OF_SCRIPT = ""  # which the script names, and ampcompare may not see
UNCURED = "none of the tested modules, functions and options removes it"


@dataclass(frozen=True)
class CodeSite:
    """Where the code of a cure is to be pasted.

    Attributes:
        device_type: such as "cuda"; `DEVICE_OF_SCRIPT` where the script knows it.
        inputs_cast: lines at which the arm casts the inputs of a model.
        folder: of the script, from where its files are named; "" for the working directory and `sys.path`.
    """

    device_type: str
    inputs_cast: Collection[str] = ()
    folder: str = ""


@dataclass(frozen=True)
class CureCandidate:
    """What a candidate changes: modules or lines in fp32, options of the arm."""

    modules: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    options: tuple[tuple[str, object], ...] = ()

    def __or__(self, other: CureCandidate) -> CureCandidate:
        return CureCandidate(
            tuple(dict.fromkeys([*self.modules, *other.modules])),
            tuple(dict.fromkeys([*self.lines, *other.lines])),
            tuple(dict([*self.options, *other.options]).items()),
        )

    def candidates_of_single_parts(self) -> list[CureCandidate]:
        return [
            *(CureCandidate(modules=(name,)) for name in self.modules),
            *(CureCandidate(lines=(line,)) for line in self.lines),
            *(CureCandidate(options=(pair,)) for pair in self.options),
        ]

    def __str__(self) -> str:
        return ", ".join([*self.modules, *self.lines, *(f"{name}={value}" for name, value in self.options)])

    def arm_with_candidate(self, arm: Arm) -> Arm:
        names = [name.rpartition(":")[2] for name in self.modules]  # a pattern is of every model
        kept = [*filter(None, arm.keep_fp32.split("|")), *names]
        changed = dict(self.options)
        if self.modules:
            changed["keep_fp32"] = "|".join(kept)
        return arm.with_options(**changed)


@dataclass(frozen=True)
class TestedCandidate:
    """What a run under a candidate showed."""

    faults: Sequence[Fault]
    functions: Sequence[str] = ()  # that ran in fp32 because of their line, such as torch.exp


@dataclass(frozen=True)
class _SearchResult:
    """The change that removes the faults, if one does, with its functions in fp32, and all trials.

    Attributes:
        nearest: where none does, what is said of the one that leaves least; "" if none leaves much less.
    """

    change: CureCandidate | None
    trials: list[CandidateTrial]
    functions: Sequence[str] = ()
    nearest: str = ""


def search_for_cure(
    arm: Arm,
    faults: Sequence[Fault],
    scale: float | None,
    run_candidate: Callable[[Arm, Sequence[str]], TestedCandidate],
    modules: Sequence[str],
    *,
    max_trials: int = _MAX_TRIALS,
    last_lines: Collection[str] = (),
    functions: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> _SearchResult:
    """Test candidates until the faults are gone, in at most `max_trials` runs.

    A round tests each candidate that the present faults suggest, in addition to what is kept already. If none removes
    all faults, the first that moves them to another place is kept for the next round; if none does, the first few are
    tested together. At the end each part that is not needed is dropped.

    Args:
        scale: a loss scale under which no gradient overflows and most are kept; None if unknown.
        run_candidate: trains for some steps under an arm, with lines in fp32.
        modules: names, in the order of their first call.
        last_lines: lines that are tested where nothing else removes the faults.
        functions: of a line, those of its function that compute something: some may be wrong alike, so that none of
            them alone is the cure.
    """
    search = _CureSearch(arm, scale, run_candidate, modules, max_trials, functions)
    found = search.search_from_faults(faults, left_out=last_lines)
    if found is None and last_lines:
        found = search.search_from_faults(faults, left_out=())
    if found is not None:
        return _SearchResult(found, search.trials, search.functions_in_fp32(found))
    return _SearchResult(None, search.trials, nearest=_nearest_to_cure_text(faults[0], search.tested))


class _CureSearch:
    """Tests candidates, each once, and keeps those that help.

    Attributes:
        tested: what a run under each candidate showed; None for one that cannot be made.
        trials: the same in words, in the order of the runs.
    """

    def __init__(
        self,
        arm: Arm,
        scale: float | None,
        run: Callable[[Arm, Sequence[str]], TestedCandidate],
        modules: Sequence[str],
        most: int,
        functions: Mapping[str, Sequence[str]],
    ) -> None:
        self._arm, self._scale, self._run, self._modules, self._most = arm, scale, run, modules, most
        self._functions = functions
        self.tested: dict[CureCandidate, TestedCandidate | None] = {}
        self.trials: list[CandidateTrial] = []

    def search_from_faults(
        self, faults: Sequence[Fault], *, left_out: Collection[str]
    ) -> CureCandidate | None:
        """Return what removes faults, round by round, without the lines that are left out; None if nothing does."""
        kept = CureCandidate()
        for _ in range(MAX_ROUNDS):
            candidates = self._candidates_of_round(faults, left_out)
            progress: tuple[CureCandidate, Sequence[Fault]] | None = None
            for change in self._changes_with_one_more(kept, candidates):
                left = self._faults_after(change)
                if left is None:
                    continue
                if not left:
                    return self._without_needless_parts(change)
                if progress is None and _has_first_fault_moved_or_shrunk(faults, left):
                    progress = change, left
            if progress is None:
                return self._first_cure_of_several_at_once(candidates, kept)
            kept, faults = progress
        return None

    def functions_in_fp32(self, change: CureCandidate) -> Sequence[str]:
        """Return what ran in fp32 because of a candidate's lines, as far as it was tested."""
        known = self.tested.get(change)
        return () if known is None else known.functions

    def _candidates_of_round(self, faults: Sequence[Fault], left_out: Collection[str]) -> list[CureCandidate]:
        candidates = [*_candidates_likeliest_first(self._arm, faults, self._scale, self._modules)]
        whole = self._functions.get(faults[0].place.where, ())
        if any(one.lines for one in candidates) and len(whole) > 1:
            candidates.append(CureCandidate(lines=tuple(whole)))
        return [one for one in candidates if not set(one.lines) & set(left_out)]

    def _changes_with_one_more(
        self, kept: CureCandidate, candidates: Iterable[CureCandidate]
    ) -> Iterator[CureCandidate]:
        """Yield what is kept with each candidate that adds something to it, and to the arm."""
        for candidate in candidates:
            adds_nothing = candidate.options and _has_arm_options_of(self._arm, candidate)
            if kept | candidate != kept and not adds_nothing:
                yield kept | candidate

    def _first_cure_of_several_at_once(
        self, candidates: Iterable[CureCandidate], kept: CureCandidate
    ) -> CureCandidate | None:
        for change in _candidates_of_several_at_once(candidates, kept):
            if self._is_cure(change):
                return self._without_needless_parts(change)
        return None

    def _without_needless_parts(self, change: CureCandidate) -> CureCandidate:
        """Drop each part without which the faults are gone as well."""
        for part in change.candidates_of_single_parts():
            rest = CureCandidate()
            for other in change.candidates_of_single_parts():
                rest = rest if other == part else rest | other
            if rest != CureCandidate() and self._is_cure(rest):
                change = rest
        return change

    def _is_cure(self, change: CureCandidate) -> bool:
        left = self._faults_after(change)
        return left is not None and not left

    def _faults_after(self, change: CureCandidate) -> Sequence[Fault] | None:
        """Return what remains; None if the change cannot be made, or no further run is allowed."""
        if change not in self.tested and len(self.tested) < self._most:
            self.tested[change] = self._try_candidate(change)
        known = self.tested.get(change)
        return None if known is None else known.faults

    def _try_candidate(self, change: CureCandidate) -> TestedCandidate | None:
        try:
            result = self._run(change.arm_with_candidate(self._arm), change.lines)
        except (AmpCompareError, RuntimeError, TypeError) as error:
            left = f"cannot be tested: {error}"[:200]
            self.trials.append(CandidateTrial(name=str(change), cures=False, left=left))
            return None
        left = result.faults[0].text if result.faults else ""
        self.trials.append(CandidateTrial(name=str(change), cures=not result.faults, left=left))
        return result


def _nearest_to_cure_text(fault: Fault, tested: Mapping[CureCandidate, TestedCandidate | None]) -> str:
    """Return what is left of a fault under the candidate that leaves least of it; "" if none leaves a tenth."""
    left = [
        (known.faults[0], change)
        for change, known in tested.items()
        if known is not None and known.faults and _is_same_fault(fault, known.faults[0])
    ]
    if not left:
        return ""
    least, change = min(left, key=lambda one: one[0].severity)
    if not (math.isfinite(least.severity) and least.severity <= MOST_LEFT * fault.severity):
        return ""
    how = "" if change.options else " in fp32"
    return f"no cure, but least is left of the fault with {change}{how}: {least.text}"


def _is_same_fault(fault: Fault, other: Fault) -> bool:
    return (fault.kind, fault.place) == (other.kind, other.place)


def _candidates_of_several_at_once(
    candidates: Iterable[CureCandidate], kept_candidate: CureCandidate
) -> Iterator[CureCandidate]:
    """Yield the first two, three and four candidates in fp32 at once, for a fault that none of them alone changes."""
    change, count = kept_candidate, 0
    for candidate in candidates:
        if candidate.options or change | candidate == change:
            continue
        change, count = change | candidate, count + 1
        if count > 1:
            yield change
        if count == MAX_TOGETHER:
            return


def _has_first_fault_moved_or_shrunk(faults_before: Sequence[Fault], faults_after: Sequence[Fault]) -> bool:
    """Return whether the first fault begins at another place or is much smaller."""
    first, now = faults_before[0], faults_after[0]
    if first.kind == now.kind == "error":  # whose place is a guess
        return now.step > first.step
    moved = (first.kind, first.place.module, first.place.where) != (
        now.kind,
        now.place.module,
        now.place.where,
    )
    return moved or now.severity < first.severity / 2


def _candidates_likeliest_first(
    arm: Arm, faults: Sequence[Fault], scale: float | None, modules: Sequence[str]
) -> Iterator[CureCandidate]:
    """Yield what may remove the first fault, the likeliest first: options, its place, its neighbors, its parents."""
    fault = faults[0]
    if fault.kind == "not precision":
        return
    yield from _option_candidates(arm, fault, scale)
    if fault.kind in ("lost updates", "update"):
        return
    yielded: list[CureCandidate] = []
    for module, line in [(fault.place.module, fault.place.where), *fault.near]:
        is_leaf = not any(name.startswith(f"{module}.") for name in modules)
        by_module = [CureCandidate(modules=(module,))] if module and not module.endswith(":") else []
        by_line = [CureCandidate(lines=(line,))] if line else []
        yielded += by_module + by_line if is_leaf else by_line + by_module
    yielded = list(dict.fromkeys(yielded))
    yield from yielded[:PER_ROUND]
    parent = fault.place.module.rpartition(".")[0]
    while parent:
        yield CureCandidate(modules=(parent,))
        parent = parent.rpartition(".")[0]


def _find_scale_to_try(headroom: LossScaleHeadroom | None) -> float | None:
    """Return a loss scale with room below the largest, if it differs much from the arm's own."""
    if headroom is None or headroom.largest_scale is None:
        return None
    scale = min(MAX_SCALE, headroom.largest_scale / ROOM)
    return scale if scale >= 1 and not headroom.own_scale / ROOM < scale < headroom.own_scale * ROOM else None


def _has_arm_options_of(arm: Arm, candidate: CureCandidate) -> bool:
    """Return whether the arm runs with the options of a candidate as it is, by default too."""
    return all(
        arm.options.get(name) == value or (value == "dynamic" and arm.skips_overflows)
        for name, value in candidate.options
    )


def _option_candidates(arm: Arm, fault: Fault, scale: float | None) -> Iterator[CureCandidate]:
    """Yield options of the arm that may remove a fault; those that it lacks are refused when they are tested."""
    if fault.kind in ("lost updates", "update") and _has_masters_as_option(arm):
        yield CureCandidate(options=(("master_weights", True),))
        yield CureCandidate(options=(("master_weights", True), ("loss_scale", "dynamic")))
    if fault.kind in FROM_GRADIENTS:
        parsers = arm.spec.parsers or {}
        always_moves = "init_scale" in parsers and "loss_scale" not in parsers
        if not always_moves:
            yield CureCandidate(options=(("loss_scale", "dynamic"),))
        if scale is not None:
            yield CureCandidate(options=(("init_scale" if always_moves else "loss_scale", scale),))


def _has_masters_as_option(arm: Arm) -> bool:
    """Return whether an arm with 16-bit weights has fp32 masters only if an option asks for them, as O3 and `half`."""
    if "master_weights" not in (arm.spec.parsers or {}):
        return False
    plain = arm.without_option("master_weights")
    if plain is None:
        return True  # other options of the arm need the masters that it asks for
    return plain.roles is not None and plain.roles.weights != "fp32" and not plain.roles.masters


def cure_from_candidate(arm: Arm, change: CureCandidate, functions: Sequence[str], site: CodeSite) -> Cure:
    """Return the cure that a change is, whose lines call `functions` such as torch.exp."""
    changed = change.arm_with_candidate(arm)
    lines = [
        *_arm_code_lines(arm, changed, change),
        *(code for line in change.lines for code in _fp32_line_code(arm, line, site)),
    ]
    registrations = _registration_code_lines(functions)
    if change.lines and registrations and arm.options.get("opt_level") == "O1":
        lines += ["# or, before amp.initialize, everywhere:", *registrations]
    return Cure(
        keeps=[*change.modules, *change.lines],
        option=", ".join(f"{name}={value}" for name, value in change.options),
        arm=str(changed) if changed != arm and not change.lines else None,
        code="\n".join(lines),
    )


def _arm_code_lines(arm: Arm, changed: Arm, change: CureCandidate) -> list[str]:
    if changed == arm:
        return []
    lines = [f"# as an arm: {changed}"]
    for name in change.modules:
        module = _dotted_name_as_code(name)
        if (block := _block_without_casts(arm, "device_type")) is None:
            lines.append(f"{module}.float()  # and cast its inputs with .float()")
            continue
        lines += [f"{module}.float()"] if _does_arm_cast_weights(arm) else []
        lines += [f"# around the call of {name}:", block, f"    output = {module}(input.float())"]
    return lines


def _block_without_casts(arm: Arm, device: str) -> str | None:
    """Return the line that opens a block without the casts of an arm; None for one that casts the model alone."""
    lists = "" if arm.roles is None else arm.roles.lists
    if lists == "O1":  # whose functions do not ask autocast
        return "with amp.disable_casts():  # of apex"
    return f"with torch.autocast({device}, enabled=False):" if lists else None


def _does_arm_cast_weights(arm: Arm) -> bool:
    return arm.roles is not None and arm.roles.weights != "fp32"


def _dotted_name_as_code(name: str) -> str:
    """Return a dotted name as code: "layers.0.norm" as model.layers[0].norm, "Net:norm" as net.norm."""
    model, _, inner = name.rpartition(":")
    parts = (f"[{part}]" if part.isdigit() else f".{part}" for part in inner.split("."))
    return "".join([model.lower() or "model", *parts])


def _source_line_at(place: str, folder: str) -> str:
    name, _, number = place.rpartition(":")
    # of the script's folder, else from here or in a folder of sys.path, where another file may have the name
    files = (*([os.path.join(folder, name)] if folder else []), name)
    return next(filter(None, (linecache.getline(file, int(number)).strip() for file in files)), "")


def _lines_by_function(reports: Sequence[PlaceReport], folder: str) -> dict[str, list[str]]:
    """Return, of each place in a function of a file that can be read, the places in the innermost such function."""
    numbers: dict[str, set[int]] = {}
    for report in reports:
        name, _, number = report.place.where.rpartition(":")
        if report.place.phase == "forward" and number.isdigit():
            numbers.setdefault(name, set()).add(int(number))
    found: dict[str, list[str]] = {}
    for name, lines in numbers.items():
        for begin, end in sorted(_spans_of_functions(name, folder), key=lambda span: span[0] - span[1]):
            inside = [f"{name}:{number}" for number in sorted(lines) if begin <= number <= end]
            found |= dict.fromkeys(inside, inside)  # that of an inner function comes later
    return found


def _spans_of_functions(name: str, folder: str) -> Iterator[tuple[int, int]]:
    """Yield the first and last line of each function of a file; none of a file that is no Python, or is not there."""
    files = (*([os.path.join(folder, name)] if folder else []), name)
    source = "".join(next(filter(None, map(linecache.getlines, files)), []))
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield node.lineno, node.end_lineno or node.lineno


def _fp32_line_code(arm: Arm, place: str, site: CodeSite) -> list[str]:
    source = _source_line_at(place, site.folder)
    if place in site.inputs_cast:
        return [
            f"# {place}: the arm casts the inputs of the model, none of your lines; compute what needs them in fp32",
            "# in front of the model, or pass them in fp32 and cast behind what needs them:",
            source or "...",
        ]
    widened = CAST_TO_HALF.sub(".float()", source)
    if source != widened and CAST_ALONE.fullmatch(widened):
        return [
            f"# {place}, in place of its cast to 16 bits, and without one up to the next product:",
            widened,
        ]
    without = " and fp32 in place of its 16-bit type" if NARROWING.search(source) else ""
    is_known = site.device_type != DEVICE_OF_SCRIPT
    block = _block_without_casts(arm, f'"{site.device_type}"' if is_known else "device_type")
    back = (
        "; keep its result in fp32, through functions and norms of your own too, up to the next linear layer, "
        "convolution or norm of torch, and cast it there"
        if _does_arm_cast_weights(arm)
        else ""
    )
    return [
        f"# {place}, with .float() on its 16-bit inputs{without}{back}:",
        *([] if block is None else [block]),
        f"{'' if block is None else '    '}{widened or '...'}",
    ]


def is_cast_of_inputs(arm: Arm, place: OperationPlace, folder: str = "") -> bool:
    """Return whether a place is the cast that an arm makes of what a model gets, at the script's line that calls it.

    Args:
        arm: under which that was seen.
        place: of an operation.
        folder: as in `CodeSite`.
    """
    is_cast = place.operation == "_to_copy" and place.phase == "forward" and not place.module
    return (
        is_cast
        and bool(place.where)
        and _does_arm_cast_weights(arm)
        and not NARROWING.search(_source_line_at(place.where, folder))
    )


def faults_with_cast_of_inputs(arm: Arm, faults: Sequence[Fault]) -> list[Fault]:
    """Return faults of which those that begin at such a cast have that as their reason."""
    half = "" if arm.roles is None else arm.roles.half
    return [
        fault.model_copy(update={"reason": f"the arm casts the inputs of the model to {half}"})
        if not fault.reason and is_cast_of_inputs(arm, fault.place)
        else fault
        for fault in faults
    ]


def _registration_code_lines(functions: Iterable[str]) -> list[str]:
    """Return the registrations of functions; a method is one of torch.Tensor."""
    return [
        f'amp.register_float_function({owner}, "{name}")'
        for owner, _, name in (function.rpartition(".") for function in functions)
        if owner
    ]


def diagnosis_with_tested_cure(
    diagnosis: Diagnosis,
    arm: Arm,
    run_candidate: Callable[[Arm, Sequence[str]], TestedCandidate],
    *,
    device_type: str = "cpu",
    folder: str = "",
    max_trials: int = _MAX_TRIALS,
) -> Diagnosis:
    """Return a diagnosis with the smallest change that removes its faults; as it is, if it has none.

    Args:
        diagnosis: the diagnosis.
        arm: under which the faults are.
        run_candidate: trains for some steps under an arm, with the named lines in fp32, and says what it showed.
        device_type: as in `CodeSite`, for the lines of code of the cure.
        folder: likewise.
        max_trials: how many trainings may be tried.
    """
    if not diagnosis.faults:
        return diagnosis
    # Such a line is the script's call of the model, whose words change nothing there.
    inputs_cast = {one.place.where for one in diagnosis.places if is_cast_of_inputs(arm, one.place, folder)}
    result = search_for_cure(
        arm,
        diagnosis.faults,
        _find_scale_to_try(diagnosis.headroom),
        run_candidate,
        diagnosis.modules,
        max_trials=max_trials,
        last_lines=inputs_cast,
        functions=_lines_by_function(diagnosis.places, folder),
    )
    cure = None
    if result.change is not None:
        site = CodeSite(device_type, inputs_cast, folder)
        cure = cure_from_candidate(arm, result.change, result.functions, site)
    notes = [*diagnosis.notes, *([result.nearest] if result.nearest else [])]
    diagnosis = diagnosis.model_copy(update={"trials": result.trials, "cure": cure, "notes": notes})
    return diagnosis.model_copy(update={"verdict": diagnosis_sentence(arm, diagnosis)})


def diagnosis_sentence(arm: Arm, diagnosis: Diagnosis) -> str:
    """Return the result in one sentence that begins with the arm.

    Args:
        arm: that was diagnosed.
        diagnosis: by `diagnose`, on the same arm.
    """
    return f"{arm}: {fault_and_cure_sentence(diagnosis)}"


def fault_and_cure_sentence(found: Diagnosis) -> str:
    """Return the first fault and what cures it in one sentence; that there is none, where there is none."""
    if not found.faults:
        steps = f"{found.steps} {'step' if found.steps == 1 else 'steps'}"
        skipped = f", {found.skipped} of them skipped as gradients overflowed" if found.skipped else ""
        if found.formats:
            return f"no layer stands out at step {found.observed[-1]}, so none is to be kept"
        if found.gradients and all(one.range.zeros == one.range.elements for one in found.gradients):
            unseen = "what runs without gradients, as a reward, is not watched"
            skipped += f", but all gradients are zero, so that nothing is learned; {unseen}"
        failure = f"; then the script failed: {found.failure}" if found.failure else ""
        return f"no fault in {steps}{skipped}{failure}"
    first, cure = found.faults[0], found.cure
    where = f" ({first.place.where})" if first.place.where else ""
    if first.kind == "not precision":
        return f"no fault of precision: at step {first.step} {first.text}{where}"
    why = f", as {first.reason}" if first.reason else ""
    ended = (
        f"; its error: {printable_line(found.failure, 300, keep_end=150)}" if first.kind == "error" else ""
    )
    fault = f"{first.kind} at step {first.step}: {first.text}{where}{why}{ended}"
    if cure is None and first.kind == "format" and found.trials:
        return f"{fault}; {found.trials[0].name} is not proven to cure it: {found.trials[0].left}"
    if cure is None:
        return f"{fault}; {UNCURED}" if found.trials else fault
    changes = [*cure.keeps, *([_option_texts_of_cure(found.arm, cure.option)] if cure.option else [])]
    how = ""
    if cure.keeps and not cure.option:
        how = " in bf16" if first.kind == "format" else " in fp32"
    return f"{fault}; {' and '.join(changes)}{how} {'cures' if len(changes) == 1 else 'cure'} it"


def _option_texts_of_cure(arm: str, options: str) -> str:
    """Return the options of a cure as people write them in an arm, such as masters=fp32 for master_weights=True."""
    spellings = Arm.parse(arm).spec.spellings
    words = (one.removesuffix("=True") for one in options.split(", "))
    return ", ".join(spellings.get(word, word) for word in words)
