"""From an assembled run to the loop that trains it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ampcompare.base.errors import UnsupportedCombination
from ampcompare.precision.base import Precision
from ampcompare.settings.recipe import Recipe
from ampcompare.tasks.task import Phase
from ampcompare.training.assemble import Assembly
from ampcompare.training.cuda_graph import CudaRecorder, StepGraph, rates_on_device, refuse_unrecordable
from ampcompare.training.loop import Loop, update
from ampcompare.training.metrics.clock import make_clock
from ampcompare.training.phases import PhasedUpdate

__all__ = ["build_loop"]


def build_loop(recipe: Recipe, assembly: Assembly, precision: Precision, *, drain_every: int) -> Loop:
    """Return the loop of a run.

    Args:
        precision: of the assembly, or a wrapper around it.
        drain_every: steps between two reads of losses and loss scales from the device.

    Raises:
        UnsupportedCombination: a CUDA graph is asked for, and the update cannot be recorded.
    """
    task, ranks = assembly.task, assembly.ranks
    phases = task.phases(len(assembly.optimizers))
    return Loop(
        models=assembly.models,
        optimizers=assembly.optimizers,
        precision=precision,
        parallel=assembly.parallel,
        loss_of=phases[0].loss,
        clock=make_clock(assembly.device),
        num_losses=len(phases),
        accumulation=recipe.grad_accum_steps,
        clip_norm=recipe.clip_grad,
        schedule=assembly.schedule,
        base_lrs=assembly.base_lrs,
        drain_every=drain_every,
        channels_last=recipe.channels_last,
        mean=ranks.mean if ranks.size > 1 else None,
        split=task.split,
        to_channels_last=task.channels_last,
        update=_update_of(phases, assembly, recorded=recipe.cuda_graph),
        after_step=() if assembly.average is None else (assembly.average.update,),
    )


def _update_of(phases: Sequence[Phase], assembly: Assembly, *, recorded: bool) -> Callable[..., Any]:
    """Return what makes an update: all optimizers at once, or phase by phase; or a CUDA graph of it."""
    if len(phases) > 1:
        if recorded:
            raise UnsupportedCombination(
                f"cuda_graph captures one step, but this task makes {len(phases)} in an update; leave out --cuda-graph"
            )
        return PhasedUpdate(phases)
    if not recorded:
        return update
    refuse_unrecordable(assembly.device, assembly.precision, assembly.optimizers)
    rates_on_device(assembly.optimizers, assembly.device)
    return StepGraph(update, CudaRecorder(assembly.device))
