"""Counts of a tensor against all of its values, operations that are not repeated, and norms of errors."""

import math
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import distributed

from ampcompare.diagnosis import operation_watch, ranges
from ampcompare.diagnosis.fp32_reference import Fp32Reference
from ampcompare.diagnosis.operation_watch import OperationWatch, error_norms_of
from ampcompare.diagnosis.ranges import (
    _range_counts_on_device,
    magnitude_range_of_counts,
    range_counts_of,
    total_nonfinite_and_lost_of,
    total_with_range_counts_added,
)
from ampcompare.diagnosis.sites import RunningModulesTracker
from ampcompare.results.records.diagnosis import MagnitudeRange


def _values(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    spread = torch.randn(200, generator=generator) * 2.0 ** torch.randint(
        -30, 18, (200,), generator=generator
    )
    special = [0.0, -0.0, 65504.0, 32768.0, 2.0**-14, 2.0**-24, 2.0**-25, math.inf, -math.inf, math.nan]
    return torch.cat([spread, torch.tensor(special)]).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_range_equals_a_dump(dtype: torch.dtype) -> None:
    """Each count, the exponents and both magnitudes are those of a loop over Python floats."""
    tensor = _values(dtype)
    _check(magnitude_range_of_counts(np.asarray(range_counts_of(tensor))), tensor)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_row_of_a_device_is_that_of_the_host(dtype: torch.dtype) -> None:
    """The operations that need no read give the same counts, here on the host."""
    tensor = _values(dtype)
    exact = tensor.double() + 1e-30
    assert (
        _range_counts_on_device(tensor, exact).tolist() == np.asarray(range_counts_of(tensor, exact)).tolist()
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("part", ["all", "zeros", "subnormal", "one", "not finite", "random"])
def test_16_bits_are_counted_as_their_values_in_fp32(dtype: torch.dtype, part: str) -> None:
    """Each row by 16-bit patterns is that of the same values as fp32, for all patterns and for parts of them."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    sizes = every.float().abs()
    values = {
        "all": every,
        "zeros": every[sizes == 0],
        "subnormal": every[(sizes > 0) & (sizes < torch.finfo(dtype).tiny)],
        "one": every[sizes == 1][:1],
        "not finite": every[~sizes.isfinite()],
        "random": torch.randn(999, generator=torch.Generator().manual_seed(0)).relu().to(dtype),
    }[part]
    exact = values.double() + 1e-30
    wide = np.asarray(range_counts_of(values.float(), exact))
    assert np.asarray(range_counts_of(values, exact)).tolist() == wide.tolist()


def test_large_tensors_are_counted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their rows and norms are those of the whole, also where nothing of a part is finite or other than zero."""
    tensor = torch.cat([_values(torch.float16), torch.zeros(70), torch.full((70,), math.nan)])
    exact = tensor.float() + 1e-9
    finite, near = torch.randn(300).bfloat16(), torch.randn(300)
    whole = range_counts_of(tensor, exact), error_norms_of(finite, near, finite.float() + 1)
    sizes = []
    for module in (ranges, operation_watch):
        monkeypatch.setattr(module, "CHUNK", 64)
    count = ranges._range_counts_on_host
    monkeypatch.setattr(
        ranges, "_range_counts_on_host", lambda one, wide: sizes.append(len(one)) or count(one, wide)
    )
    assert np.asarray(range_counts_of(tensor, exact)).tolist() == np.asarray(whole[0]).tolist()
    assert max(sizes) == 64
    assert error_norms_of(finite, near, finite.float() + 1) == pytest.approx(whole[1], rel=1e-6)


def _check(found: MagnitudeRange, tensor: torch.Tensor) -> None:
    tensor = tensor.reshape(-1)
    numbers = [abs(float(value)) for value in tensor.float().tolist()]
    finite = [value for value in numbers if math.isfinite(value)]
    sizes = [value for value in finite if value]
    assert found.elements == len(numbers)
    assert found.nonfinite == len(numbers) - len(finite)
    assert found.zeros == len(finite) - len(sizes)
    assert found.exponents == dict(sorted(Counter(math.frexp(value)[1] - 1 for value in sizes).items()))
    assert (found.smallest, found.largest) == (min(sizes, default=None), max(sizes, default=None))
    assert found.below == sum(value < 2.0**-25 for value in sizes)
    assert found.top == sum(2.0**15 <= value < 2.0**16 for value in sizes)
    assert found.above == sum(value >= 2.0**16 for value in sizes)
    assert sum(found.exponents.values()) + found.zeros + found.nonfinite == found.elements


def test_lost_counts_what_the_wide_tensor_has() -> None:
    wide = torch.tensor([[1e-9, 0.0], [1.0, 1e-30]])
    assert magnitude_range_of_counts(np.asarray(range_counts_of(wide.half(), wide))).lost == 2


@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_a_tensor_without_elements(shape: tuple[int, ...]) -> None:
    """It has no magnitudes and changes nothing in a sum."""
    row = np.asarray(range_counts_of(torch.zeros(shape)))
    assert magnitude_range_of_counts(row).largest is None
    other = np.asarray(range_counts_of(torch.tensor([2.0, 3.0])))
    assert magnitude_range_of_counts(total_with_range_counts_added(row, other)) == magnitude_range_of_counts(
        other
    )
    assert total_nonfinite_and_lost_of(other) == (2, 0, 0)


@pytest.fixture
def group() -> Iterator[None]:
    distributed.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_a_collective_runs_once_and_ends_the_wide_run() -> None:
    """Other ranks would wait for a second one, and the wide values of this rank are not those of all."""
    reference = Fp32Reference()
    with OperationWatch(RunningModulesTracker(), reference) as watch:
        reduced = torch.ones(3).bfloat16() * 2
        assert reference.wide_tensor_of(reduced) is not None
        distributed.all_reduce(reduced)
    assert reference.wide_tensor_of(reduced) is None
    names = [event.key[1] for event in watch.drain().events]
    assert names.count("allreduce") <= 1


def test_the_wide_run_writes_nothing_to_the_arms_own_tensors() -> None:
    """An fp32 result whose elements do not lie in order keeps what was computed from rounded inputs."""
    exact = torch.tensor([[1 + 2.0**-12, 2.0], [3.0, 4.0]])
    with OperationWatch(RunningModulesTracker(), Fp32Reference()) as watch:
        result = exact.bfloat16().float().t() * 2
    assert not result.is_contiguous()
    assert result[0, 0] == 2
    event = watch.drain().events[-1]
    assert event.key[1] == "mul"
    assert event.errors[0] == pytest.approx(2.0**-11)


def test_parts_of_one_storage_keep_their_wide_values() -> None:
    """As those that an LSTM splits its gates into, before it works on each in place."""
    reference = Fp32Reference()
    with OperationWatch(RunningModulesTracker(), reference):
        parts = (torch.full((2, 4), 300.0).half() ** 2).unsafe_split(2, dim=1)
        parts[0].sqrt_()
    first, second = (reference.wide_tensor_of(part) for part in parts)
    assert first is not None
    assert second is not None
    assert (first == 300).all()
    assert (second == 90_000).all()


def test_a_cast_of_integers_is_counted() -> None:
    """It has no floating input whose counts could be reused."""
    with OperationWatch(RunningModulesTracker(), Fp32Reference()) as watch:
        torch.arange(4).half()
    (event,) = (one for one in watch.drain().events if one.key[1] == "_to_copy")
    assert event.row[:256].sum() == 4


@pytest.mark.parametrize("size", [1.0, 1e25, 1e-25, 0.0])
@pytest.mark.parametrize("count", [5, 200_000])
def test_norms_are_those_of_float64(count: int, size: float) -> None:
    """Also of many elements, and where squares leave the range of fp32."""
    generator = torch.Generator().manual_seed(2)
    exact, own = (size * torch.randn(count, generator=generator) for _ in range(2))
    result = exact.bfloat16()
    wide = result.double()
    expected = [torch.linalg.vector_norm(one) for one in (wide - exact.double(), exact.double(), wide - own)]
    assert error_norms_of(result, exact, own) == pytest.approx(
        [float(one) for one in expected], rel=1e-5, abs=1e-44
    )


def test_what_is_not_finite_has_no_norm() -> None:
    """A result that overflowed has a difference that is not finite, and the wide one a norm."""
    difference, wide, own = error_norms_of(
        torch.tensor([math.inf, 1.0]).half(), torch.tensor([7e4, 1.0]), None
    )
    assert not math.isfinite(difference)
    assert (wide, own) == (pytest.approx(7e4), 0.0)
