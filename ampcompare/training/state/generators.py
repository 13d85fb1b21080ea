"""The states of all global random generators of a process, and whether a saved state can be restored."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ampcompare.base.errors import CheckpointError
from ampcompare.tensors.accelerator import random_state, set_random_state

__all__ = ["kept_random_states", "random_states", "require_random_states", "set_random_states"]

WORDS = 624
"""Length of the state of a Mersenne Twister, in words of 32 bits."""
SIZES = ((16,), (44,))
"""Shapes of the state of a GPU: seed and offset; under Metal the state of a Philox generator and a seed."""


def random_states(devices: Sequence[torch.device]) -> dict[str, Any]:
    """Return the states of all global generators of this process, including those of `devices`."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": [random_state(device) for device in devices],  # or of another accelerator
        "python": random.getstate(),
        "numpy": [str(name), torch.from_numpy(np.asarray(keys, np.int64)), int(position), int(has_gauss), float(gauss)],
    }


def set_random_states(states: Mapping[str, Any], devices: Sequence[torch.device]) -> None:
    """Set all global generators to what `random_states` returned."""
    torch.set_rng_state(states["torch"].cpu())
    for device, state in zip(devices, states["cuda"], strict=False):
        set_random_state(state.cpu(), device)
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(_of_numpy(states["numpy"]))


@contextmanager
def kept_random_states(devices: Sequence[torch.device]) -> Iterator[None]:
    """Leave all global generators on exit as they were on entry."""
    states = random_states(devices)
    try:
        yield
    finally:
        set_random_states(states, devices)


def require_random_states(states: Any, path: str) -> None:
    """Check that states can be restored, by restoring them into generators that are used for nothing else.

    Args:
        path: of the states in the checkpoint, for the message.

    Raises:
        CheckpointError: names the generator whose state is not valid.
    """
    if not isinstance(states, dict):
        raise CheckpointError(f"{path} is a {type(states).__name__}, and holds the states of random generators")
    for name, test in (("torch", _try_torch), ("cuda", _try_cuda), ("python", _try_python), ("numpy", _try_numpy)):
        if name not in states:
            raise CheckpointError(f"{path} has no state of the generator of {name}")
        try:
            test(states[name])
        except (TypeError, ValueError, OverflowError, RuntimeError, IndexError) as error:
            raise CheckpointError(f"{path}.{name} is not a state of a random generator: {_line(error)}") from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:120]


def _try_torch(state: Any) -> None:
    if not isinstance(state, Tensor):
        raise TypeError(f"it is a {type(state).__name__}")
    torch.Generator().set_state(state.cpu())


def _try_cuda(states: Any) -> None:
    if not isinstance(states, list):
        raise TypeError(f"it is a {type(states).__name__}")
    for state in states:
        if not isinstance(state, Tensor) or state.dtype is not torch.uint8 or state.shape not in SIZES:
            raise ValueError("a GPU's has 16 bytes, or 44 under Metal")
        if torch.cuda.is_available():
            torch.Generator("cuda").set_state(state.cpu())


def _try_python(state: Any) -> None:
    version, internal, gauss = state
    _require_words(internal[:-1])
    if type(gauss) not in (float, type(None)):
        raise TypeError(f"its cached number is a {type(gauss).__name__}")
    random.Random().setstate((version, tuple(internal), gauss))


def _try_numpy(state: Any) -> None:
    _, keys, position, has_gauss, gauss = state
    if not isinstance(keys, Tensor) or keys.dtype is not torch.int64 or keys.dim() != 1:
        raise TypeError("its words are not a tensor of int64")
    _require_words(keys.tolist())
    if type(position) is not int or not 0 <= position <= WORDS:
        raise ValueError(f"its position is {position}")
    if type(has_gauss) is not int or has_gauss not in (0, 1) or type(gauss) is not float:
        raise ValueError("its cached number is not valid")
    np.random.RandomState().set_state(_of_numpy(state))


def _require_words(words: Any) -> None:
    if len(words) != WORDS or not all(type(word) is int and 0 <= word < 1 << 32 for word in words):
        raise ValueError(f"it has not {WORDS} words of 32 bits")


def _of_numpy(state: Any) -> tuple[Any, ...]:
    name, keys, position, has_gauss, cached = state
    return (name, keys.cpu().numpy().astype(np.uint32), position, has_gauss, cached)
