"""The three products of a linear layer, each in a format of its own: both operands rounded, summed in fp32.

fprop `y = x w'` sums over input features, dgrad `dx = dy w` over output features, wgrad `dw = dy' x` over rows. Blocks
lie along what is summed, so each tensor is rounded once for each product that it is in, always from bf16. The result is
rounded to bf16 once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ampcompare.backends.roles import ProductFormat
from ampcompare.base.formats import FORMATS, BlockFormat, ElementFormat
from ampcompare.base.tensors.products import (
    EmulatedLinearProduct,
    OperationMode,
    hide_operations,
    modes_that_see_operations,
)
from ampcompare.training.precision.cpu_half import EmulatedHalf
from ampcompare.training.precision.shared_scales import (
    hadamard_matrix,
    mask_of_tiles_with_scale_at_limit,
    multiply_by_hadamard,
    round_matrix,
    rounded_values_and_matrix_scale,
)
from ampcompare.training.precision.torchao_products import TorchaoProducts

ELEMENTS = {form.element.name: form.element for form in FORMATS.values()} | {
    form.gradients.name: form.gradients for form in FORMATS.values()
}
ROLES = ("fprop", "dgrad", "wgrad")
MULTIPLYING = (nn.Linear, nn.modules.conv._ConvNd, nn.MultiheadAttention, nn.RNNBase, nn.Bilinear)
Generator = Callable[[torch.device], torch.Generator]


@dataclass(frozen=True)
class ProductRounding:
    """How the operands of a product are rounded."""

    name: str
    form: BlockFormat
    scale: str
    gradients: ElementFormat
    stochastic: bool
    transformed: bool
    tiles: bool

    @classmethod
    def make_from_declared(cls, declared: ProductFormat) -> ProductRounding | None:
        """Return what an arm declares of a product; None for bf16."""
        if declared.format == "bf16":
            return None
        form = FORMATS[declared.format]
        as_named = [
            switch.partition("=")[2] for switch in declared.switches if switch.startswith("grads_as=")
        ]
        return cls(
            name=declared.format,
            form=form,
            scale=declared.scale,
            gradients=ELEMENTS[as_named[0]] if as_named else form.element,
            stochastic="sr" in declared.switches,
            transformed="rht" in declared.switches,
            tiles=bool(form.tiles) or "tiles" in declared.switches,
        )

    def rounding_text(self, role: str) -> str:
        """Return how the operands of a product are rounded, as the roles of an arm write it."""
        words = {"sr": self.stochastic, "rht": self.transformed, "tiles": self.tiles and not self.form.tiles}
        switches = [word for word, is_on in words.items() if is_on]
        if role != "fprop" and self.gradients != self.form.element:
            switches.append(f"grads_as={self.gradients.name}")
        return str(ProductFormat(self.name, self.scale, tuple(switches)))

    def element_of_operand(self, role: str, *, is_left: bool) -> ElementFormat:
        """Return what an operand is rounded to: gradients are left in dgrad and wgrad."""
        return self.gradients if is_left and role != "fprop" else self.form.element

    def is_scaled_in_squares(self, role: str, *, is_left: bool) -> bool:
        """Return whether numbers of an operand share scales in squares: weights may."""
        return self.tiles and not is_left and role != "wgrad"

    def shares_weight_tiles(self, other: ProductRounding | None) -> bool:
        """Return whether fprop and dgrad multiply the same numbers of a weight."""
        return (
            other is not None
            and self.tiles
            and other.tiles
            and (self.name, self.scale) == (other.name, other.scale)
        )

    @property
    def has_tensor_scale(self) -> bool:
        """Whether a scale of the whole operand multiplies the result."""
        return self.form.shares == "tensor" or self.scale in ("te", "torchao")


BF16: dict[str, ProductRounding | None] = dict.fromkeys(ROLES)


@dataclass
class LayerFormats:
    """The formats of one layer's products in one pass.

    Attributes:
        engine: multiplies in place of the emulation, and is compared with it where it `is_compared`.
        squares: what fprop multiplied of a weight in squares, and its scale: dgrad multiplies the same.
    """

    name: str
    roundings: dict[str, ProductRounding | None]
    generator: Generator
    engine: TorchaoProducts | None = None
    is_compared: bool = False
    squares: tuple[Tensor, Tensor | float] | None = None


class LinearProductsFunction(torch.autograd.Function):
    """A linear layer without its bias: `apply(input (rows, in), weight (out, in), LayerFormats)`, all in bf16."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, layer: LayerFormats) -> Tensor:
        return multiply_by_format(layer, "fprop", x, weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, weight, ctx.layer = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        dx = multiply_by_format(ctx.layer, "dgrad", dy, weight.t()) if needs_x else None
        dw = multiply_by_format(ctx.layer, "wgrad", dy.t(), x.t()) if needs_weight else None
        return dx, dw, None


def multiply_by_format(layer: LayerFormats, role: str, left: Tensor, right: Tensor) -> Tensor:
    """Return `left (rows, n) @ right (columns, n)'` in bf16, by the format of a role; gradients are `left`."""
    with torch.autocast(left.device.type, enabled=False):
        if modes := modes_that_see_operations():
            with hide_operations(modes):
                result, seen = _product_and_rounding_figures(layer, role, left, right)
            for mode in modes:
                mode.see_linear_product(seen)
            return result
        if layer.engine is not None and layer.roundings[role] is not None and not layer.is_compared:
            return layer.engine.multiply(left, right)
        with _without_own_modes(left, right) if layer.engine is None else nullcontext():
            return _product_and_operands(layer, role, left, right)[0]


def _without_own_modes(*operands: Tensor) -> AbstractContextManager[Any]:
    """Keep operations from ampcompare's own modes, which nothing in fp32 needs and which cost as much as it."""
    modes = _get_current_dispatch_mode_stack()
    is_own = all(isinstance(mode, (EmulatedHalf, OperationMode)) for mode in modes)
    if not modes or not is_own or any(type(one) not in (Tensor, nn.Parameter) for one in operands):
        return nullcontext()
    return torch._C._DisableTorchDispatch()


@dataclass(frozen=True)
class _OperandWithRounding:
    """A matrix (rows, what is summed) in fp32, what of it is multiplied, and a factor of the result."""

    matrix: Tensor
    values: Tensor
    whole: Tensor | float


def _product_and_operands(
    layer: LayerFormats, role: str, left: Tensor, right: Tensor, *, keeps: bool = False
) -> tuple[Tensor, list[_OperandWithRounding]]:
    """Return the product and its operands, which are whole where it `keeps` them; none in bf16."""
    rounding = layer.roundings[role]
    if rounding is None:
        return (left.float() @ right.float().t()).bfloat16(), []
    shares = rounding.shares_weight_tiles(layer.roundings["dgrad" if role == "fprop" else "fprop"])
    if shares and role == "dgrad" and layer.squares is not None and not keeps:
        values, whole = layer.squares
        b = _OperandWithRounding(values.t(), values.t(), whole)
    else:
        b = _transform_and_round_operand(layer, rounding, role, right, is_left=False)
        if shares and role == "fprop":
            layer.squares = b.values, b.whole
    a = _transform_and_round_operand(layer, rounding, role, left, is_left=True)
    product = a.values @ b.values.t()
    if rounding.has_tensor_scale:
        product.mul_(a.whole * b.whole)
    result = product.bfloat16()
    if layer.engine is not None:
        emulated, result = result, layer.engine.multiply(left, right)
        if layer.is_compared:
            layer.engine.count_differing_results(result, emulated)
    return result, [a, b]


def _transform_and_round_operand(
    layer: LayerFormats, rounding: ProductRounding, role: str, x: Tensor, *, is_left: bool
) -> _OperandWithRounding:
    matrix = x.float()
    if rounding.transformed:
        matrix = multiply_by_hadamard(matrix, hadamard_matrix(x.device))
    values, whole = rounded_values_and_matrix_scale(
        matrix,
        rounding.form,
        rounding.element_of_operand(role, is_left=is_left),
        rounding.scale,
        square=rounding.is_scaled_in_squares(role, is_left=is_left),
        generator=layer.generator(x.device) if rounding.stochastic and is_left and role != "fprop" else None,
    )
    return _OperandWithRounding(matrix, values, whole)


def _product_and_rounding_figures(
    layer: LayerFormats, role: str, left: Tensor, right: Tensor
) -> tuple[Tensor, EmulatedLinearProduct]:
    rounding = layer.roundings[role]
    result, operands = _product_and_operands(layer, role, left, right, keeps=True)
    figures = is_lost = None
    if rounding is not None:
        a, b = operands
        figures = sum_of_rounding_figures(
            [
                _rounding_error_figures_of_operand(a, rounding, role, is_left=True),
                _rounding_error_figures_of_operand(b, rounding, role, is_left=False),
            ]
        )
    if role != "fprop":
        exact = left.float() @ right.float().t()
        is_lost = ~result.any() & exact.bfloat16().any()
    flops = 2 * left.shape[0] * left.shape[1] * right.shape[0]
    name, text = ("bf16", "bf16") if rounding is None else (rounding.name, rounding.rounding_text(role))
    return result, EmulatedLinearProduct(layer.name, role, name, text, flops, figures, is_lost)


def sum_of_rounding_figures(figures: list[Tensor]) -> Tensor:
    """Return the sum of the figures of several operands."""
    return torch.stack(figures).sum(0)


def _rounding_error_figures_of_operand(
    operand: _OperandWithRounding, rounding: ProductRounding, role: str, *, is_left: bool
) -> Tensor:
    """Return the figures of `EmulatedLinearProduct` of one operand."""
    matrix, element = operand.matrix, rounding.element_of_operand(role, is_left=is_left)
    square = rounding.is_scaled_in_squares(role, is_left=is_left)
    nearest = round_matrix(matrix, rounding.form, element, rounding.scale, square=square)
    ends = mask_of_tiles_with_scale_at_limit(nearest, rounding.form, element, rounding.scale)
    exact = matrix.double()
    counts = (
        torch.tensor(matrix.numel(), device=matrix.device),
        (nearest.unrounded.abs() >= element.saturation_magnitude).sum(),
        ((operand.values == 0) & (matrix != 0)).sum(),
        torch.tensor(ends.numel(), device=matrix.device),
        ends.sum(),
        (operand.values.double() * operand.whole - exact).square().sum(),
        exact.square().sum(),
    )
    return torch.stack([one.double() for one in counts])
