"""Operations that must not be repeated, and the norms that errors are computed from."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import distributed

from ampcompare.diagnosis.fp32_reference import Fp32Reference
from ampcompare.diagnosis.operation_watch import OperationWatch, errors_of
from ampcompare.diagnosis.sites import Sites


@pytest.fixture
def group() -> Iterator[None]:
    distributed.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_a_collective_runs_once_and_ends_the_wide_run() -> None:
    """Other ranks would wait for a second one, and the wide values of this rank are not those of all."""
    reference = Fp32Reference()
    with OperationWatch(Sites(), reference) as watch:
        reduced = torch.ones(3).bfloat16() * 2
        assert reference.of(reduced) is not None
        distributed.all_reduce(reduced)
    assert reference.of(reduced) is None
    names = [event.key[1] for event in watch.drain().events]
    assert names.count("allreduce") <= 1


def test_a_cast_of_integers_is_counted() -> None:
    """It has no floating input whose counts could be reused."""
    with OperationWatch(Sites(), Fp32Reference()) as watch:
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
    assert errors_of(result, exact, own) == pytest.approx([float(one) for one in expected], rel=1e-5, abs=1e-44)


def test_what_is_not_finite_has_no_norm() -> None:
    """A result that overflowed has a difference that is not finite, and the wide one a norm."""
    difference, wide, own = errors_of(torch.tensor([math.inf, 1.0]).half(), torch.tensor([7e4, 1.0]), None)
    assert not math.isfinite(difference)
    assert (wide, own) == (pytest.approx(7e4), 0.0)
