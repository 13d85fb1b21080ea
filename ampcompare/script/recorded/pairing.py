"""What proves that cells are pairs: a seed before the script starts, and hashes of first weights and batches."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from ampcompare.training.hashes import inputs_sha256, parameters_sha256
from ampcompare.training.precision.base import owned_params

__all__ = ["FirstBatches", "HashedWeights", "seed_all", "weights_of"]

MAX_BATCHES = 3


def seed_all(seed: int) -> None:
    """Seed Python, NumPy if it is installed, and torch on all devices."""
    random.seed(seed)
    torch.manual_seed(seed)
    if importlib.util.find_spec("numpy") is not None:
        import numpy as np

        np.random.seed(seed % 2**32)


class HashedWeights:
    """The parameters of an optimizer, with their hash at the time that this is made.

    Attributes:
        sha256: the hash.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        models: list[Any] = [self]
        self.sha256 = parameters_sha256(models)

    def parameters(self) -> list[Any]:
        """Return the present parameters."""
        return owned_params(self._optimizer)


def weights_of(models: Sequence[Any]) -> str:
    """Return a hash of the parameters of models, before any cast."""
    if len(models) == 1 and isinstance(models[0], HashedWeights):
        return models[0].sha256
    return parameters_sha256(models)


class FirstBatches:
    """Hashes what enters the first module that is called after the start and after each step, a few times.

    Args:
        found: called with the hashes when there are enough.
    """

    def __init__(self, found: Callable[[list[str]], None]) -> None:
        self.hashes: list[str] = []
        self._found = found
        self._awaited = True
        self._hook = register_module_forward_pre_hook(self._enter)

    def stepped(self) -> None:
        """Note the end of a step: the next module that is called gets a new batch."""
        self._awaited = True

    def end(self) -> None:
        """Report what was found, if that was not done yet."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None  # type: ignore[assignment]
            self._found(self.hashes)

    def _enter(self, module: Any, inputs: Any) -> None:
        # Inside of vmap or torch.func.grad tensors have no data that could be read; torch.jit.trace would record it.
        if not self._awaited or not torch.is_grad_enabled() or torch._C._functorch.peek_interpreter_stack() is not None:
            return
        if torch._C._get_tracing_state() is not None:
            return
        digest = inputs_sha256(inputs)
        if digest is None:
            return
        self._awaited = False
        self.hashes.append(digest)
        if len(self.hashes) == MAX_BATCHES:
            self.end()
