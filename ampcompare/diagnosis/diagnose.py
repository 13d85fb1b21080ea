"""The whole diagnosis of a loop under an arm: one watched run, and one for each candidate of a cure."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ampcompare.backends.arm import Arm
from ampcompare.diagnosis.advice import cure_of
from ampcompare.diagnosis.audit import audit
from ampcompare.diagnosis.faults import find_faults
from ampcompare.diagnosis.headroom import headroom, scale_to_try
from ampcompare.diagnosis.measure import Conditions, Loop, measure
from ampcompare.diagnosis.observation import Observation
from ampcompare.diagnosis.options import DiagnoseOptions
from ampcompare.diagnosis.search import Found, search
from ampcompare.errors import ConfigError
from ampcompare.records.diagnosis import Cure, Diagnosis, Fault
from ampcompare.training.device import resolve_device

__all__ = ["diagnose_given", "diagnose_loop"]

MAX_UNCURED = "no set of modules, functions or options that was tested removes it"


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
    faults = find_faults(observation)
    room = headroom(observation.facts)
    found = Found(None, [])
    if cures and faults:
        found = search(
            arm,
            faults,
            scale_to_try(room),
            lambda other, lines: measure(loop, other, conditions, lines),
            observation.modules,
        )
    cure = None
    if found.change is not None:
        last = measure(loop, found.change.applied_to(arm), conditions, found.change.lines)
        cure = cure_of(arm, found.change, sorted(last.functions), torch.device(conditions.device).type)
    return Diagnosis(
        arm=str(arm),
        subject=subject,
        verdict=_verdict(arm, faults, cure, observation, tested=bool(found.trials)),
        steps=observation.steps,
        skipped=observation.skipped,
        observed=[facts.index for facts in observation.facts],
        reference=_name(conditions.reference),
        modules=observation.modules,
        places=list(observation.reports("forward", "backward")),
        weights=list(observation.reports("weight")),
        gradients=list(observation.reports("gradient")),
        map=observation.map(),
        headroom=room,
        updates=list(observation.updates.values()),
        audit=audit(arm, observation),
        faults=faults,
        trials=found.trials,
        cure=cure,
        notes=_notes(observation),
    )


def _verdict(arm: Arm, faults: Sequence[Fault], cure: Cure | None, observation: Observation, *, tested: bool) -> str:
    """Return the result in one sentence."""
    if not faults:
        skipped = f", {observation.skipped} of them skipped while the loss scale settled" if observation.skipped else ""
        return f"{arm}: no fault in {observation.steps} steps{skipped}"
    first = faults[0]
    where = f" ({first.place.where})" if first.place.where else ""
    verdict = f"{arm}: {first.kind} at step {first.step}: {first.text}{where}"
    if first.kind == "not precision":
        return f"{verdict}; no precision cures it"
    if cure is not None:
        return f"{verdict}; {' and '.join([*cure.keeps, *([cure.option] if cure.option else [])])} {_verb(cure)} it"
    return f"{verdict}; {MAX_UNCURED}" if tested else verdict


def _verb(cure: Cure) -> str:
    return "in fp32 cures" if cure.keeps and not cure.option else "cures"


def _name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _notes(observation: Observation) -> list[str]:
    if not observation.failures:
        return []
    return [f"no error is known of {', '.join(sorted(observation.failures))}, which did not run in the wide type"]
