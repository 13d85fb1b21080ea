"""Add an offset to a seed, in the form and the range that each kind of generator takes."""

import hashlib
import operator
from typing import Any

import numpy as np

TORCH_SEEDS = 2**64
NUMPY_SEEDS = 2**32  # of the older generators, as numpy.random.seed; others take any number


def shifted_torch_seed(seed: Any, offset: int) -> int:
    """Return a seed for a generator of torch, which takes from -2**63 to 2**64 - 1: beyond, it begins again at 0."""
    return (int(seed) + offset) % TORCH_SEEDS


def shifted_numpy_seed(seed: Any, offset: int, seeds: int | None = NUMPY_SEEDS) -> Any:
    """Return a number, or several of them, of which the first is changed, for a generator of NumPy.

    Args:
        seeds: how many there are, from 0; None: without a limit.
    """
    try:
        return _number_folded_into_range(operator.index(seed) + offset, seeds)
    except TypeError:
        words = [int(word) for word in np.asarray(seed).ravel()]
    return [_number_folded_into_range(words[0] + offset, seeds), *words[1:]] if words else seed


def _number_folded_into_range(number: int, seeds: int | None) -> int:
    return number if seeds is None else number % seeds


def shifted_python_seed(seed: Any, offset: int) -> int:
    """Return a seed for a generator of Python: a text becomes a number as `random.seed` makes it one, a float its hash.

    The sign of a number has no effect there.
    """
    if isinstance(seed, int):
        return abs(seed) + offset
    if isinstance(seed, str):
        seed = seed.encode()
    if isinstance(seed, bytes | bytearray):
        return int.from_bytes(bytes(seed) + hashlib.sha512(seed).digest(), "big") + offset
    return abs(hash(seed)) + offset
