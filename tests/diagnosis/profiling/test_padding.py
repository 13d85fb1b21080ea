"""What padding would gain: which sizes are padded, what counts as a gain, and what a reason says of it."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from ampcompare.diagnosis.profiling.marks import Marks
from ampcompare.diagnosis.profiling.measure import pad_product, time_product, with_padding
from ampcompare.diagnosis.profiling.operation_counter import Counts, OperationCounter, ProductShape
from ampcompare.diagnosis.profiling.reasons import find_reasons
from ampcompare.results.records.profile import ArmProfile, Limits, Part, Product

CPU = torch.device("cpu")
PLAIN = ((1, 1), (0, 0), (1, 1), False, (0, 0), 1)
TRANSPOSED = ((1, 1), (0, 0), (1, 1), True, (0, 0), 1)
GROUPED = ((1, 1), (0, 0), (1, 1), False, (0, 0), 2)


def _shape(
    operation: str, left: tuple[int, ...], right: tuple[int, ...], options: tuple[object, ...] = ()
) -> ProductShape:
    return ProductShape("net", operation, "bf16", (("in", 6), ("out", 10)), left, right, options)


@pytest.mark.parametrize(
    ("shape", "left", "right"),
    [
        (_shape("mm", (5, 6), (6, 10)), (5, 8), (8, 16)),
        (_shape("bmm", (3, 5, 6), (3, 6, 10)), (3, 5, 8), (3, 8, 16)),
        (_shape("convolution", (2, 6, 5, 5), (10, 6, 3, 3), PLAIN), (2, 8, 5, 5), (16, 8, 3, 3)),
        (_shape("convolution", (2, 3, 5, 5), (10, 3, 3, 3), PLAIN), (2, 3, 5, 5), (16, 3, 3, 3)),
        (_shape("convolution", (2, 6, 5, 5), (6, 10, 3, 3), TRANSPOSED), (2, 8, 5, 5), (8, 16, 3, 3)),
    ],
)
def test_all_sizes_but_the_rows_are_padded(shape: ProductShape, left: tuple[int, ...], right: tuple[int, ...]) -> None:
    """Both products run, and the batch and the channels of an image keep their sizes."""
    wide = pad_product(shape)
    assert (wide.left, wide.right) == (left, right)
    assert time_product(shape, CPU) > 0
    assert time_product(wide, CPU) > 0


def test_a_convolution_of_groups_has_no_padded_form() -> None:
    """Its product is left as it is, without times."""
    shape = _shape("convolution", (2, 6, 5, 5), (10, 3, 3, 3), GROUPED)
    assert pad_product(shape) is None
    product = Product(module="net", operation="convolution", dtype="bf16", sizes=["in 6", "out 10"], share=1.0)
    assert with_padding([product], Counts(products=Counter({shape: 1})), lambda one: pytest.fail("it ran")) == [product]


@pytest.mark.parametrize(("after", "expected"), [((1.0, 1.1, 1.2), 1.0), ((1.0, 2.5, 1.2), 2.0)])
def test_a_gain_is_one_in_each_round(after: tuple[float, ...], expected: float) -> None:
    """Where one round of the padded product is not faster, nothing is gained; a product without room has no times."""
    small, large = _shape("mm", (5, 6), (6, 10)), _shape("mm", (50, 6), (6, 10))
    seen = Counts(products=Counter({small: 1, large: 9}))
    product = Product(module="net", operation="mm", dtype="bf16", sizes=["in 6", "out 10"], share=1.0)
    times = {large: iter((2.0, 2.1, 2.2)), pad_product(large): iter(after)}
    (found,) = with_padding([product], seen, lambda shape: next(times[shape]))
    assert (found.seconds, found.padded_seconds) == (2.0, expected)

    def no_room(shape: ProductShape) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert with_padding([product], seen, no_room) == [product]


def test_the_shapes_of_a_step_can_be_run() -> None:
    """What the forward pass of layers and convolutions multiplies is a product that runs alone."""
    marks = Marks()
    marks.phase = "forward"
    counter = OperationCounter(marks, CPU)
    model = torch.nn.Sequential(torch.nn.Conv2d(8, 10, 3), torch.nn.Flatten(), torch.nn.Linear(90, 12)).bfloat16()
    with counter, torch.no_grad():
        model(torch.ones(2, 8, 5, 5, dtype=torch.bfloat16))
    assert {shape.operation for shape in counter.counts.products} == {"convolution", "addmm"}
    for shape in counter.counts.products:
        assert time_product(shape, CPU) > 0


def _arm(device: str, seconds: float | None, padded_seconds: float | None) -> ArmProfile:
    product = Product(
        module="head", operation="mm", dtype="bf16", sizes=["out 30"], share=0.4, seconds=seconds,
        padded_seconds=padded_seconds,
    )  # fmt: skip
    return ArmProfile(
        arm="native:bf16", device=device, seconds=1.0, half_dtype="bf16", products=[product],
        parts=[Part(phase="forward", kind="product", seconds=1.0)], limits=Limits(flops=1.0, bytes=1.0),
    )  # fmt: skip


def test_a_gain_that_was_tested_is_said() -> None:
    """On a GPU sizes that cost nothing are no reason; a CPU that gains nothing says what a GPU may do."""
    arm = _arm("NVIDIA A100", 2.0, 1.0)
    (reason,) = find_reasons(arm, arm)
    assert reason.gain == "padded to multiples of 8, these products take 50 % less time (tested)"
    assert (reason.tested, reason.on_gpu) == (True, False)
    assert reason.evidence == ["head: mm, out 30, 40 % of the FLOPs, padded 0.50x the time"]
    arm = _arm("NVIDIA A100", 2.0, 2.0)
    assert find_reasons(arm, arm) == []
    arm = _arm("cpu", 2.0, 2.0)
    (reason,) = find_reasons(arm, arm)
    assert (reason.tested, reason.on_gpu) == (False, True)
    assert "tensor cores" in reason.gain
