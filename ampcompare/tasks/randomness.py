"""Random numbers that depend on their purpose, and not on what was drawn before.

Arms draw from the global generators in different ways (dropout, stochastic depth), and data must not depend on that. So
orders and augmentations come from generators keyed by (purpose, seed, epoch, index). Code that uses the global
generators (transforms, users' data sets) runs between a save and a restore of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator

import numpy as np
import torch

__all__ = ["derive", "generator", "isolated_globals", "seed_globals"]


def derive(purpose: str, *key: int) -> int:
    """Hash `purpose` and `key` to a seed of 63 bits, the same on every machine and Python."""
    text = ":".join([purpose, *map(str, key)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(purpose: str, *key: int) -> torch.Generator:
    """Return a generator on the CPU seeded by `derive`."""
    return torch.Generator().manual_seed(derive(purpose, *key))


def seed_globals(seed: int) -> None:
    """Seed the global generators of torch (CPU), numpy and `random`; for data, use it inside `isolated_globals`."""
    # torch.manual_seed would seed the devices as well, or defer that until CUDA is initialized.
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


@contextlib.contextmanager
def isolated_globals() -> Iterator[None]:
    """Restore the global generators of torch (CPU), numpy and `random` on exit, also after an error."""
    states = torch.default_generator.get_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.default_generator.set_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
