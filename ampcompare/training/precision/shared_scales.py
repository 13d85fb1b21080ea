"""Round matrices to elements of 8 and 4 bits with shared scales.

Sources: OCP Microscaling Formats 1.0 (E8M0), arXiv 2509.25149 (NVFP4), TransformerEngine and torchao 0.18. Where they
differ, the name of the scale says which is meant. Above the largest number all saturate here.
"""

from dataclasses import dataclass
from functools import cache, reduce

import torch
from torch import Tensor
from torch.nn import functional as F

from ampcompare.base.formats import E4M3, E8M0_SCALES, FP32_SCALES, BlockFormat, ElementFormat

FP32_MAX = torch.finfo(torch.float32).max
EXPONENT = 0x7F800000  # bits of fp32
BIAS = 127  # of the exponents of fp32, and of E8M0
SMALLEST = 1e-12  # below it torchao takes no largest number for a scale in fp32
HADAMARD = 16  # rows of the matrix
NVFP4_MAX = 448.0 * 6.0  # of a scale times an element
NVFP4_LEAST = 2.0**-6  # torchao's smallest scale of a block
MAGIC = 1.5 * 2.0**23
MIN_BINADE, MAX_BINADE = 2.0**-80, 2.0**80


@dataclass(frozen=True)
class RoundedMatrix:
    """A matrix of numbers `grid * tile * whole`, in tiles.

    Attributes:
        grid: (row tiles, rows, column tiles, columns), fp32 with values of the element.
        tile: the scale of each tile, of shapes that broadcast.
        whole: the scale of the matrix, a scalar.
        unrounded: what became `grid`; it may lie beyond the range of the element.
        largest: the largest magnitude of each tile.
    """

    grid: Tensor
    tile: Tensor
    whole: Tensor
    unrounded: Tensor
    largest: Tensor


def power_of_two_below(x: Tensor) -> Tensor:
    """Return the largest power of two up to each |x| of fp32: 0 for subnormal numbers, inf for inf and NaN."""
    return (x.view(torch.int32) & EXPONENT).view(torch.float32)


def round_to_element(x: Tensor, element: ElementFormat, generator: torch.Generator | None = None) -> Tensor:
    """Round fp32 to the nearest number of an element, ties to even; with a generator at random, up or down.

    Numbers beyond the range saturate, infinities too; NaN stays, and -0 may become 0. At random a number between two of
    the element becomes the upper one with the probability of its distance from the lower one, in 16 bits.
    """
    x = x.clamp(-element.largest, element.largest)
    return _round_to_spacing_from_power(
        x, power_of_two_below(x).clamp_(min=2.0**element.least), element, generator
    )


def _round_to_spacing_from_power(
    x: Tensor, power: Tensor, element: ElementFormat, generator: torch.Generator | None
) -> Tensor:
    """Round numbers to multiples of the steps that the element has from `power` on."""
    if generator is not None:
        words = torch.empty((x.numel() + 3) // 4, dtype=torch.int64, device=x.device)
        words.random_(-(2**63), None, generator=generator)
        noise = words.view(torch.int16)[: x.numel()].view(x.shape).float().add_(0.5)
        x = torch.addcmul(x, noise, power, value=2.0 ** -(16 + element.fraction))
    # Adding so much leaves a multiple of the step, rounded as fp32 rounds sums. The factor is exact.
    factor = MAGIC * 2.0**-element.fraction
    return torch.add(x, power, alpha=factor).sub_(power, alpha=factor)


def _fp32_scale_factor(largest: Tensor, element: ElementFormat) -> Tensor:
    return (element.largest / largest.double().clamp(min=SMALLEST)).float()  # in fp64, as torchao does


def _unclamped_e8m0_exponent(largest: Tensor, element: ElementFormat, scale: str) -> Tensor:
    """Return the exponent of a block's scale, biased and not yet limited to that of E8M0."""
    if scale == "rceil":  # the smallest power of two that leaves no number above the largest of the element
        bits = (largest / element.largest).view(torch.int32)
        return torch.where(bits <= 0x400000, 0, (bits + 0x7FFFFF) >> 23)
    bits = largest.view(torch.int32)
    if scale == "even":  # of the largest number, rounded to the bits of the element
        bits = bits + (1 << (22 - element.fraction))
    return (bits >> 23) - element.greatest


def _scales_of_tiles(
    largest: Tensor, element: ElementFormat, form: BlockFormat, scale: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return from the largest number of each tile the factor of its numbers, its scale, and that of the matrix."""
    one = torch.ones((), device=largest.device)
    if scale in ("fp32", "pow2"):
        factor = _fp32_scale_factor(largest, element)
        factor = power_of_two_below(factor) if scale == "pow2" else factor
        if form.shares == "tensor":
            return factor, one, 1 / factor.view(())
        return factor, 1 / factor, one
    if scale in ("te", "torchao"):
        return _nvfp4_factors_scales_and_whole(largest, scale, one)
    exponent = _unclamped_e8m0_exponent(largest, element, scale).clamp_(0, 2 * BIAS)
    # E8M0 has no 0, and its smallest number is a subnormal one of fp32.
    tile = torch.where(exponent == 0, 2.0**-BIAS, (exponent << 23).view(torch.float32))
    tile = tile.masked_fill_(~torch.isfinite(largest), float("nan"))
    return 1 / tile, tile, one


def _nvfp4_factors_scales_and_whole(
    largest: Tensor, scale: str, one: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    # A tensor above a tensor: torch computes a number above a tensor as its inverse times the number, 1 ulp away.
    whole, top = largest.max(), torch.tensor(NVFP4_MAX, device=largest.device)
    if scale == "te":
        up = torch.where(whole == 0, one, torch.div(top, whole).clamp(max=FP32_MAX))
        sixth = 1 / torch.tensor(6.0, device=largest.device)
        tile = round_to_element((largest * (up * sixth)).clamp(max=FP32_MAX), E4M3)
        return (1 / (tile * (1 / up))).clamp(max=FP32_MAX), tile, 1 / up
    whole = torch.where(whole == 0, one, whole / top)  # torchao's makes NaN of zeros
    tile = round_to_element((largest / 6.0 / whole).clamp(min=NVFP4_LEAST), E4M3)
    return (1 / whole) / tile, tile, whole


def _split_into_tiles(x: Tensor, rows: int, columns: int) -> Tensor:
    """Return a matrix as (row tiles, rows, column tiles, columns), filled up with zeros; 0 is the whole size."""
    rows, columns = rows or x.shape[0], columns or x.shape[1]
    down, right = -x.shape[0] % rows, -x.shape[1] % columns
    x = F.pad(x, (0, right, 0, down)) if down or right else x
    tiles: Tensor = x.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    return tiles


def join_tiles(x: Tensor) -> Tensor:
    """Return the matrix of (row tiles, rows, column tiles, columns)."""
    return x.flatten(2).flatten(0, 1)


def round_matrix(
    x: Tensor,
    form: BlockFormat,
    element: ElementFormat,
    scale: str,
    *,
    square: bool = False,
    generator: torch.Generator | None = None,
) -> RoundedMatrix:
    """Round an fp32 matrix (rows, numbers that a product sums over).

    Args:
        x: the matrix; a transposed view costs no copy.
        form: which numbers share a scale.
        element: to round to.
        scale: how scales are made, one of `form.scales`.
        square: tiles of as many rows as a block has numbers.
        generator: rounds at random.
    """
    tile_rows = form.block if square else 1
    if form.shares == "tensor":
        tile_rows = 0
    blocks = _split_into_tiles(x, tile_rows, form.block)
    largest = blocks.abs().amax((1, 3), keepdim=True)
    factor, tile, whole = _scales_of_tiles(largest, element, form, scale)
    unrounded = blocks * factor
    return RoundedMatrix(round_to_element(unrounded, element, generator), tile, whole, unrounded, largest)


def rounded_values_and_matrix_scale(
    x: Tensor,
    form: BlockFormat,
    element: ElementFormat,
    scale: str,
    *,
    square: bool = False,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor | float]:
    """Return `grid * tile` of what `round_matrix` makes of a matrix, as a matrix, and `whole`, in fewer passes.

    At random it draws in the order of memory.

    Args:
        x: dense fp32, by rows or by columns; it is not changed.
    """
    by_columns = x.stride(0) == 1 and x.stride(1) != 1
    stored = x.t() if by_columns else x.contiguous()
    summed = 0 if by_columns else 1
    over: tuple[int, ...]
    rows, columns = stored.shape
    if form.shares == "block":
        sizes = [form.block if square or dim == summed else 1 for dim in (0, 1)]
        down, right = -rows % sizes[0], -columns % sizes[1]
        tiles = F.pad(stored, (0, right, 0, down)) if down or right else stored
        if square:
            tiles, over = tiles.unflatten(1, (-1, form.block)).unflatten(0, (-1, form.block)), (1, 3)
        else:
            tiles, over = tiles.unflatten(summed, (-1, form.block)), (summed + 1,)
    else:
        tiles, over = stored, (0, 1) if form.shares == "tensor" else (summed,)
    largest = _largest_magnitude(tiles, over)
    rounded = None
    whole: Tensor | float = 1.0
    if scale in E8M0_SCALES:
        rounded = _round_by_powers_of_two(tiles, largest, element, scale, generator)
    if rounded is None:
        factor, tile, whole = _scales_of_tiles(largest, element, form, scale)
        scaled = tiles * factor
        if scale not in FP32_SCALES:  # these leave none beyond the range by more than fp32 rounds
            scaled.clamp_(-element.largest, element.largest)
        power = power_of_two_below(scaled).clamp_(min=2.0**element.least)
        rounded = _round_to_spacing_from_power(scaled, power, element, generator)
        if form.shares != "tensor":
            rounded.mul_(tile)
    if form.shares == "block":
        rounded = join_tiles(rounded) if square else rounded.flatten(summed, summed + 1)
        rounded = rounded[:rows, :columns]
    return rounded.t() if by_columns else rounded, whole


def _largest_magnitude(tiles: Tensor, over: tuple[int, ...]) -> Tensor:
    """Return the largest magnitude over some dimensions, which stay with size 1; NaN where there is one."""
    magnitudes = tiles.abs()
    is_short = over == (tiles.dim() - 1,) and tiles.dim() == 3 and tiles.shape[-1] < _VECTORS
    if is_short and tiles.device.type == "cpu":
        size = tiles.shape[-1]  # torch reduces so few neighbors one by one, and pools them faster
        return torch.max_pool1d(magnitudes.flatten(1).unsqueeze(1), size).view(*tiles.shape[:-1], 1)
    return magnitudes.amax(over, keepdim=True)


# numbers that `amax` takes at once
_VECTORS = 64 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 32


def _round_by_powers_of_two(
    tiles: Tensor, largest: Tensor, element: ElementFormat, scale: str, generator: torch.Generator | None
) -> Tensor | None:
    """Round tiles to an element times powers of two where they are, without a division by these.

    None where a scale would be near an end of the range of fp32, where that is not the same, and away from the CPU,
    where to look would be to wait.
    """
    if tiles.device.type != "cpu" or not tiles.numel():
        return None
    least, most = (float(one) for one in torch.aminmax(largest))
    if least == 0.0 < most:  # tiles of zeros stay zeros in any case
        least = float(torch.where(largest == 0, most, largest).amin())
    if not (most == 0.0 or (least >= MIN_BINADE and most <= MAX_BINADE)):  # NaN is neither
        return None
    if scale == "rceil":
        bits = (largest / element.largest).view(torch.int32)
        tile = power_of_two_below(bits.add_(0x7FFFFF).view(torch.float32))
    elif scale == "even":
        bits = largest.view(torch.int32) + (1 << (22 - element.fraction))
        tile = power_of_two_below(bits.view(torch.float32)).mul_(2.0**-element.greatest)
    else:
        tile = power_of_two_below(largest).mul_(2.0**-element.greatest)
    power = power_of_two_below(tiles)
    torch.maximum(power, tile * 2.0**element.least, out=power)
    rounded = _round_to_spacing_from_power(tiles, power, element, generator)
    if scale != "rceil":  # which leaves none beyond the range
        limit = tile.mul_(element.largest)
        rounded.clamp_(-limit, limit)
    return rounded


def mask_of_tiles_with_scale_at_limit(
    rounded: RoundedMatrix, form: BlockFormat, element: ElementFormat, scale: str
) -> Tensor:
    """Return which tiles that are not all zero want a scale at or beyond an end of its range."""
    largest = rounded.largest
    if scale in E8M0_SCALES:
        exponent = _unclamped_e8m0_exponent(largest, element, scale)
        ends = (exponent <= 0) | (exponent >= 2 * BIAS)
    elif scale in ("te", "torchao"):  # the largest block of a tensor has the largest scale by design
        ends = rounded.tile <= (0.0 if scale == "te" else NVFP4_LEAST)
    else:
        ends = largest < SMALLEST
    return ends & (largest > 0)


SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)  # those of TransformerEngine


@cache
def hadamard_matrix(device: torch.device) -> Tensor:
    """Return the orthogonal 16 x 16 matrix of signs over 4, each row times one of `SIGNS`."""
    pairs = [torch.tensor([[1.0, 1.0], [1.0, -1.0]], device=device)] * 4
    signs = torch.tensor(SIGNS, dtype=torch.float32, device=device)
    product: Tensor = reduce(torch.kron, pairs)
    return signs[:, None] * product / 4


def multiply_by_hadamard(x: Tensor, matrix: Tensor) -> Tensor:
    """Multiply each 16 numbers of the rows of a matrix by a Hadamard matrix, in bf16, with zeros to a full 16."""
    if x.stride(0) == 1 and x.stride(1) != 1:  # by columns: no copy is made
        stored = x.t()
        down = -len(stored) % HADAMARD
        blocks: Tensor = (F.pad(stored, (0, 0, 0, down)) if down else stored).unflatten(0, (-1, HADAMARD))
        return (matrix.t() @ blocks).bfloat16().float().flatten(0, 1).t()
    return join_tiles(_split_into_tiles(x, 1, HADAMARD) @ matrix).bfloat16().float()
