"""How far results may be from fp32: a given number, or what rounding alone explains."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ampcompare.diagnosis.faults import HARM, HARM_IN_BF16, NEGLIGIBLE

__all__ = ["errors_of", "rounding_unit", "tolerances"]

FACTOR = 4.0  # times the largest deviation that one rounding of each weight and each module's result makes
FLOOR = 8.0  # roundings at least
LEAST = 1e-6  # share of the largest gradient below which one counts as zero
GRADIENT = "gradient of "


def rounding_unit(half: torch.dtype | None) -> float:
    """Return the largest relative error of one rounding to a type; that of fp32 for none."""
    return torch.finfo(torch.float32 if half is None else half).eps / 2


def errors_of(figures: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the norm of the difference of each figure, relative to its norm in the reference.

    A gradient that is small within its module is measured against a tenth of the largest there: what sums that cancel
    leave is noise in any precision. A figure that is missing, not finite, or has another shape is infinitely far.
    """
    sizes = {name: _rms(value) for name, value in reference.items()}
    gradients = {name: size for name, size in sizes.items() if name.startswith(GRADIENT)}
    least = LEAST * max(gradients.values(), default=0.0)
    errors = {}
    for name, exact in reference.items():
        size = sizes[name]
        if name in gradients:
            siblings = (other for of, other in gradients.items() if _module(of) == _module(name))
            size = max(size, NEGLIGIBLE * max(siblings), least)
        value = figures.get(name)
        errors[name] = math.inf if value is None or value.shape != exact.shape else _ratio(_rms(value - exact), size)
    return errors


def tolerances(
    rounded: Iterable[Mapping[str, Tensor]], reference: Mapping[str, Tensor], half: torch.dtype | None
) -> dict[str, float]:
    """Return the tolerance of each figure under "auto".

    Args:
        rounded: figures of fp32 runs with `Rounding`, each of another seed.
        half: 16-bit type of the arm.

    An error of half the size, or nine tenths in bf16, is never within it: there `diagnose` calls a gradient wrong.
    """
    found: Sequence[dict[str, float]] = [errors_of(figures, reference) for figures in rounded]
    most = HARM_IN_BF16 if half is torch.bfloat16 else HARM
    unit = rounding_unit(half)
    return {name: min(most, FLOOR * unit + FACTOR * max(one[name] for one in found)) for name in reference}


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _rms(value: Tensor) -> float:
    return float(value.double().square().mean().sqrt()) if value.numel() else 0.0


def _ratio(difference: float, size: float) -> float:
    if not math.isfinite(difference):
        return math.inf
    return difference / size if size else (math.inf if difference else 0.0)
