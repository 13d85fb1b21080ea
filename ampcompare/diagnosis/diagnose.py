"""The whole diagnosis of a loop under an arm: one watched run, and one for each candidate of a cure."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch

from ampcompare.backends.arm import Arm
from ampcompare.base.errors import ConfigError
from ampcompare.base.tensors.products import HALF_DTYPES
from ampcompare.base.tensors.type_names import HALF_NAMES
from ampcompare.diagnosis.findings import find_first_faults_by_kind
from ampcompare.diagnosis.loops import Loop, LoopConditions
from ampcompare.diagnosis.observation import RunObservation, StepFacts
from ampcompare.diagnosis.operation_watch import FP16_LARGEST
from ampcompare.diagnosis.options import DiagnoseOptions
from ampcompare.diagnosis.product_formats import diagnose_formats
from ampcompare.diagnosis.ranges import magnitude_range_of_counts, total_nonfinite_and_lost_of
from ampcompare.diagnosis.remedies import (
    TestedCandidate,
    diagnosis_sentence,
    diagnosis_with_tested_cure,
    faults_with_cast_of_inputs,
)
from ampcompare.diagnosis.watched_loop import observe_loop
from ampcompare.results.records.diagnosis import Diagnosis, FaultKind, LossScaleHeadroom
from ampcompare.training.process.device import resolve_device

FP16_LOST = -25  # exponents below it round to zero
SCALES = (1.0, 128.0, 65536.0)
LEAST_LOST = 0.5  # percent of the updates that rounding loses, from which a note says so


def loss_scale_headroom_over_steps(steps: Iterable[StepFacts]) -> LossScaleHeadroom | None:
    """Return the headroom over all watched steps with a finite loss; None if no gradient was seen.

    Exponents are those of the gradients of weights, in the wide run where there is one, at scale 1. The largest scale
    counts what the backward pass computed on the way too.
    """
    exponents: Counter[int] = Counter()
    largest, own = 0.0, 1.0
    for facts in steps:
        loss = facts.step.index_of_loss
        if loss is not None and total_nonfinite_and_lost_of(facts.step.events[loss].row)[1]:
            continue  # the gradients of a loss that is not finite say nothing about a scale
        own, shift = facts.scale, round(math.log2(facts.scale))
        for event in facts.step.events:
            phase = event.key[3]
            if event.constant:
                continue
            if phase == "gradient":
                values = magnitude_range_of_counts(event.row if event.wide is None else event.wide)
                exponents.update({power - shift: count for power, count in values.exponents.items()})
            elif phase == "backward" and event.dtype in HALF_DTYPES:
                values = magnitude_range_of_counts(event.row)
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
    return LossScaleHeadroom(
        exponents=dict(sorted(exponents.items())), largest_scale=fits, own_scale=own, lost=lost
    )


def diagnose_loop_by_options(loop: Loop, options: DiagnoseOptions, *, subject: str = "") -> Diagnosis:
    """Diagnose a loop.

    Args:
        loop: what trains; it is called with the precision of an arm.
        options: steps, reference and cures; of their recipe only the seed applies.
        subject: what the report calls the training; "" for nothing.
    """
    options.check()
    config = options.config
    conditions = LoopConditions(
        steps=options.steps,
        reference=None if options.reference == "none" else getattr(torch, options.reference),
        device=str(resolve_device(config.device)),
        half=config.cpu_half,
        lists=config.autocast_lists,
        seed=config.recipe.seed,
    )
    return diagnose_loop(loop, Arm.parse(config.arm), conditions, subject=subject, cures=options.cures)


def diagnose_loop(
    loop: Loop,
    arm: Arm,
    conditions: LoopConditions,
    *,
    subject: str = "",
    cures: bool = True,
    left_out: Collection[FaultKind] = (),
) -> Diagnosis:
    """Train a loop for some steps under an arm, find its faults, and test what removes them.

    The loop is called again for each candidate, and must begin from the same weights and batches each time.

    Raises:
        ConfigError: the loop made no step that was watched.
    """
    if arm.roles is not None and arm.roles.linear_formats:
        return diagnose_formats(loop, arm, conditions, subject=subject, cures=cures)
    observation = observe_loop(loop, arm, conditions)
    if not observation.facts:
        raise ConfigError(f"no step was watched: the loop made {observation.steps} calls of step")
    found = diagnosis_of_observation(
        observation, arm, reference=conditions.reference, subject=subject, left_out=left_out
    )
    if not cures:
        return found

    def test(other: Arm, lines: Sequence[str]) -> TestedCandidate:
        seen = observe_loop(loop, other, conditions, lines)
        return TestedCandidate(find_first_faults_by_kind(seen, left_out), sorted(seen.functions))

    return diagnosis_with_tested_cure(found, arm, test, device_type=observation.device_type)


def diagnosis_of_observation(
    observation: RunObservation,
    arm: Arm,
    *,
    reference: torch.dtype | None,
    subject: str = "",
    notes: Sequence[str] = (),
    left_out: Collection[FaultKind] = (),
) -> Diagnosis:
    """Return what one watched run showed; no cure is sought.

    Args:
        observation: of the run.
        arm: under which it trained.
        reference: the type in which operations were repeated, float32 or float64; None if they were not.
        subject: what the report calls the training; "" for nothing.
        notes: sentences that come first.
        left_out: kinds of faults that are not looked for.
    """
    found = Diagnosis(
        arm=str(arm),
        subject=subject,
        verdict="",
        steps=observation.steps,
        skipped=observation.skipped,
        observed=[facts.index for facts in observation.facts],
        reference=None if reference is None else str(reference).removeprefix("torch."),
        modules=observation.modules,
        places=list(observation.place_reports("forward", "backward")),
        weights=list(observation.place_reports("weight")),
        gradients=list(observation.place_reports("gradient")),
        map=observation.results_by_module_and_step(),
        headroom=loss_scale_headroom_over_steps(observation.facts),
        updates=list(observation.updates.values()),
        faults=faults_with_cast_of_inputs(arm, find_first_faults_by_kind(observation, left_out)),
        notes=[*notes, *_diagnosis_notes(arm, observation)],
    )
    return found.model_copy(update={"verdict": diagnosis_sentence(arm, found)})


def _diagnosis_notes(arm: Arm, observation: RunObservation) -> Iterator[str]:
    """Yield what a reader must know: operations without an error, and 16-bit weights that are stepped themselves."""
    if observation.failures:
        names = ", ".join(sorted(observation.failures))
        yield f"the error of {names} is not known, because it did not run in the wide type"
    for text in observation.reads.values():
        yield f"{text}; what Python does with such a number is not followed: make it of integers, or in fp32"
    halves = [
        update for update in observation.updates.values() if update.dtype in HALF_NAMES and update.moved
    ]
    if halves and (arm.roles is None or arm.roles.update == "nearest"):
        lost = 100 * sum(update.lost for update in halves) / sum(update.moved for update in halves)
        types = " and ".join(sorted({update.dtype for update in halves}))
        if lost >= LEAST_LOST:
            yield (
                f"the optimizer steps {types} weights without fp32 masters: rounding loses {lost:.0f} % of the updates"
            )
