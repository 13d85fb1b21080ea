"""Round fp32 values to bfloat16 up or down at random, so that the mean of many roundings is the value."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, distributed

from ampcompare.base.environment.ranks import has_other_ranks
from ampcompare.training.precision.device_generators import DeviceGenerators

LOW_BITS = 16  # of an fp32 number, which its bfloat16 lacks


def seed_of_step(purpose: str, seed: int, step: int) -> int:
    """Hash to a seed of 63 bits, the same on every machine.

    Every bit depends on `seed` and on `step`: torch's generator for CPUs uses the lower 32 bits and drops the others.
    """
    return (
        int.from_bytes(hashlib.blake2b(f"{purpose}:{seed}:{step}".encode(), digest_size=8).digest(), "little")
        >> 1
    )


def round_stochastically(value: Tensor, generator: torch.Generator) -> Tensor:
    """Return fp32 values in bfloat16, each rounded up or down with the probability that keeps its mean.

    A number between two of bfloat16 becomes the upper one with the probability of its distance from the lower one, in
    units of their gap. The bits that bfloat16 lacks count that distance: a random 16-bit number is added to them, and
    the carry decides. Numbers that bfloat16 has, infinities and NaN stay what they are.
    """
    noise = torch.randint(
        0, 1 << LOW_BITS, value.shape, dtype=torch.int32, device=value.device, generator=generator
    )
    bits = value.contiguous().view(torch.int32)
    rounded = ((bits + noise) >> LOW_BITS << LOW_BITS).view(torch.float32).reshape(value.shape)
    return torch.where(value.isfinite(), rounded, value).to(torch.bfloat16)


class StochasticRounding:
    """Rounds lists of weights with its own generators, so that dropout draws the same numbers as without it.

    Ranks of the default process group round alike, whatever their own seeds: the first call takes the state of rank 0,
    which is `seed` and `rounds`.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rounds = 0
        self._generators = DeviceGenerators()
        self._agreed = False

    def round_into(self, targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Round each fp32 value into its bfloat16 target."""
        if not self._agreed and targets:
            self._take_seed_of_rank0(targets[0].device)
        self.rounds += 1
        seed = seed_of_step("stochastic rounding", self.seed, self.rounds)
        self._generators.begin_step(seed)
        for target, value in zip(targets, values, strict=True):
            generator = self._generators.generator_of(target.device, seed)
            target.copy_(round_stochastically(value, generator))

    def _take_seed_of_rank0(self, device: torch.device) -> None:
        """Take seed and count of rank 0: weights that are rounded apart would drift apart under equal gradients."""
        self._agreed = True
        if has_other_ranks():
            of_first = torch.tensor([self.seed, self.rounds], device=device)
            distributed.broadcast(of_first, src=0)
            self.seed, self.rounds = of_first.tolist()
