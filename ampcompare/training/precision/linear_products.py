"""The three products of a linear layer, each in a format of its own: both operands rounded, summed in fp32.

fprop `y = x w'` sums over input features, dgrad `dx = dy w` over output features, wgrad `dw = dy' x` over rows. Blocks
lie along what is summed, so each tensor is rounded once for each product that it is in, always from bf16. The result is
rounded to bf16 once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ampcompare.backends.roles import ProductFormat
from ampcompare.base.formats import FORMATS, Element, Format
from ampcompare.base.tensors.products import LinearProduct, hide_operations, watching_modes
from ampcompare.training.precision.shared_scales import (
    Rounded,
    hadamard_matrix,
    join_tiles,
    round_matrix,
    scale_ends,
    transform,
)

ELEMENTS = {form.element.name: form.element for form in FORMATS.values()} | {
    form.gradients.name: form.gradients for form in FORMATS.values()
}
ROLES = ("fprop", "dgrad", "wgrad")
Generator = Callable[[torch.device], torch.Generator]


@dataclass(frozen=True)
class ProductRounding:
    """How the operands of a product are rounded."""

    name: str
    form: Format
    scale: str
    gradients: Element
    stochastic: bool
    transformed: bool
    tiles: bool

    @classmethod
    def make(cls, declared: ProductFormat) -> ProductRounding | None:
        """Return what an arm declares of a product; None for bf16."""
        if declared.format == "bf16":
            return None
        form = FORMATS[declared.format]
        as_named = [switch.partition("=")[2] for switch in declared.switches if switch.startswith("grads_as=")]
        return cls(
            name=declared.format,
            form=form,
            scale=declared.scale,
            gradients=ELEMENTS[as_named[0]] if as_named else form.element,
            stochastic="sr" in declared.switches,
            transformed="rht" in declared.switches,
            tiles=bool(form.tiles) or "tiles" in declared.switches,
        )

    def text(self, role: str) -> str:
        """Return how the operands of a product are rounded, as the roles of an arm write it."""
        words = {"sr": self.stochastic, "rht": self.transformed, "tiles": self.tiles and not self.form.tiles}
        switches = [word for word, is_on in words.items() if is_on]
        if role != "fprop" and self.gradients != self.form.element:
            switches.append(f"grads_as={self.gradients.name}")
        return str(ProductFormat(self.name, self.scale, tuple(switches)))

    @property
    def has_tensor_scale(self) -> bool:
        """Whether a scale of the whole operand multiplies the result."""
        return self.form.shares == "tensor" or self.scale in ("te", "torchao")


BF16: dict[str, ProductRounding | None] = dict.fromkeys(ROLES)


@dataclass
class LayerFormats:
    """The formats of one layer's products."""

    name: str
    roundings: dict[str, ProductRounding | None]
    generator: Generator


class LinearProducts(torch.autograd.Function):
    """A linear layer without its bias: `apply(input (rows, in), weight (out, in), LayerFormats)` in bf16."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, layer: LayerFormats) -> Tensor:
        return multiply(layer, "fprop", x, weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, weight, ctx.layer = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        dx = multiply(ctx.layer, "dgrad", dy, weight.t()).to(x.dtype) if needs_x else None
        dw = multiply(ctx.layer, "wgrad", dy.t(), x.t()).to(weight.dtype) if needs_weight else None
        return dx, dw, None


def multiply(layer: LayerFormats, role: str, left: Tensor, right: Tensor) -> Tensor:
    """Return `left (rows, n) @ right (columns, n)'` in bf16, by the format of a role; gradients are `left`."""
    with torch.autocast(left.device.type, enabled=False):
        if modes := watching_modes():
            with hide_operations(modes):
                result, seen = _multiply_watched(layer, role, left, right)
            for mode in modes:
                mode.see_linear(seen)
            return result
        return _multiply(layer, role, left, right)[0]


def _multiply(
    layer: LayerFormats, role: str, left: Tensor, right: Tensor, *, keeps: bool = False
) -> tuple[Tensor, list[tuple[Tensor, Any]]]:
    """Return the product, and what each operand was and how it was rounded, whose grid is lost unless it `keeps` it."""
    rounding = layer.roundings[role]
    parts = [
        _operand(layer, rounding, role, one, is_left=is_left, keeps=keeps)
        for one, is_left in ((left, True), (right, False))
    ]
    (a, _, up), (b, _, down) = parts
    product = a @ b.t()
    if rounding is not None and rounding.has_tensor_scale:
        product.mul_(up * down)
    return product.bfloat16(), [(matrix, rounded) for (_, (matrix, rounded), _) in parts]


def _operand(
    layer: LayerFormats, rounding: ProductRounding | None, role: str, x: Tensor, *, is_left: bool, keeps: bool
) -> tuple[Tensor, tuple[Tensor, Rounded | None], Tensor | float]:
    """Return the numbers to multiply, what they were before and how they were rounded, and a factor of the result."""
    matrix = x.float() if x.dtype is torch.bfloat16 else x.bfloat16().float()
    if rounding is None:
        return matrix, (matrix, None), 1.0
    if rounding.transformed:
        matrix = transform(matrix, hadamard_matrix(x.device))
    is_gradient = is_left and role != "fprop"
    rounded = round_matrix(
        matrix,
        rounding.form,
        rounding.gradients if is_gradient else rounding.form.element,
        rounding.scale,
        square=rounding.tiles and not is_left and role != "wgrad",
        generator=layer.generator(x.device) if rounding.stochastic and is_gradient else None,
    )
    scaled = rounded.grid * rounded.tile if keeps else rounded.grid.mul_(rounded.tile)
    values = join_tiles(scaled)[: len(matrix), : matrix.shape[1]]
    return values, (matrix, rounded), rounded.whole


def _multiply_watched(layer: LayerFormats, role: str, left: Tensor, right: Tensor) -> tuple[Tensor, LinearProduct]:
    rounding = layer.roundings[role]
    result, operands = _multiply(layer, role, left, right, keeps=True)
    figures = is_lost = None
    if rounding is not None:
        elements = (rounding.gradients if role != "fprop" else rounding.form.element, rounding.form.element)
        figures = sum_figures(
            [_figures(m, r, rounding, element) for (m, r), element in zip(operands, elements, strict=True)]
        )
    if role != "fprop":
        exact = left.bfloat16().float() @ right.bfloat16().float().t()
        is_lost = ~result.any() & exact.bfloat16().any()
    flops = 2 * left.shape[0] * left.shape[1] * right.shape[0]
    name, text = ("bf16", "bf16") if rounding is None else (rounding.name, rounding.text(role))
    return result, LinearProduct(layer.name, role, name, text, flops, figures, is_lost)


def sum_figures(figures: list[Tensor]) -> Tensor:
    """Return the sum of the figures of several operands."""
    return torch.stack(figures).sum(0)


def _figures(matrix: Tensor, rounded: Rounded, rounding: ProductRounding, element: Element) -> Tensor:
    """Return the figures of `LinearProduct` of one operand."""
    values = join_tiles(rounded.grid * rounded.tile)[: len(matrix), : matrix.shape[1]].double() * rounded.whole.double()
    ends = scale_ends(rounded, rounding.form, element, rounding.scale)
    error = (values - matrix.double()).square().sum()
    counts = (
        torch.tensor(matrix.numel(), device=matrix.device),
        (rounded.unrounded.abs() >= element.end).sum(),
        ((rounded.grid == 0) & (rounded.unrounded != 0)).sum(),
        torch.tensor(ends.numel(), device=matrix.device),
        ends.sum(),
        error,
        matrix.double().square().sum(),
    )
    return torch.stack([one.double() for one in counts])
