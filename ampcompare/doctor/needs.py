"""Whether an arm can run here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ampcompare.backends.apex_levels import ROCM_LEVELS
from ampcompare.backends.arm import Arm
from ampcompare.doctor.apex import INSTALL, REBUILD
from ampcompare.doctor.finding import Check, ask

# What gives an Apex with amp where scripts need none, and so have another remedy.
BUILDS = {
    **dict.fromkeys(("no_amp", "grafted", "impostor"), REBUILD),
    **dict.fromkeys(("absent", "ours"), (INSTALL,)),
}


@dataclass(frozen=True)
class MachineFacts:
    """What arms depend on.

    Attributes:
        torch: the finding of that name.
        devices: GPUs that torch can use, as the probe `gpus` tells them.
        apex: the finding of that name.
        fast_bf16: whether the CPU has instructions for bf16; None where it is not known.
    """

    torch: Check
    devices: tuple[Mapping[str, Any], ...]
    apex: Check
    fast_bf16: bool | None


@dataclass(frozen=True)
class ArmNeeds:
    """Whether an arm can run, on which device, and what it lacks or should be known of it.

    Attributes:
        missing: a sentence for each thing that it cannot do without.
        remedy: lines for a shell.
    """

    arm: str
    device: str
    missing: tuple[str, ...]
    notes: tuple[str, ...]
    remedy: tuple[str, ...]

    @property
    def can_run(self) -> bool:
        """Whether it can run."""
        return not self.missing


def examine_arm(arm: Arm, facts: MachineFacts) -> ArmNeeds:
    """Check whether `arm` can run on this machine's default device."""
    device = "cuda" if facts.devices else "cpu"
    missing: list[str] = []
    notes: list[str] = []
    remedy: list[str] = []
    # a build for CPUs where there is a GPU
    if facts.torch.verdict == "problem" and "hip" in facts.torch.facts:
        notes.append(f"torch: {facts.torch.reason}")
    elif facts.torch.verdict == "problem":
        missing.append(f"torch is {facts.torch.value}")
        remedy.extend(facts.torch.remedy)
    library = arm.spec.library
    if library is not None and library.why_missing():
        missing.append(f"{arm.backend} is {library.why_missing()}")
        remedy.append(library.install)
    if arm.spec.calls_apex:
        _add_engine_needs(arm, facts, missing, notes, remedy)
    elif arm.is_third_party:
        answer = ask("entry_point_import", options={"value": arm.spec.implementation})
        if not answer.has_returned:
            missing.append(f"its package cannot be imported: {answer.failure}")
    roles = None if library is not None else arm.roles  # a library may decide otherwise for a device
    half = "" if roles is None else roles.half
    if device == "cpu":
        if half == "fp16" or (half == "bf16" and facts.fast_bf16 is False):
            notes.append(f"{half} is emulated on this CPU")
    elif half == "bf16" and all(tuple(device["capability"]) < (8, 0) for device in facts.devices):
        notes.append("no GPU here has bf16 in hardware (capability 8.0): it is emulated and slow")
    return ArmNeeds(str(arm), device, tuple(missing), tuple(notes), tuple(dict.fromkeys(remedy)))


def _add_engine_needs(
    arm: Arm, facts: MachineFacts, missing: list[str], notes: list[str], remedy: list[str]
) -> None:
    """Follow the choice of an engine: `auto` takes the real Apex where it is, on CUDA, but not for O1."""
    engine = arm.options.get("engine", "auto")
    compat = str(Arm.make("apex", **{**arm.options, "engine": "compat"}))
    instead = f"ampcompare run --arm {compat}"
    apex = facts.apex
    if engine == "nvidia":
        if not apex.facts["usable"]:
            missing.append(f"engine=nvidia needs NVIDIA Apex with apex.amp; apex is {apex.value}")
            remedy.extend(BUILDS.get(apex.facts["state"], apex.remedy))
        if not facts.devices:
            missing.append("engine=nvidia runs on CUDA only, and torch sees no GPU")
        if missing:
            remedy.append(f"{instead}  # or ampcompare's own engine")
        elif arm.options.get("opt_level") == "O1":
            notes.append("O1 of the real Apex raises on torch 2.4 and later where a weight is used twice")
    elif engine == "auto" and facts.devices and arm.options.get("opt_level") not in ("O1", *ROCM_LEVELS):
        # By its files it is there, so `auto` imports it; levels that it could run then fail.
        if apex.facts["state"] in ("broken", "other_build") and not apex.facts["usable"]:
            missing.append(f"engine=auto uses the installed Apex, which is broken: {apex.value}")
            remedy.extend((*apex.remedy, f"{instead}  # or ampcompare's own engine"))
