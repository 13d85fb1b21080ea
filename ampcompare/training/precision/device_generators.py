"""Random generators of roundings, one for each device, apart from torch's own."""

from __future__ import annotations

import torch


class DeviceGenerators:
    """A generator for each device, so that dropout draws the same numbers as without what rounds at random.

    All of them begin a step with one seed.
    """

    def __init__(self) -> None:
        self._generators: dict[torch.device, torch.Generator] = {}

    def begin_step(self, seed: int) -> None:
        """Seed all generators that there are."""
        for generator in self._generators.values():
            generator.manual_seed(seed)

    def generator_of(self, device: torch.device, seed: int) -> torch.Generator:
        """Return the generator of a device, where it stands in this step.

        Args:
            device: of the numbers that are drawn.
            seed: of this step, which a generator that is made here begins with.
        """
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(seed)
        return self._generators[device]
