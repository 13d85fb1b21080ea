"""Bytes that an arm holds per parameter."""

from __future__ import annotations

from dataclasses import dataclass

from ampcompare.adapters import expected
from ampcompare.arm import Arm
from ampcompare.explain.levels import apex_level

__all__ = ["OPTIMIZER_TENSORS", "PerParameter", "bytes_per_parameter"]

# Tensors of the size of the parameter that an optimizer keeps.
OPTIMIZER_TENSORS = {"sgd with momentum": 1, "adam": 2}


@dataclass(frozen=True)
class PerParameter:
    """Bytes for one parameter that is not of a batch norm, by what they hold.

    Attributes:
        cast: 16-bit copies that are kept from the forward pass to the end of the backward pass, of the weights that
            take part in products.
        state: of one tensor of the optimizer.
    """

    weight: int
    gradient: int
    master: int
    master_gradient: int
    cast: int
    state: int

    def total(self, tensors: int) -> int:
        """Return all of it, with an optimizer that keeps so many tensors per parameter."""
        return self.weight + self.gradient + self.master + self.master_gradient + self.cast + tensors * self.state


def bytes_per_parameter(arm: Arm) -> PerParameter | None:
    """Return what `arm` holds per parameter; None for a backend of another package."""
    twin = expected(arm, "cuda")
    if twin is not None and twin.arm is not None:
        return bytes_per_parameter(Arm.parse(twin.arm))
    if arm.backend == "fp32":
        return PerParameter(4, 4, 0, 0, 0, 4)
    if arm.backend == "native":
        return PerParameter(4, 4, 0, 0, 2, 4)
    if arm.backend == "half" and arm.options.get("master_weights"):
        return PerParameter(2, 2, 4, 4, 0, 4)
    if arm.backend == "half":
        return PerParameter(2, 2, 0, 0, 0, 2)
    if arm.backend != "apex":
        return None
    level = apex_level(arm.options)
    if not level.is_half:
        return PerParameter(4, 4, 0, 0, 2 if level.patch_torch_functions else 0, 4)
    if level.master_weights:
        return PerParameter(2, 2, 4, 4, 0, 4)
    return PerParameter(2, 2, 0, 0, 0, 2)
