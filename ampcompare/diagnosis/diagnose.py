"""The whole diagnosis of a loop under an arm: one watched run, and one for each candidate of a cure.

The watched run also gives the headroom of the loss scale, and the types that operations ran in against what
`ampcompare explain` promises for the arm.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ampcompare.backends.apex_levels import O1_TO_FP16, O1_TO_FP32, OTHERWISE_IN_AUTOCAST, apex_level
from ampcompare.backends.arm import Arm
from ampcompare.base.errors import ConfigError
from ampcompare.diagnosis.cures import Tested, verdict_of, with_cure
from ampcompare.diagnosis.faults import find_faults
from ampcompare.diagnosis.measure import Conditions, Loop, measure
from ampcompare.diagnosis.observation import Observation, StepFacts
from ampcompare.diagnosis.options import DiagnoseOptions
from ampcompare.diagnosis.ranges import HALF, counts_of, make_range
from ampcompare.diagnosis.watch import Called
from ampcompare.runs.records.diagnosis import Audit, Diagnosis, Headroom
from ampcompare.training.device import resolve_device

__all__ = ["audit", "diagnose_given", "diagnose_loop", "headroom", "in_fp32", "in_half", "report_of"]

FP16_LARGEST = 65504.0
FP16_LOST = -25  # exponents below it round to zero
SCALES = (1.0, 128.0, 65536.0)
MAX_NAMED = 6
# Functions that are not in the tables run these operations too, such as square and linalg.norm.
AMBIGUOUS = frozenset(("pow", "linalg_vector_norm", "_to_copy"))
# Inputs to call a function with until it accepts them.
GIVEN: tuple[tuple[tuple[int, ...], ...], ...] = (
    *(((2, 3),), ((2, 3), (2, 3)), ((2, 3), (3, 2)), ((2, 3), (3,))),
    *(((3,), (2, 3), (3,)), ((2, 2), (2, 3), (3, 2)), ((2, 2, 3), (2, 3, 2)), ((2, 3, 5), (2, 3, 2))),
    ((2, 2, 2), (2, 2, 3), (2, 3, 2)),
    *(((2, 3, 5, 5), (2, 3, 2, 2)), ((2, 3, 5, 5, 5), (2, 3, 2, 2, 2)), ((2, 3, 5), (3, 2, 2))),
    *(((2, 3, 5, 5), (3, 2, 2, 2)), ((2, 3, 5, 5, 5), (3, 2, 2, 2, 2))),
)
OTHERS: tuple[tuple[Any, ...], ...] = ((), (0,), ((3,),), (1, 1))


def headroom(steps: Iterable[StepFacts]) -> Headroom | None:
    """Return the headroom over all watched steps with a finite loss; None if no gradient was seen.

    Exponents are those of the gradients of weights, in the wide run where there is one, at scale 1. The largest scale
    counts what the backward pass computed on the way too.
    """
    exponents: Counter[int] = Counter()
    largest, own = 0.0, 1.0
    for facts in steps:
        loss = facts.step.loss
        if loss is not None and counts_of(facts.step.events[loss].row)[1]:
            continue  # the gradients of a loss that is not finite say nothing about a scale
        own, shift = facts.scale, round(math.log2(facts.scale))
        for event in facts.step.events:
            phase = event.key[3]
            if event.constant:
                continue
            if phase == "gradient":
                values = make_range(event.row if event.wide is None else event.wide)
                exponents.update({power - shift: count for power, count in values.exponents.items()})
            elif phase == "backward" and event.dtype in HALF:
                values = make_range(event.row)
            else:
                continue
            largest = max(largest, (values.largest or 0.0) / facts.scale)
    if not exponents:
        return None
    total = sum(exponents.values())
    lost = {
        f"{scale:g}": sum(n for power, n in exponents.items() if power + math.log2(scale) < FP16_LOST) / total
        for scale in (*SCALES, own)
    }
    fits = 2.0 ** math.floor(math.log2(FP16_LARGEST / largest)) if largest else None
    return Headroom(exponents=dict(sorted(exponents.items())), largest_scale=fits, own_scale=own, lost=lost)


def audit(arm: Arm, observation: Observation) -> list[Audit]:
    """Return a row for each operation and its types, those that differ from the promise first."""
    remark_on = _remarks(arm, observation)
    calls: Counter[tuple[str, tuple[str, ...], tuple[str, ...], str]] = Counter()
    modules: dict[tuple[str, tuple[str, ...], tuple[str, ...], str], list[str]] = defaultdict(list)
    for called, count in observation.types.items():
        key = (called.operation, called.inputs, called.outputs, remark_on(called))
        calls[key] += count
        if called.module not in modules[key]:
            modules[key].append(called.module)
    rows = [
        Audit(
            operation=name,
            inputs=list(inputs),
            outputs=list(outputs),
            calls=count,
            modules=modules[name, inputs, outputs, remark][:MAX_NAMED],
            remark=remark,
        )
        for (name, inputs, outputs, remark), count in calls.items()
    ]
    return sorted(rows, key=lambda row: (not row.remark, -row.calls, row.operation))


def _remarks(arm: Arm, observation: Observation) -> Callable[[Called], str]:
    """Return what says how a call differs from the promises of an arm; "" if it does not.

    Only the forward pass of modules is compared: what a loss function or the backward pass runs in follows from it.
    """
    is_fp8 = arm.backend == "fp8"
    effective = arm.effective(observation.device_type)
    if effective is not None and effective.arm is not None:
        arm = Arm.parse(effective.arm)
    half = arm.roles.half if arm.roles is not None else ""
    if not half:
        return lambda called: f"{arm} promises fp32" if {"fp16", "bf16"} & set(called.inputs) else ""
    device = observation.device_type
    casts = arm.backend == "native" or arm.options.get("opt_level") in ("O1", "O4")
    autocast = {"fp16": torch.float16, "bf16": torch.bfloat16}[half] if arm.backend == "native" else None
    wide = in_fp32(device, autocast) if casts else {}
    narrow = {} if is_fp8 else in_half(device)  # fp8 converts some of the products, which a CPU emulates in fp32
    patterns = list(filter(None, str(arm.options.get("keep_fp32", "")).split("|")))
    by_type = any(not any(_is_in(name, [one]) for name in observation.modules) for one in patterns)
    norms_in_fp32 = arm.backend == "apex" and bool(apex_level(arm.options).keep_batchnorm_fp32)

    def remark(called: Called) -> str:
        name, inputs = called.operation, called.inputs
        if called.phase != "forward" or not called.module:
            return ""
        kept = _is_in(called.module, patterns)
        if name in narrow and "fp32" in inputs and half not in inputs and not kept and not by_type:
            return f"fp32 island: {f'explain promises {narrow[name]} in {half}' if casts else f'the model is {half}'}"
        if name in narrow and half in inputs and kept:
            return f"{half} island: keep_fp32 promises this module in fp32"
        if name in wide and half in inputs:
            return f"{half} island: explain promises {wide[name]} in fp32{_unless(wide[name], autocast is None)}"
        if norms_in_fp32 and "batch_norm" in name and "fp32" not in inputs:
            return f"{half} batch norm: explain promises fp32 weights and statistics, unless affine=False"
        return ""

    return remark


def _unless(function: str, is_o1: bool) -> str:
    """Return the forms of a function that O1 leaves alone, as `explain` lists them."""
    forms = (names for names, in_o1, _ in OTHERWISE_IN_AUTOCAST if in_o1 == "as their input" and function in names)
    return "".join(f", all but {names}" for names in forms if is_o1)


def _is_in(module: str, patterns: list[str]) -> bool:
    """Return whether a module, or one around it, has a name that matches a pattern."""
    name = module.rpartition(":")[2]
    parts = name.split(".")
    names = [".".join(parts[: count + 1]) for count in range(len(parts))]
    return any(fnmatchcase(one, pattern) for one in names for pattern in patterns)


def diagnose_given(loop: Loop, options: DiagnoseOptions, *, subject: str = "") -> Diagnosis:
    """Diagnose a loop as `DiagnoseOptions` say; of their recipe only the seed applies.

    Raises:
        ConfigError: as for `diagnose_loop`, and options that cannot be used.
        EnvironmentUnfit: this machine lacks the device.
    """
    options.check()
    config = options.config
    conditions = Conditions(
        steps=options.steps,
        at=options.at or None,
        reference=None if options.reference == "none" else getattr(torch, options.reference),
        device=str(resolve_device(config.device)),
        half=config.cpu_half,
        seed=config.recipe.seed,
    )
    return diagnose_loop(loop, Arm.parse(config.arm), conditions, subject=subject, cures=options.cures)


def diagnose_loop(loop: Loop, arm: Arm, conditions: Conditions, *, subject: str = "", cures: bool = True) -> Diagnosis:
    """Train a loop for some steps under an arm, find its faults, and test what removes them.

    Args:
        loop: gets a precision, calls its `prepare` once, and trains; it is called again for each candidate, and must
            begin from the same weights and batches each time.
        subject: what is trained, for the report.
        cures: test candidates.

    Raises:
        ConfigError: the loop made no step that was watched.
    """
    observation = measure(loop, arm, conditions)
    if not observation.facts:
        raise ConfigError(
            f"no step was watched: the loop made {observation.steps} calls of step, and the steps to watch are "
            f"{'all' if conditions.at is None else ', '.join(map(str, conditions.at))}"
        )
    found = report_of(observation, arm, reference=conditions.reference, subject=subject)
    if not cures:
        return found

    def tested(other: Arm, lines: Sequence[str]) -> Tested:
        seen = measure(loop, other, conditions, lines)
        return Tested(find_faults(seen), sorted(seen.functions))

    return with_cure(found, arm, tested, device_type=observation.device_type)


def report_of(
    observation: Observation, arm: Arm, *, reference: torch.dtype | None, subject: str = "", notes: Sequence[str] = ()
) -> Diagnosis:
    """Return what one watched run showed; no cure is sought.

    Args:
        reference: type of the wide run.
        subject: what was trained.
        notes: what else a reader must know.
    """
    found = Diagnosis(
        arm=str(arm),
        subject=subject,
        verdict="",
        steps=observation.steps,
        skipped=observation.skipped,
        observed=[facts.index for facts in observation.facts],
        reference=None if reference is None else ("float64" if reference is torch.float64 else "float32"),
        modules=observation.modules,
        places=list(observation.reports("forward", "backward")),
        weights=list(observation.reports("weight")),
        gradients=list(observation.reports("gradient")),
        map=observation.map(),
        headroom=headroom(observation.facts),
        updates=list(observation.updates.values()),
        audit=audit(arm, observation),
        faults=find_faults(observation),
        notes=[*notes, *_notes(observation)],
    )
    return found.model_copy(update={"verdict": verdict_of(arm, found)})


def _notes(observation: Observation) -> list[str]:
    if not observation.failures:
        return []
    return [
        f"the error of {', '.join(sorted(observation.failures))} is not known, because it did not run in the wide type"
    ]


@cache
def in_fp32(device_type: str, autocast: torch.dtype | None) -> Mapping[str, str]:
    """Return the operations that run in fp32 whatever they are given, each with the name of its function.

    Args:
        autocast: those that autocast casts on this device from this type; None for those of O1.
    """
    found = _single_operations(O1_TO_FP32, device_type, autocast or torch.float32, autocast)
    return {name: function for name, (function, dtypes) in found.items() if torch.float32 in dtypes}


@cache
def in_half(device_type: str) -> Mapping[str, str]:
    """Return the operations that O1 and autocast run in 16 bits, such as products, each with its function."""
    found = _single_operations(O1_TO_FP16, device_type, torch.float32, None)
    return {name: function for name, (function, _) in found.items()}


def _single_operations(
    table: Mapping[str, Sequence[str]], device_type: str, dtype: torch.dtype, autocast: torch.dtype | None
) -> dict[str, tuple[str, set[torch.dtype]]]:
    """Call each function of a table, and return the operations of those that run only one."""
    found: dict[str, tuple[str, set[torch.dtype]]] = {}
    for name in (name for names in table.values() for name in names if not name.startswith("__")):
        for function in _functions(name):
            for arguments in _arguments(device_type, dtype):
                seen = _seen(function, arguments, device_type, autocast)
                operations = {operation for operation, _ in seen} - AMBIGUOUS
                if seen:
                    if len(operations) == 1:
                        operation = operations.pop()
                        dtypes = {one for other, types in seen if other == operation for one in types}
                        found.setdefault(operation, (name, dtypes))
                    break
    return found


def _functions(name: str) -> Iterator[Callable[..., Any]]:
    for owner in (torch.nn.functional, torch):
        if hasattr(owner, name):
            yield getattr(owner, name)


def _arguments(device_type: str, dtype: torch.dtype) -> Iterable[tuple[Any, ...]]:
    for others in OTHERS:
        for shapes in GIVEN:
            yield (*(torch.full(shape, 0.5, dtype=dtype, device=device_type) for shape in shapes), *others)


def _seen(
    function: Callable[..., Any], arguments: tuple[Any, ...], device_type: str, autocast: torch.dtype | None
) -> list[tuple[str, set[torch.dtype]]]:
    """Return the operations of one call with the types that go into each; none if it does not accept the inputs."""
    casts = nullcontext() if autocast is None else torch.autocast(device_type, autocast)
    mode = _Operations()
    with suppress(Exception), warnings.catch_warnings(), torch.no_grad(), casts, mode:
        warnings.simplefilter("error")
        function(*arguments)
        return mode.seen
    return []


class _Operations(TorchDispatchMode):
    """Lists floating operations that are no views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[str, set[torch.dtype]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            given = {one.dtype for one in args if isinstance(one, Tensor) and one.is_floating_point()}
            self.seen.append((func.__name__.partition(".")[0].rstrip("_"), given))
        return func(*args, **(kwargs or {}))
