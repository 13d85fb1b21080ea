"""Why a result is not finite in the arm alone, from the results that a watch has seen."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ampcompare.diagnosis.findings import _indices_of_nonfinite_origins, reason_of_first_nonfinite_result
from ampcompare.diagnosis.fp32_reference import Fp32Reference
from ampcompare.diagnosis.operation_watch import OperationWatch, WatchedStep
from ampcompare.diagnosis.sites import RunningModulesTracker
from ampcompare.diagnosis.step_watch import LostUpdateCounter

TINY = 1e-6


def with_eps(x: Tensor) -> Tensor:
    return torch.log(x * TINY * TINY + 1e-9)


def with_limit(x: Tensor) -> Tensor:
    return x / (x * TINY * TINY).clamp(min=1e-12)


def of_zeros(x: Tensor) -> Tensor:
    return torch.log(torch.softmax(x * torch.arange(4.0).half() * 10, -1))


def beyond(x: Tensor) -> Tensor:
    return x * -1e9


def by_size(x: Tensor) -> Tensor:
    return torch.exp(x * 20)


def some_lost(x: Tensor, size: float) -> Tensor:
    """Return four numbers, of which one is zero in fp16 alone."""
    one, other = torch.tensor([[TINY, size, size, size], [TINY, 1, 1, 1]], dtype=x.dtype)
    return x * one * other


def of_large_product(x: Tensor) -> Tensor:
    terms = some_lost(x, 300)
    return terms.reshape(1, 4) @ terms.reshape(4, 1)


def of_numerator(x: Tensor) -> Tensor:
    return some_lost(x, 30) / (x * 2.0**-12)


def seen(function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> WatchedStep:
    watch = OperationWatch(RunningModulesTracker(), Fp32Reference())
    with watch:
        function(torch.ones(4, dtype=dtype))
    return watch.drain()


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (with_eps, "1e-09 in add is zero in fp16"),
        (
            lambda x: torch.log((x * TINY * TINY + 1e-9).float()),
            "1e-09 in add is zero in fp16",
        ),  # as autocast does
        (with_limit, "1e-12 in clamp is zero in fp16"),
        (of_zeros, "% of the results of _softmax are zero in the arm alone"),
        (lambda x: x / (x * TINY * TINY), "100 % of the results of mul are zero in the arm alone"),
        (beyond, "-1e+09 is beyond the largest number of fp16"),
        (lambda x: (x * TINY * TINY) ** -0.5, "100 % of the results of mul are zero in the arm alone"),
        (by_size, None),
        (of_large_product, None),
        (of_numerator, None),
    ],
)
def test_reasons_in_fp16(function: Callable[[Tensor], Tensor], text: str | None) -> None:
    """A number that fp16 lacks comes before zeros that were made; a value that grew has no other reason."""
    events = seen(function, torch.float16).events
    (first,) = [at for at, event in enumerate(events) if event.row[255]][:1]
    reason = reason_of_first_nonfinite_result(events, first)
    assert (reason is None) == (text is None)
    if reason is not None and text is not None:
        assert text in reason.text
        assert reason.at is None


@pytest.mark.parametrize(
    "passes_on",
    [
        lambda x: torch.where(x.isnan(), torch.zeros_like(x), x),
        lambda x: x.masked_fill(torch.arange(4) == 3, 0.0),
        lambda x: x.reshape(2, 2).tril(),
    ],
    ids=["where", "masked_fill", "tril"],
)
def test_what_passes_a_value_on_asked_for_no_infinity(passes_on: Callable[[Tensor], Tensor]) -> None:
    """The first result that is not finite is the one that overflows, not what comes behind a mask of a loss."""
    step = seen(lambda x: passes_on((x * 300) ** 2 / (x * 300)).mean(), torch.float16)
    broken = [at for at, event in enumerate(step.events) if event.row[255]]
    (first,) = _indices_of_nonfinite_origins(step.events, [broken[-1]])
    assert step.events[first].key[1] == "pow"


def test_numbers_that_bf16_has_are_no_reason() -> None:
    """Its range is that of fp32: the eps is added."""
    assert all(event.number == 0 for event in seen(with_eps, torch.bfloat16).events)


def test_a_reason_on_another_line_says_where() -> None:
    """The place that made the zeros is named with its line, and is the first to look at."""

    def function(x: Tensor) -> Tensor:
        p = torch.softmax(x * torch.arange(4.0).half() * 10, -1)
        return torch.log(p)

    events = seen(function, torch.float16).events
    reason = reason_of_first_nonfinite_result(events, len(events) - 1)
    assert reason.at is not None
    assert events[reason.at].key[1] == "_softmax"
    assert "test_reasons.py:" in reason.text


@pytest.mark.parametrize(
    ("dtype", "eps", "found"),
    [
        (torch.float16, 1e-8, 1e-8),
        (torch.float16, 1e-7, None),
        (torch.bfloat16, 1e-8, None),
        (torch.float32, 1e-8, None),
    ],
)
def test_the_eps_of_an_optimizer(dtype: torch.dtype, eps: float, found: float | None) -> None:
    """It is a reason where it is zero in the type of the weight."""
    param = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    optimizer = torch.optim.Adam([param], eps=eps)
    counter = LostUpdateCounter(lambda: [("weight", param)])
    optimizer.register_step_pre_hook(counter.keep_weights_before_step)
    optimizer.register_step_post_hook(counter.count_lost_updates_after_step)
    param.grad = torch.full_like(param, 1e-6)
    optimizer.step()
    (update,) = counter.take_lost_updates()
    assert update.eps == found
    assert (update.nonfinite > 0) == (found is not None)
