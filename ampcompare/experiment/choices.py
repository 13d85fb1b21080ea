"""The available choices, from arms to guards, and why something is unavailable."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import NamedTuple

from ampcompare.backends.arm import Arm
from ampcompare.backends.catalog import BUILT_IN, described_backends, third_party_backends
from ampcompare.backends.spec import BackendSpec
from ampcompare.base.environment.apex import find_installed_apex
from ampcompare.guards import checks
from ampcompare.settings.file import list_recipes
from ampcompare.settings.optimizers import list_optimizers
from ampcompare.tasks.catalog import list_data, list_models, list_tasks

Availability = tuple[str, bool, str]  # name, whether it can be had here, what it is or why it cannot


class ChoiceAvailability(NamedTuple):
    """One thing to choose: whether it can be had here, and what it is, or why it cannot."""

    name: str
    is_available: bool
    text: str


def list_choices() -> dict[str, list[ChoiceAvailability]]:
    """Return all choices by kind; no library is imported to find out."""
    return {kind: [ChoiceAvailability(*row) for row in rows()] for kind, rows in CHOICES.items()}


def _availability_of_arms() -> list[Availability]:
    """Return the backends, the two engines of Apex, and the arms of other packages."""
    described = described_backends()
    arms: list[Availability] = [_availability_of_backend(name, spec) for name, spec in described.items()]
    apex = find_installed_apex()
    arms.append(("apex:...,engine=compat", True, "this package's own engine, on any device"))
    real = f"{apex.reason}; on CUDA only" if apex.has_amp else apex.reason
    arms.append(("apex:...,engine=nvidia", apex.has_amp, real))
    for name, value in third_party_backends().items():
        taken = f"registered by another package ({value}) and by this one: uninstall that package"
        if name in BUILT_IN or name not in described:
            arms.append(
                (name, name not in BUILT_IN, taken if name in BUILT_IN else f"from another package: {value}")
            )
    return arms


def _availability_of_backend(backend: str, spec: BackendSpec) -> Availability:
    """Return the row of a backend; the library that it may need is searched, but not imported."""
    if spec.library is None:
        roles = Arm.make(backend).roles if spec.parsers else None
        return backend, True, spec.summary + (f"; by default {roles}" if roles is not None else "")
    installed = spec.library.find_module_distribution_and_version()
    if installed is None:
        return backend, False, spec.library.why_missing()
    return backend, True, f"{spec.summary} ({installed[1]} {installed[2]})"


def _availability_of_launchers() -> list[Availability]:
    """Return the ways in which processes are started; torch itself is not imported to find out."""
    with_torch = find_spec("torch") is not None
    lacks = "torch is not installed: pip install torch"
    ways = {
        "auto": "one process per cell, forked from a server that has torch imported; several start one by one",
        "torchrun": "the processes of a cell by torchrun's own code; or in front: torchrun -m ampcompare run ...",
        "spawn": "the processes of a cell one by one, which starts faster",
    }
    choices = [(name, with_torch, text if with_torch else lacks) for name, text in ways.items()]
    has_ray = find_spec("ray") is not None
    ray = (
        "a task of Ray per cell, here or on a cluster" if has_ray else "ray is not installed: pip install ray"
    )
    choices.append(("ray", has_ray, ray))
    if shutil.which("sbatch") is None:
        return [*choices, ("slurm", False, "sbatch is not on the path: call it where jobs can be submitted")]
    if find_spec("submitit") is None:
        return [*choices, ("slurm", False, "submitit is not installed: pip install submitit")]
    return [
        *choices,
        ("slurm", True, "a job of Slurm per cell, by submitit; or in front: srun ampcompare run ..."),
    ]


def _availability_of_guards() -> list[Availability]:
    return [(name, True, guard.mistake) for name, guard in checks.GUARDS.items()]


CHOICES: dict[str, Callable[[], Sequence[Availability]]] = {
    "arms": _availability_of_arms,
    "tasks": list_tasks,
    "models": list_models,
    "data": list_data,
    "optimizers": list_optimizers,
    "launchers": _availability_of_launchers,
    "recipes": list_recipes,
    "guards": _availability_of_guards,
}
"""By the word that `list` takes."""
