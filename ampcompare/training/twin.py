"""A twin: the same training from weights changed by one part in 512, as much as bf16 rounds.

A 16-bit weight that such a change leaves as it is, as it does each one of bf16, changes by one unit in its last place.
How far it ends from the training itself is the least difference that this training can tell.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

PART = 2.0**-9


@torch.no_grad()
def perturb_weights(weights: Iterable[Tensor], generator: torch.Generator | None = None) -> None:
    """Change each number by one part in 512, or a 16-bit one at least to the next of its type, at random, in place.

    Args:
        weights: those that are not floating stay as they are.
        generator: of the signs; None for one of its own with seed 0, so that those of the training are not used.
    """
    generator = generator or torch.Generator().manual_seed(0)
    for weight in weights:
        if weight.is_floating_point():
            signs = torch.randint(0, 2, weight.shape, generator=generator).to(weight.device) * 2 - 1
            changed = weight + (weight.float() * PART * signs).to(weight.dtype)
            if weight.element_size() == 2:
                neighbors = (weight.view(torch.int16) + signs.to(torch.int16)).view(weight.dtype)
                changed = torch.where((changed == weight) & (weight != 0), neighbors, changed)
                changed = torch.where(changed.isfinite(), changed, weight)
            weight.copy_(changed)


def perturb_weights_given_to_optimizers() -> Callable[[], None]:
    """Change what optimizers get from now on, each tensor once, and return what ends that."""
    original = Optimizer.add_param_group
    generator = torch.Generator().manual_seed(0)
    changed: set[int] = set()

    def add_param_group(self: Optimizer, param_group: dict[str, Any]) -> None:
        original(self, param_group)
        new = [param for param in self.param_groups[-1]["params"] if id(param) not in changed]
        changed.update(map(id, new))
        perturb_weights(new, generator)

    def end() -> None:
        Optimizer.add_param_group = original  # type: ignore[method-assign]

    Optimizer.add_param_group = add_param_group  # type: ignore[method-assign]
    return end
