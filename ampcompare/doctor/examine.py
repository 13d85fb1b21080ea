"""The whole examination: which checks run, in which order, and which run in parallel."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from ampcompare.backends.arm import Arm
from ampcompare.base.environment.versions import installed_version
from ampcompare.base.isolate.call import TIME_LIMIT, Answer
from ampcompare.base.version import __version__
from ampcompare.doctor.accelerator import examine_accelerators, kinds_to_ask_for
from ampcompare.doctor.apex import examine_apex
from ampcompare.doctor.ask import ask
from ampcompare.doctor.extras import examine_extras
from ampcompare.doctor.finding import Check, Verdict, worst
from ampcompare.doctor.gpu import driver_version, examine_gpus, has_nvidia_gpu
from ampcompare.doctor.machine import examine_machine
from ampcompare.doctor.needs import ArmNeeds, MachineFacts, examine_arm
from ampcompare.doctor.numerics import examine_numerics
from ampcompare.doctor.processor import cpu_flags, examine_processor
from ampcompare.doctor.software import examine_collectives, examine_python, examine_torch, examine_vision

__all__ = ["Examination", "examine"]


@dataclass(frozen=True)
class Examination:
    """All findings, in the order in which they are read, and the arms that were asked for."""

    findings: tuple[Check, ...]
    arms: tuple[ArmNeeds, ...]

    @property
    def verdict(self) -> Verdict:
        """The worst of all; an arm that cannot run is a problem."""
        return "problem" if any(not arm.fits for arm in self.arms) else worst(self.findings)

    def data(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "ampcompare": __version__,
            "verdict": self.verdict,
            "findings": [asdict(finding) for finding in self.findings],
            "arms": [{**asdict(arm), "fits": arm.fits} for arm in self.arms],
        }


def examine(arms: Sequence[Arm] = (), *, seconds: float = TIME_LIMIT) -> Examination:
    """Examine this machine as a script in the current folder would find it.

    Args:
        arms: those to report on one by one.
        seconds: time limit of each child process.
    """
    environment = dict(os.environ)
    with ThreadPoolExecutor(max_workers=3) as pool:
        torch_asked = pool.submit(ask, "torch_build", seconds=seconds)
        vision_asked = pool.submit(_vision, seconds)
        apex_asked = pool.submit(examine_apex, seconds=seconds)
        torch_told = torch_asked.result()
        built_for_gpus = torch_told.done and (torch_told.value["cuda"] or torch_told.value["hip"])
        kinds = kinds_to_ask_for()
        others_told = ask("accelerators", seconds=seconds, options={"kinds": kinds}) if kinds else None
        gpus_told = ask("gpus", seconds=seconds) if built_for_gpus else None
        vision_told, apex = vision_asked.result(), apex_asked.result()
    build = torch_told.value if torch_told.done else None
    torch_findings = examine_torch(torch_told, has_gpu=has_nvidia_gpu())
    torch_version = build["version"] if build else installed_version("torch")
    devices = tuple(gpus_told.value.get("devices", ())) if gpus_told and gpus_told.done else ()
    findings = [examine_python(), *torch_findings, examine_vision(vision_told, torch_version)]
    if build:
        findings.append(examine_collectives(build, gpus_told.value.get("nccl") if gpus_told else None))
    findings.append(apex)
    findings += examine_gpus(gpus_told, driver=driver_version(), hip=build["hip"] if build else None)
    findings += examine_accelerators(others_told)
    findings += examine_processor(build, cpu_flags())
    findings += examine_numerics(build, environment)
    findings += examine_machine(environment)
    findings += examine_extras()
    facts = MachineFacts(torch_findings[0], devices, apex, build["bf16_instructions"] if build else None)
    return Examination(tuple(findings), tuple(examine_arm(arm, facts) for arm in arms))


def _vision(seconds: float) -> Answer:
    """Ask about torchvision only if it is installed, since the answer needs an import of torch."""
    if installed_version("torchvision") is None:
        return Answer({}, "raised", "not installed")
    return ask("vision", seconds=seconds)
