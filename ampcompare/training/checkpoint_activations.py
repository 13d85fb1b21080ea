"""Activations that are computed again in the backward pass, instead of being kept: less memory for more time."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from torch import nn
from torch.utils.checkpoint import checkpoint

from ampcompare.base.errors import UnsupportedCombination
from ampcompare.tasks.task import Task

__all__ = ["checkpoint_activations"]


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
