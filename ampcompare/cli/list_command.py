"""`ampcompare list`: what there is to choose from."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from ampcompare.backends.spec import BackendSpec

__all__ = ["command"]

KINDS = ("arms", "models", "data", "launchers", "recipes", "guards")


@click.command("list")
@click.argument("what", type=click.Choice([*KINDS, "all"]), default="all")
def command(what: str) -> int:
    """List available arms, models, data, launchers, recipes and guards."""
    from ampcompare.report.tables import listing, room

    for name, rows in _sections():
        if what in (name, "all"):
            shown = [[item, "yes" if available else "no", reason] for item, available, reason in rows]
            click.echo(listing(shown, [name, "available", "what it is, or why not"], room()) + "\n")
    return 0


def _sections() -> list[tuple[str, list[tuple[str, bool, str]]]]:
    from ampcompare.backends.catalog import BUILT_IN, described_backends, third_party_backends
    from ampcompare.environment import probe_apex
    from ampcompare.guards.catalog import GUARDS
    from ampcompare.recipes.catalog import list_recipes
    from ampcompare.tasks.catalog import list_data, list_models

    described = described_backends()
    arms = [_arm(name, spec) for name, spec in described.items()]
    apex = probe_apex()
    arms.append(("apex:...,engine=compat", True, "this package's own engine, on any device"))
    real = f"{apex.reason}; on CUDA only" if apex.has_amp else apex.reason
    arms.append(("apex:...,engine=nvidia", apex.has_amp, real))
    for name, value in third_party_backends().items():
        taken = f"registered by another package ({value}) and by this one: uninstall that package"
        if name in BUILT_IN or name not in described:
            arms.append((name, name not in BUILT_IN, taken if name in BUILT_IN else f"from another package: {value}"))
    tables = [("arms", arms), ("models", list_models()), ("data", list_data()), ("launchers", _launchers())]
    watched = [(name, True, guard.mistake) for name, guard in GUARDS.items()]
    return [*tables, ("recipes", list_recipes()), ("guards", watched)]


def _arm(backend: str, spec: BackendSpec) -> tuple[str, bool, str]:
    """Return the row of a backend; the library that it may need is looked for, and not imported."""
    if spec.library is None:
        return backend, True, spec.summary
    found = spec.library.found()
    if found is None:
        return backend, False, spec.library.missing()
    return backend, True, f"{spec.summary} ({found[1]} {found[2]})"


def _launchers() -> list[tuple[str, bool, str]]:
    """Return the ways in which processes are started; torch itself is not imported to find out."""
    with_torch = find_spec("torch") is not None
    lacks = "torch is not installed: pip install torch"
    forked = "one process per cell, forked from a server that has torch imported"
    fresh = "one new process per cell, since this system cannot fork"
    ways = {
        "auto": (forked if hasattr(os, "fork") else fresh) + "; torchrun where a cell has several",
        "torchrun": "the processes of a cell by torchrun's own code; or in front: torchrun -m ampcompare run ...",
        "spawn": "the processes of a cell one by one, which starts faster",
    }
    found = [(name, with_torch, text if with_torch else lacks) for name, text in ways.items()]
    if shutil.which("sbatch") is None:
        return [*found, ("slurm", False, "sbatch is not on the path: call it where jobs can be submitted")]
    if find_spec("submitit") is None:
        return [*found, ("slurm", False, "submitit is not installed: pip install submitit")]
    return [*found, ("slurm", True, "a job of Slurm per cell, by submitit; or in front: srun ampcompare run ...")]
