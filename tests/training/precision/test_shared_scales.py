"""Rounding with shared scales, bit for bit against public references; and where one name means several quantizers."""

import functools
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ampcompare.base.formats import E2M1, E4M3, E5M2, FORMATS, ElementFormat
from ampcompare.training.precision.shared_scales import (
    RoundedMatrix,
    hadamard_matrix,
    join_tiles,
    mask_of_tiles_with_scale_at_limit,
    multiply_by_hadamard,
    round_matrix,
    round_to_element,
    rounded_values_and_matrix_scale,
)
from tests.training.precision.shared_scales.matrices import bell, hashed, make_matrices

ELEMENTS = {"e4m3": E4M3, "e5m2": E5M2, "e2m1": E2M1}
TORCH = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
ML_DTYPES = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2", "e2m1": "float4_e2m1fn"}
MODES = ("floor", "rceil", "even")


def equal(a: Tensor, b: Tensor) -> bool:
    """Return whether all values are equal, NaN with NaN."""
    a, b = a.float().flatten(), b.float().flatten()
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def rounded(
    x: Tensor, name: str, scale: str = "", *, element: ElementFormat | None = None, square: bool = False
) -> RoundedMatrix:
    form = FORMATS[name]
    return round_matrix(x.float(), form, element or form.element, scale or form.scales[0], square=square)


def codes(element: ElementFormat) -> Tensor:
    """All numbers of an element: its subnormal ones, then those of each exponent."""
    steps = 2**element.fraction
    small = torch.arange(steps) * 2.0 ** (element.least - element.fraction)
    exponents = torch.arange(element.least, element.greatest + 1).float()
    normal = ((1 + torch.arange(steps) / steps) * torch.exp2(exponents)[:, None]).flatten()
    both = torch.cat([small, normal[normal <= element.largest]])
    return torch.cat([-both, both]).unique()


def inputs(element: ElementFormat) -> Tensor:
    """All codes, all ties with their neighbors, all numbers of bf16 but NaN, and fp32 of many exponents."""
    values = codes(element)
    ties = ((values[1:] + values[:-1]) / 2).view(torch.int32)
    around = [(ties + ulp).view(torch.float32) for ulp in (-1, 0, 1)]
    all_bf16 = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).float()
    wide = bell(256, 64, 3).flatten() * torch.exp2((hashed(256, 64, 9) % 37 - 20).float()).flatten()
    x = torch.cat([values, *around, all_bf16, wide])
    return x[~x.isnan()]


@pytest.mark.parametrize("name", ELEMENTS)
def test_all_codes_and_ties_are_rounded_as_ml_dtypes_rounds_them(name: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = inputs(ELEMENTS[name])
    x = x[x.abs() <= ELEMENTS[name].largest]
    kind = getattr(ml_dtypes, ML_DTYPES[name])
    assert equal(round_to_element(x, ELEMENTS[name]), torch.from_numpy(x.numpy().astype(kind).astype("f4")))
    count = 2 ** (ELEMENTS[name].fraction + 2)
    assert count <= len(codes(ELEMENTS[name])) == len(np.unique(_finite(kind)))


def _finite(kind: Any) -> Any:
    bits = 16 if "4" in kind.__name__.partition("_")[0] else 256
    values = np.arange(bits, dtype=np.uint8).view(kind).astype("f4")
    return values[np.isfinite(values)]


@pytest.mark.parametrize("name", ELEMENTS)
def test_beyond_the_range_it_saturates_as_gfloat_does(name: str) -> None:
    """Infinities too; and within the range it rounds as that does."""
    gfloat = pytest.importorskip("gfloat")
    info = getattr(pytest.importorskip("gfloat.formats"), f"format_info_ocp_{name}")
    x = inputs(ELEMENTS[name])
    other = gfloat.round_ndarray(info, x.double().numpy(), gfloat.RoundMode.TiesToEven, sat=True)
    assert equal(round_to_element(x, ELEMENTS[name]), torch.from_numpy(other))


@pytest.mark.parametrize("name", ELEMENTS)
def test_nan_stays_and_all_codes_stay(name: str) -> None:
    assert round_to_element(torch.tensor([float("nan")]), ELEMENTS[name]).isnan().all()
    assert torch.equal(round_to_element(codes(ELEMENTS[name]), ELEMENTS[name]), codes(ELEMENTS[name]))


@pytest.mark.parametrize("name", TORCH)
def test_torch_casts_numbers_within_the_range_likewise(name: str) -> None:
    x = inputs(ELEMENTS[name])
    x = x[x.abs() <= ELEMENTS[name].largest]
    assert equal(round_to_element(x, ELEMENTS[name]), x.to(TORCH[name]))


def test_beyond_the_range_casts_of_torch_and_ml_dtypes_differ_from_one_another() -> None:
    """So numbers are limited first: torch makes the largest of e4m3 and inf of e5m2, ml_dtypes NaN, inf and 6."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    beyond = torch.tensor([1e6])
    assert [beyond.to(TORCH[name]).item() for name in TORCH] == [448.0, float("inf")]
    cast = {name: float(beyond.numpy().astype(getattr(ml_dtypes, ML_DTYPES[name]))[0]) for name in ELEMENTS}
    assert np.isnan(cast["e4m3"])
    assert (cast["e5m2"], cast["e2m1"]) == (float("inf"), 6.0)
    assert [round_to_element(beyond, element).item() for element in ELEMENTS.values()] == [
        448.0,
        57344.0,
        6.0,
    ]


@pytest.mark.parametrize("name", ELEMENTS)
def test_rounding_at_random_keeps_the_mean_and_stays_between_neighbors(name: str) -> None:
    element = ELEMENTS[name]
    x = torch.tensor([0.1, 0.3, 0.7, 1.1, 1.6, 2.3, 3.4, 5.9, 6.0, 1.5, 0.0, -2.7]).repeat(2**14, 1)
    drawn = round_to_element(x, element, torch.Generator().manual_seed(1))
    error = (drawn.mean(0) - x[0]).abs() / (drawn.std(0) / 2**7).clamp(min=1e-7)
    assert error.max() < 4
    values = codes(element)
    below = torch.stack([values[values <= one].max() for one in x[0]])
    above = torch.stack([values[values >= one].min() for one in x[0]])
    assert bool(((drawn == below) | (drawn == above)).all())
    again = round_to_element(x, element, torch.Generator().manual_seed(1))
    assert torch.equal(drawn, again)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "element"), [("mxfp8", "e4m3"), ("mxfp8", "e5m2"), ("mxfp4", "e2m1")])
def test_mx_is_that_of_torchao(name: str, element: str, mode: str) -> None:
    """Scales and elements of every block, over all kinds of matrices."""
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    for kind, x in make_matrices(96, 64).items():
        mine = rounded(x, name, mode, element=ELEMENTS[element])
        scale, grid = _to_mx(mx, x, element, mode)
        keep = torch.ones_like(scale, dtype=torch.bool)
        if kind == "any fp32":  # below 2^-118 torchao stores one scale and divides by another
            keep = scale.view(torch.uint8) > 8
        assert equal(
            torch.log2(mine.tile[:, 0, :, 0])[keep], (scale.view(torch.uint8).float() - 127)[keep]
        ), kind
        assert equal(mine.grid[:, 0][keep], grid.unflatten(1, (-1, 32))[keep]), kind


def _to_mx(mx: Any, x: Tensor, element: str, mode: str) -> tuple[Tensor, Tensor]:
    from torchao.prototype.mx_formats import config, kernels

    dtype = {**TORCH, "e2m1": torch.float4_e2m1fn_x2}[element]
    scale, data = mx.to_mx(x.contiguous(), dtype, 32, config.ScaleCalculationMode(mode))
    if element == "e2m1":
        data = kernels.f4_unpacked_to_f32(kernels.unpack_uint4(data))
    return scale, data.float()


def test_rceil_of_torchao_is_one_step_off_just_above_an_end_of_a_binade() -> None:
    """It takes log2 in fp32: a unit above 448 * 2^n its scale leaves numbers beyond the range. bf16 has none there."""
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    over = torch.nextafter(torch.full((1, 32), 448.0 * 2.0**40), torch.tensor(float("inf")))
    scale, _ = _to_mx(mx, over, "e4m3", "rceil")
    assert int(scale.view(torch.uint8)) - 127 == 40
    mine = rounded(over, "mxfp8", "rceil")
    assert mine.tile.item() == 2.0**41
    assert bool((mine.unrounded <= 448).all())


@pytest.mark.parametrize("mode", ["floor", "rceil"])
def test_mx_of_tiny_numbers_divides_by_the_scale_that_it_stores(mode: str) -> None:
    """Below 2^-118 torchao stores 2^-127, and divides by another number."""
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    tiny = torch.full((1, 32), 2.0**-121)
    scale, grid = _to_mx(mx, tiny, "e4m3", mode)
    mine = rounded(tiny, "mxfp8", mode)
    assert mine.tile.item() == 2.0**-127 == 2.0 ** (int(scale.view(torch.uint8)) - 127)
    assert torch.equal(mine.grid.flatten() * mine.tile.item(), tiny.flatten())
    assert not torch.equal(grid.flatten() * mine.tile.item(), tiny.flatten())


@pytest.mark.parametrize("name", ["fp8_tensorwise", "fp8_rowwise"])
def test_fp8_with_a_scale_for_a_tensor_or_a_row_is_that_of_torchao(name: str) -> None:
    utils = pytest.importorskip("torchao.float8.float8_utils")
    is_row = name == "fp8_rowwise"
    for kind, x in make_matrices(96, 64).items():
        largest = x.abs().amax(1, keepdim=True) if is_row else x.abs().max()
        scaled = x * utils.amax_to_scale(largest, TORCH["e4m3"], is_row)
        mine = rounded(x, name)
        assert equal(mine.grid, utils.to_fp8_saturated(scaled, TORCH["e4m3"])), kind
    bound = 2.0 ** -(3 if is_row else 4)  # of what is not so small that it is subnormal in e4m3
    x = make_matrices(96, 64)["bf16"]
    mine = rounded(x, name)
    values = join_tiles(mine.grid * mine.tile * mine.whole)[:96, :64]
    large = x.abs() > 0.1
    assert bool(((values - x).abs()[large] <= bound * x.abs()[large]).all())


@functools.cache
def references() -> dict[str, Any]:
    """What TransformerEngine's and microxcaling's references made of the same matrices: `shared_scales/record.py`."""
    with np.load(Path(__file__).parent / "shared_scales" / "references.npz") as file:
        return dict(file)


NVFP4_KINDS = ("wide bf16", "outliers bf16", "fp32", "any fp32", "zeros")


@pytest.mark.parametrize("kind", NVFP4_KINDS)
@pytest.mark.parametrize("what", ["rows", "squares", "transformed"])
def test_nvfp4_is_that_of_transformer_engine(what: str, kind: str) -> None:
    """In rows and columns, in squares, and of columns times a Hadamard matrix."""
    x = make_matrices(32, 64)[kind]
    columns = x.t()
    if what == "transformed":
        dtype = torch.bfloat16 if "bf16" in kind else torch.float32
        matrix = hadamard_matrix(torch.device("cpu"))
        columns = join_tiles(
            x.t().contiguous().to(dtype).unflatten(1, (-1, 16)).unsqueeze(1) @ matrix.to(dtype)
        ).float()
    for side, given in (("", x), (" columns", columns)):
        mine = rounded(given, "nvfp4", square=what == "squares")
        name = f"te nvfp4 {what}{side} {kind}"
        assert equal(join_tiles(mine.grid), torch.from_numpy(references()[name]).float() / 2)
        scales = join_tiles(mine.tile.expand(-1, 16 if what == "squares" else 1, -1, -1))
        assert equal(scales, torch.from_numpy(references()[f"{name} scales"]))


def test_an_nvfp4_product_is_that_of_transformer_engine() -> None:
    """Multiplied in fp32, times the scales of both tensors, and rounded once."""
    parts = [rounded(bell(rows, 64, salt).bfloat16(), "nvfp4") for rows, salt in ((32, 50), (24, 70))]
    a, b = (join_tiles(part.grid * part.tile) for part in parts)
    product = ((a @ b.t()) * (parts[0].whole * parts[1].whole)).bfloat16()
    assert equal(product, torch.from_numpy(references()["te nvfp4 product"]))


@pytest.mark.parametrize("scale", ["fp32", "pow2"])
@pytest.mark.parametrize("shape", ["rows", "squares"])
def test_fp8_in_blocks_of_128_is_that_of_transformer_engine(shape: str, scale: str) -> None:
    x = make_matrices(128, 160)["fp32"]
    mine = rounded(x, "fp8_blockwise", scale, square=shape == "squares")
    other = torch.from_numpy(references()[f"te blocks {shape} {scale}"]).view(TORCH["e4m3"])
    assert equal(join_tiles(mine.grid)[:, :160], other)


@pytest.mark.parametrize("kind", NVFP4_KINDS[:2])
@pytest.mark.parametrize(
    ("name", "element", "other"),
    [("mxfp8", "e4m3", "fp8_e4m3"), ("mxfp8", "e5m2", "fp8_e5m2"), ("mxfp4", "e2m1", "fp4_e2m1")],
)
def test_mx_by_floor_is_that_of_microxcaling(name: str, element: str, other: str, kind: str) -> None:
    mine = rounded(make_matrices(32, 64)[kind], name, "floor", element=ELEMENTS[element])
    values = torch.from_numpy(references()[f"mx {other} {kind}"]).view(torch.bfloat16)
    assert equal(join_tiles(mine.grid * mine.tile), values)


def test_microxcaling_away_from_zero_would_round_ties_elsewhere() -> None:
    """Its convolutions round ties so, whatever they are asked for: bf16 is full of ties, so the rule shows."""
    x = make_matrices(32, 64)["wide bf16"]
    mine = rounded(x, "mxfp8", "floor")
    further = torch.nextafter(mine.unrounded, mine.unrounded.sign() * float("inf"))
    away = round_to_element(torch.where(mine.unrounded == 0, 0.0, further), E4M3)
    assert 0.005 < (away != mine.grid).float().mean() < 0.1


def test_torchao_has_no_block_scale_below_a_limit_in_nvfp4_and_makes_nan_of_zeros() -> None:
    """With outliers most elements of the two differ; scale=torchao has its numbers, except NaN."""
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    kernels = pytest.importorskip("torchao.prototype.mx_formats.kernels")
    for kind, x in make_matrices(32, 64).items():
        whole = nvfp4.per_tensor_amax_to_scale(x.abs().max())
        scale, data = nvfp4.nvfp4_quantize(x, per_tensor_scale=whole)
        grid = kernels.f4_unpacked_to_f32(kernels.unpack_uint4(data))
        limited, full = rounded(x, "nvfp4", "torchao"), rounded(x, "nvfp4")
        if kind == "zeros":
            assert scale.float().isnan().any()
            assert torch.equal(limited.grid, torch.zeros_like(limited.grid))
            continue
        assert equal(limited.tile[:, 0, :, 0], scale), kind
        assert equal(join_tiles(limited.grid), grid), kind
        if kind == "outliers bf16":
            assert (join_tiles(full.grid) != grid).float().mean() > 0.7


def test_a_number_above_a_tensor_is_one_unit_off_and_moves_ties() -> None:
    """torch computes the inverse times the number, so scales are made by one tensor above another."""
    largest = torch.arange(1, 2000).bfloat16().float()
    quotient = torch.div(torch.tensor(2688.0), largest)
    assert bool((2688.0 / largest != quotient).any())
    x = make_matrices(32, 64)["bf16"]
    up = torch.div(torch.tensor(2688.0), x.abs().max())
    assert rounded(x, "nvfp4").whole.item() == (1 / up).item()


def test_a_block_lies_along_what_the_product_sums_over() -> None:
    """An outlier spoils its own 32 neighbors in the row, and none in another row or block."""
    x = torch.full((3, 96), 2.0**-12)
    x[1, 40] = 448.0
    zero = join_tiles(rounded(x, "mxfp8").grid) == 0
    expected = torch.zeros_like(zero)
    expected[1, 32:64] = True
    expected[1, 40] = False
    assert torch.equal(zero, expected)


def test_a_hadamard_transform_is_orthogonal_and_fills_up_with_zeros() -> None:
    matrix = hadamard_matrix(torch.device("cpu"))
    assert torch.equal(matrix @ matrix.t(), torch.eye(16))
    a, b = bell(5, 20, 1), bell(7, 20, 2)
    assert multiply_by_hadamard(a, matrix).shape == (5, 32)
    torch.testing.assert_close(
        multiply_by_hadamard(a, matrix) @ multiply_by_hadamard(b, matrix).t(), a @ b.t(), rtol=0.05, atol=0.05
    )


@pytest.mark.parametrize(
    ("name", "scale", "value", "is_end"),
    [
        ("mxfp8", "rceil", 2.0**-126, True),
        ("mxfp8", "rceil", 1.0, False),
        ("mxfp4", "floor", 2.0**-125, True),
        ("nvfp4", "te", 1.0, False),
        ("fp8_rowwise", "pow2", 1e-13, True),
        ("fp8_rowwise", "pow2", 1e-11, False),
    ],
)
def test_scales_at_an_end_of_their_range_are_found(name: str, scale: str, value: float, is_end: bool) -> None:
    """A tile of zeros wants none."""
    form = FORMATS[name]
    x = torch.zeros(2, 32)
    x[0] = value
    ends = mask_of_tiles_with_scale_at_limit(rounded(x, name, scale), form, form.element, scale)
    assert bool(ends.flatten()[0]) is is_end
    assert not ends[-1].any()


def test_a_block_far_below_the_largest_has_a_scale_of_zero_in_nvfp4() -> None:
    x = torch.ones(2, 16)
    x[1] = 2.0**-24
    mine = rounded(x, "nvfp4")
    assert mask_of_tiles_with_scale_at_limit(mine, FORMATS["nvfp4"], E2M1, "te").flatten().tolist() == [
        False,
        True,
    ]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(96, 64), (40, 24), (130, 150)])
def test_fewer_passes_give_the_same_values(name: str, shape: tuple[int, int]) -> None:
    """By rows and by columns, for all scales and elements, also where powers of two are near an end of their range."""
    form = FORMATS[name]
    elements = [form.element] if form.element == E2M1 else [E4M3, E5M2]
    for kind, x in make_matrices(*shape).items():
        for given in (x.float(), x.float().t()):
            for scale, element, square in itertools.product(
                form.scales, elements, {False, form.shares == "block"}
            ):
                expected = round_matrix(given, form, element, scale, square=square)
                before = given.clone()
                values, whole = rounded_values_and_matrix_scale(given, form, element, scale, square=square)
                assert equal(given, before)
                wanted = join_tiles(expected.grid * expected.tile)[: given.shape[0], : given.shape[1]]
                assert equal(values, wanted), (kind, scale, element.name, square)
                assert equal(torch.as_tensor(whole), expected.whole)


def test_a_transform_by_columns_is_that_by_rows() -> None:
    x, matrix = make_matrices(96, 40)["wide bf16"].float(), hadamard_matrix(torch.device("cpu"))
    assert torch.equal(multiply_by_hadamard(x.t(), matrix), multiply_by_hadamard(x.t().contiguous(), matrix))
    assert torch.equal(
        multiply_by_hadamard(x[:90].t(), matrix), multiply_by_hadamard(x[:90].t().contiguous(), matrix)
    )


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_does_not_become_finite(name: str, value: float) -> None:
    """A loss that overflows must not look healthy after a product."""
    x = torch.ones(2, 64)
    x[0, 3] = value
    mine = rounded(x, name)
    values = join_tiles(mine.grid * mine.tile * mine.whole)
    assert not torch.isfinite(values).all()
