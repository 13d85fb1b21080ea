"""The order in which a run is assembled; no other module depends on it.

Seed, models (fp32, CPU), synchronized batch norm, device, optimizers, `Precision.prepare`, `Parallel.shard`, checkpoint
(if any), torch.compile, `Parallel.wrap`: Apex's documented order. SyncBN comes early so that keep_batchnorm_fp32 sees
it, shards after the casts of a backend and before state exists, and DDP last because it records dtypes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from ampcompare.base.errors import UnsupportedCombination
from ampcompare.parallel.ranks import Communicator, SingleProcess, model_facts, require_equal
from ampcompare.parallel.replication import Parallel, Single
from ampcompare.precision.base import Precision, owned_params
from ampcompare.settings.recipe import Recipe, ScheduleConfig
from ampcompare.tasks.randomness import seed_globals
from ampcompare.tasks.task import Task
from ampcompare.training.compile import compiled, ready_compiler
from ampcompare.training.ema import ModelEma
from ampcompare.training.optimizers import make_optimizer
from ampcompare.training.state.capture import restore_training
from ampcompare.training.state.check_checkpoint import Owned, owned_by
from ampcompare.training.state.schema import require_position

__all__ = ["Assembly", "assemble", "assemble_single", "checkpoint_activations", "make_schedule"]


def checkpoint_activations(task: Task, models: Sequence[nn.Module]) -> None:
    """Let the modules that the task names compute their activations again; only their inputs are kept.

    Raises:
        UnsupportedCombination: the task names none.
    """
    modules = task.checkpointed_modules(models)
    if not modules:
        raise UnsupportedCombination(
            "--checkpoint-activations: this model has no repeated blocks to recompute; leave it out"
        )
    for module in modules:
        module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)


def make_schedule(config: ScheduleConfig, *, steps_per_epoch: int, total_steps: int) -> Callable[[int], float] | None:
    """Return the factor on the base learning rate at each step, as LambdaLR takes it; None if it is always 1.

    torch's schedulers count calls, warn when a first step was skipped, and cost about 15 microseconds a step; a
    function of the step gives every arm the same rate at the same step, and resumes without state.

    Args:
        config: name and parameters of the schedule.
        steps_per_epoch: updates in one epoch.
        total_steps: updates in the whole run, where the cosine reaches 0.
    """
    warmup = round(config.warmup_epochs * steps_per_epoch)
    if config.name == "constant" and warmup == 0:
        return None

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if config.name == "step":
            return float(config.gamma ** (step // (config.step_epochs * steps_per_epoch)))
        if config.name == "cosine":
            progress = (step - warmup) / max(1, total_steps - warmup)
            return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        return 1.0

    return factor


@dataclass
class Assembly:
    """Everything that one training loop needs.

    Attributes:
        models: as the loop calls them.
        replicas: the same models without their wrappers, whose calls would wait for other ranks.
        optimizers: as `Precision.prepare` returned them.
        schedule: factor on the learning rates by step; None if they are constant.
        base_lrs: per optimizer and group, the learning rate that the factor multiplies.
        steps_per_epoch, total_steps: updates.
        ranks: the processes of this run.
        average: EMA of the weights, evaluated as well; None if there is none.
        owned: which parameters the optimizers hold, and the state that they keep of them.
        workers: data loader processes.
    """

    task: Task
    models: list[nn.Module]
    replicas: list[nn.Module]
    optimizers: list[Optimizer]
    precision: Precision
    parallel: Parallel
    device: torch.device
    schedule: Callable[[int], float] | None
    base_lrs: list[list[float]]
    steps_per_epoch: int
    total_steps: int
    ranks: Communicator
    owned: Owned
    average: ModelEma | None = None
    workers: int = 0


def assemble_single(
    recipe: Recipe, task: Task, precision: Precision, device: torch.device, *, state: Mapping[str, Any] | None = None
) -> Assembly:
    """Assemble a run of one process, as `assemble` does."""
    return assemble(recipe, task, precision, Single(), device, state=state)


def assemble(
    recipe: Recipe,
    task: Task,
    precision: Precision,
    parallel: Parallel,
    device: torch.device,
    *,
    workers: int = 0,
    ranks: Communicator | None = None,
    state: Mapping[str, Any] | None = None,
) -> Assembly:
    """Assemble a run from its seed: equal recipes start from bitwise equal weights.

    Args:
        state: checkpoint from which weights, optimizers and precision are restored.

    Raises:
        RanksDiffer: the model of another rank has other parameters.
        CheckpointError: the checkpoint is of another model.
    """
    ranks = ranks or SingleProcess()
    torch.manual_seed(recipe.seed)
    seed_globals(recipe.seed)  # numpy and Python too: a user's model may draw from their generators
    built = [parallel.convert_batchnorm(model).to(device) for model in task.make_models()]
    if recipe.channels_last:
        built = [model.to(memory_format=torch.channels_last) for model in built]  # type: ignore[call-overload]
    if recipe.checkpoint_activations:
        checkpoint_activations(task, built)
    engine = None if precision.engine is None else precision.engine.name
    unprepared = task.make_optimizers(built, functools.partial(make_optimizer, recipe.optimizer, engine=engine))
    ready_compiler(recipe.compile)
    average = None if recipe.ema_decay is None else ModelEma(built, recipe.ema_decay)
    # Both before `prepare`, which may replace parameters by fp32 master weights.
    params = [param for optimizer in unprepared for param in owned_params(optimizer)]
    owned = owned_by(built, unprepared)
    precision.expect_losses(len(task.phases(len(unprepared))))
    replicas, optimizers = precision.prepare(built, unprepared)
    require_equal(ranks, "model", model_facts(replicas), "build the same model on every rank")
    parallel.shard(replicas, optimizers)
    base_lrs = [[float(group["lr"]) for group in optimizer.param_groups] for optimizer in optimizers]
    steps_per_epoch = task.data.num_batches(recipe.batch_size, ranks.size)
    total_steps = steps_per_epoch * recipe.epochs
    if recipe.max_steps is not None:
        total_steps = min(total_steps, recipe.max_steps)
    schedule = make_schedule(recipe.schedule, steps_per_epoch=steps_per_epoch, total_steps=total_steps)
    if state is not None:
        if "progress" in state:
            require_position(state["progress"], steps_per_epoch, total_steps)
        if average is not None and "parts" in state:
            average.require_fit(state["parts"]["average"])
        restore_training(state, replicas, optimizers, precision, owned, rates_stay=schedule is None)
    if average is not None:
        average.follow(replicas, optimizers, params)
    models = [parallel.wrap(compiled(model, recipe.compile, device)) for model in replicas]
    return Assembly(
        task=task,
        models=models,
        replicas=replicas,
        optimizers=optimizers,
        precision=precision,
        parallel=parallel,
        device=device,
        schedule=schedule,
        base_lrs=base_lrs,
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
        ranks=ranks,
        average=average,
        owned=owned,
        workers=workers,
    )
