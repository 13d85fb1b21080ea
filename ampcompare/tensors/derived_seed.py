"""Seeds that depend on their purpose and on numbers, and not on what was drawn before."""

from __future__ import annotations

import hashlib

__all__ = ["derive"]


def derive(purpose: str, *key: int) -> int:
    """Hash `purpose` and `key` to a seed of 63 bits, the same on every machine and Python.

    Every bit depends on all of `key`: torch's generator for CPUs uses the lower 32 bits of a seed and drops the others.
    """
    text = ":".join([purpose, *map(str, key)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
