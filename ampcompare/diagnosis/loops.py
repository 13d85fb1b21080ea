"""A loop of training under an arm: how it is trained, and the loop of a recipe."""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ampcompare.backends.arm import Arm
from ampcompare.base.errors import UnsupportedCombination
from ampcompare.results.records.evaluation import emulated_type
from ampcompare.settings.config import RunConfig
from ampcompare.tasks.task import make_task
from ampcompare.training.assemble import TrainingAssembly, assemble_run
from ampcompare.training.build_loop import build_training_loop
from ampcompare.training.precision.base import Precision, make_precision
from ampcompare.training.precision.cpu_half import choose_cpu_half_mode_and_context

Loop = Callable[[Precision], Any]


@dataclass(frozen=True)
class LoopConditions:
    """How a loop is run and watched."""

    steps: int = 8  # updates
    reference: torch.dtype | None = torch.float32  # type of the wide run; None for ranges alone
    device: str = "cpu"
    half: str = "auto"  # how 16-bit arithmetic is computed on a CPU
    lists: str = "cuda"  # whose casts torch.autocast makes on a CPU
    seed: int = 0


@contextmanager
def arm_precision_isolated(
    arm: Arm, conditions: LoopConditions, beneath: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> Iterator[Precision]:
    """Yield the precision of an arm with torch seeded and warnings off; at the end torch is as it was before.

    `beneath` makes a context to enter below an emulation of 16 bits, if there is one.
    """
    torch.manual_seed(conditions.seed)
    precision = make_precision(arm, device=conditions.device, autocast_lists=conditions.lists)
    mode, arithmetic = choose_cpu_half_mode_and_context(
        conditions.half, precision.half_dtype, torch.device(conditions.device), conditions.lists
    )
    try:
        below = beneath() if emulated_type(mode) else nullcontext()
        with below, arithmetic, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield precision
    finally:  # undo the patches of O1
        state: Any = getattr(getattr(precision, "amp", None), "_amp_state", None)
        if hasattr(state, "close"):
            state.close()


def make_recipe_loop(
    config: RunConfig,
    device: torch.device,
    *,
    is_twin: bool = False,
    at_assembly: Callable[[TrainingAssembly], None] = lambda assembly: None,
    epochs: Iterable[int] | None = None,
    batches_of: Callable[[Any, Iterable[Any]], Iterable[Any]] = lambda precision, batches: batches,
    drain_every: int = 1,
) -> Callable[[Any], Any]:
    """Return the loop: it assembles the run of the recipe again at each call, and trains until it is stopped.

    Args:
        is_twin: change the weights by one part in 512.
        at_assembly: called with what is trained, before the first step.
        batches_of: what the loop iterates over, from the precision and the batches of an epoch.
    """
    recipe = config.recipe
    task = make_task(recipe)

    def train(precision: Precision) -> None:
        if config.parallel.kind == "fsdp":
            raise UnsupportedCombination(
                f"a recipe is trained in one process here, but {config.arm} shards its weights over several; take "
                "half:bf16,masters=fp32 or apex:O5, which compute in the same types"
            )
        assembly = assemble_run(recipe, task, precision, device, is_twin=is_twin)
        at_assembly(assembly)
        loop = build_training_loop(recipe, assembly, precision, drain_every=drain_every)
        for epoch in range(recipe.epochs) if epochs is None else epochs:
            batches = task.data.train_batches(
                epoch, recipe.batch_size, device=device, workers=config.workers, pin_memory=config.pin_memory
            )
            for _ in loop.run(batches_of(precision, batches), epoch=epoch):
                pass

    return train
