"""The whole diagnosis of a loop under an arm: one watched run, and one for each candidate of a cure."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ampcompare.backends.arm import Arm
from ampcompare.base.errors import ConfigError
from ampcompare.diagnosis.audit import audit
from ampcompare.diagnosis.cures import verdict_of, with_cure
from ampcompare.diagnosis.faults import find_faults
from ampcompare.diagnosis.headroom import headroom
from ampcompare.diagnosis.measure import Conditions, Loop, measure
from ampcompare.diagnosis.observation import Observation
from ampcompare.diagnosis.options import DiagnoseOptions
from ampcompare.diagnosis.search import Tested
from ampcompare.records.diagnosis import Diagnosis
from ampcompare.training.device import resolve_device

__all__ = ["diagnose_given", "diagnose_loop", "report_of"]


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
