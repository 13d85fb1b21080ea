"""Number formats of matrix products in 8 and 4 bits, as data: the elements, and which of them share a scale."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ElementFormat:
    """A floating-point type of few bits, whose largest numbers are finite.

    Attributes:
        fraction: its explicit bits of fraction.
        least, greatest: exponents of its smallest and its largest normal number.
        largest: its largest number.
    """

    name: str
    fraction: int
    least: int
    greatest: int
    largest: float

    @property
    def saturation_magnitude(self) -> float:
        """The magnitude from which numbers are cut off: half a step above the largest."""
        return float(self.largest + 2.0 ** (self.greatest - self.fraction - 1))


E4M3 = ElementFormat("e4m3", 3, -6, 8, 448.0)
E5M2 = ElementFormat("e5m2", 2, -14, 15, 57344.0)
E2M1 = ElementFormat("e2m1", 1, 0, 2, 6.0)


@dataclass(frozen=True)
class BlockFormat:
    """Which numbers of an operand share a scale, along the dimension that a product sums over.

    Attributes:
        element: of inputs and weights.
        gradients: element of gradients, unless an option names another one.
        block: how many numbers share a scale; 0 for a whole row.
        shares: "tensor", "row" or "block".
        scales: names of the ways to make a scale, the default first.
        tiles: whether weights share scales in squares, in any case; None where that is an option.
    """

    element: ElementFormat
    gradients: ElementFormat
    block: int
    shares: str
    scales: tuple[str, ...]
    tiles: bool | None


FP32_SCALES = ("fp32", "pow2")  # 448 / max, or the power of two below it
E8M0_SCALES = ("rceil", "floor", "even")

FORMATS = {
    "fp8_tensorwise": BlockFormat(E4M3, E5M2, 0, "tensor", FP32_SCALES, False),
    "fp8_rowwise": BlockFormat(E4M3, E4M3, 0, "row", FP32_SCALES[::-1], False),
    "fp8_blockwise": BlockFormat(E4M3, E4M3, 128, "block", FP32_SCALES, True),
    "mxfp8": BlockFormat(E4M3, E4M3, 32, "block", E8M0_SCALES, None),
    "mxfp4": BlockFormat(E2M1, E2M1, 32, "block", ("floor", "rceil", "even"), None),
    "nvfp4": BlockFormat(E2M1, E2M1, 16, "block", ("te", "torchao"), None),
}
