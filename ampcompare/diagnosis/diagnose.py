"""The whole diagnosis of a loop under an arm: one watched run, and one for each candidate of a cure.

The watched run also gives the headroom of the loss scale, and the types that operations ran in against what
`ampcompare explain` promises for the arm.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

import torch

from ampcompare.backends.apex_levels import OTHERWISE_IN_AUTOCAST, apex_level
from ampcompare.backends.arm import Arm
from ampcompare.base.errors import ConfigError
from ampcompare.diagnosis.findings import find_faults
from ampcompare.diagnosis.loops import Conditions, Loop
from ampcompare.diagnosis.observation import Observation, StepFacts
from ampcompare.diagnosis.operation_watch import Called
from ampcompare.diagnosis.options import DiagnoseOptions
from ampcompare.diagnosis.ranges import HALF, counts_of, make_range
from ampcompare.diagnosis.remedies import Tested, verdict_of, with_cure
from ampcompare.diagnosis.watched_loop import watch_loop
from ampcompare.results.records.diagnosis import Audit, Diagnosis, FaultKind, Headroom
from ampcompare.training.device import resolve_device

__all__ = ["audit", "diagnose_given", "diagnose_loop", "headroom", "in_fp32", "report_of"]

FP16_LARGEST = 65504.0
FP16_LOST = -25  # exponents below it round to zero
SCALES = (1.0, 128.0, 65536.0)
MAX_NAMED = 6
# Operations that O1 and autocast run in 16 bits, each with its function; and those that O1 runs in fp32.
IN_HALF = {
    **{"convolution": "conv1d", "mm": "linear", "mv": "mv", "bmm": "bmm", "addmm": "addmm", "baddbmm": "baddbmm"},
    "_prelu_kernel": "prelu",
}
IN_FP32 = (
    *("_softmax", "_log_softmax", "softplus", "gelu", "native_layer_norm", "mse_loss", "smooth_l1_loss"),
    *("binary_cross_entropy_with_logits", "soft_margin_loss", "exp", "expm1", "log", "log2", "log10", "reciprocal"),
    *("rsqrt", "acos", "asin", "cosh", "sinh", "tan", "erfinv", "sum", "prod", "cumsum", "cumprod", "dist"),
    *("std", "var"),
)
O1_ALONE = ("gelu", "std", "var")  # autocast runs them in the type of their input
IN_FP32_ON_CPU = ("mse_loss", "smooth_l1_loss", "binary_cross_entropy_with_logits", "soft_margin_loss", "prod")


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
    arm = arm.runs or arm
    half = arm.roles.half if arm.roles is not None else ""
    if not half:
        return lambda called: f"{arm} promises fp32" if {"fp16", "bf16"} & set(called.inputs) else ""
    device = observation.device_type
    casts = arm.backend == "native" or arm.options.get("opt_level") in ("O1", "O4")
    is_autocast = arm.backend == "native"
    wide = in_fp32(device, is_autocast=is_autocast) if casts else {}
    narrow = {} if is_fp8 else IN_HALF  # fp8 converts some of the products, which a CPU emulates in fp32
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
            return f"{half} island: explain promises {wide[name]} in fp32{_unless(wide[name], not is_autocast)}"
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


def diagnose_loop(
    loop: Loop,
    arm: Arm,
    conditions: Conditions,
    *,
    subject: str = "",
    cures: bool = True,
    left_out: Collection[FaultKind] = (),
) -> Diagnosis:
    """Train a loop for some steps under an arm, find its faults, and test what removes them.

    Args:
        loop: gets a precision, calls its `prepare` once, and trains; it is called again for each candidate, and must
            begin from the same weights and batches each time.
        subject: what is trained, for the report.
        cures: test candidates.
        left_out: kinds of faults that are not looked for.

    Raises:
        ConfigError: the loop made no step that was watched.
    """
    observation = watch_loop(loop, arm, conditions)
    if not observation.facts:
        raise ConfigError(
            f"no step was watched: the loop made {observation.steps} calls of step, and the steps to watch are "
            f"{'all' if conditions.at is None else ', '.join(map(str, conditions.at))}"
        )
    found = report_of(observation, arm, reference=conditions.reference, subject=subject, left_out=left_out)
    if not cures:
        return found

    def test(other: Arm, lines: Sequence[str]) -> Tested:
        seen = watch_loop(loop, other, conditions, lines)
        return Tested(find_faults(seen, left_out), sorted(seen.functions))

    return with_cure(found, arm, test, device_type=observation.device_type)


def report_of(
    observation: Observation,
    arm: Arm,
    *,
    reference: torch.dtype | None,
    subject: str = "",
    notes: Sequence[str] = (),
    left_out: Collection[FaultKind] = (),
) -> Diagnosis:
    """Return what one watched run showed; no cure is sought.

    Args:
        reference: type of the wide run.
        subject: what was trained.
        notes: what else a reader must know.
        left_out: kinds of faults that are not looked for.
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
        faults=find_faults(observation, left_out),
        notes=[*notes, *_notes(arm, observation)],
    )
    return found.model_copy(update={"verdict": verdict_of(arm, found)})


def _notes(arm: Arm, observation: Observation) -> Iterator[str]:
    """Yield what a reader must know: operations without an error, and 16-bit weights that are stepped themselves."""
    if observation.failures:
        names = ", ".join(sorted(observation.failures))
        yield f"the error of {names} is not known, because it did not run in the wide type"
    halves = [update for update in observation.updates.values() if update.dtype in ("fp16", "bf16") and update.moved]
    if halves and (arm.roles is None or arm.roles.update == "nearest"):
        lost = 100 * sum(update.lost for update in halves) / sum(update.moved for update in halves)
        types = " and ".join(sorted({update.dtype for update in halves}))
        yield f"the optimizer steps {types} weights without fp32 masters: rounding loses {lost:.0f} % of the updates"


def in_fp32(device_type: str, *, is_autocast: bool) -> Mapping[str, str]:
    """Return the operations that run in fp32 whatever they are given, each with the name of its function.

    Args:
        is_autocast: those that autocast casts on this device; else those of O1.
    """
    names = [name for name in IN_FP32 if not (is_autocast and name in O1_ALONE)]
    if is_autocast and device_type == "cpu":
        names = [*IN_FP32_ON_CPU]
    return {name: name.removeprefix("native_").lstrip("_") for name in names}
