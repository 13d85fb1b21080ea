"""The operations of `amp_C` through `multi_tensor_applier`: values, flags and errors, on any device."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ampcompare.apex import amp_C
from ampcompare.apex.multi_tensor_apply import MultiTensorApply, arithmetic, multi_tensor_applier
from tests.covering import covering

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SIZES = [(1, 1), (33, 7), (777, 555), (5, 0)]


def flag() -> Tensor:
    return torch.zeros(1, dtype=torch.int32)


def lists(sizes: tuple[int, int], repeats: int, dtype: torch.dtype, value: float) -> list[Tensor]:
    return [torch.full((size,), value, dtype=dtype) for _ in range(repeats) for size in sizes]


def test_the_applier_when_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `available` set to False, as scripts do to test a fallback, a call is a RuntimeError."""
    monkeypatch.setattr(MultiTensorApply, "available", False)
    with pytest.raises(RuntimeError, match="available is False"):
        multi_tensor_applier(amp_C.multi_tensor_scale, flag(), [[torch.ones(1)], [torch.ones(1)]], 1.0)


@covering({"sizes": SIZES, "source": DTYPES, "target": DTYPES, "repeats": [1, 20]})
def test_scale(sizes: tuple[int, int], source: torch.dtype, target: torch.dtype, repeats: int) -> None:
    """Scaling gives the product in the output's dtype for all pairs of dtypes, leaves inputs and flag alone."""
    inputs, outputs = lists(sizes, repeats, source, 4.0), lists(sizes, repeats, target, -1.0)
    noop = flag()
    multi_tensor_applier(amp_C.multi_tensor_scale, noop, [inputs, outputs], 1 / 8)
    for got, given in zip(outputs, inputs, strict=True):
        assert torch.equal(got, torch.full_like(got, 0.5))
        assert torch.equal(given, torch.full_like(given, 4.0))
    assert noop.item() == 0


@covering(
    {
        "bad": [math.inf, -math.inf, math.nan],
        "where": [(0, 0), (3, 16), (5, -1)],
        "dtype": DTYPES,
        "in_place": [True, False],
    }
)
def test_scale_raises_the_flag(
    bad: float, where: tuple[int, int], dtype: torch.dtype, in_place: bool
) -> None:
    """One inf or NaN anywhere sets the flag to 1, and the rest is scaled all the same."""
    inputs = lists((33, 40), 3, dtype, 4.0)
    outputs = inputs if in_place else lists((33, 40), 3, torch.float32, 0.0)
    inputs[where[0]][where[1]] = bad
    noop = flag()
    multi_tensor_applier(amp_C.multi_tensor_scale, noop, [inputs, outputs], 0.5)
    assert noop.tolist() == [1]
    assert outputs[1][0].item() == 2.0
    assert not math.isfinite(outputs[where[0]][where[1]].item())


def test_scale_checks_inputs_only_and_rounds_once() -> None:
    """An output that overflows does not raise the flag, and an input outside the output's range is scaled first."""
    noop = flag()
    halves = [torch.zeros(2, dtype=torch.float16)]
    multi_tensor_applier(amp_C.multi_tensor_scale, noop, [[torch.tensor([1e6, 98304.0])], halves], 0.5)
    assert halves[0].tolist() == [math.inf, 49152.0]
    assert noop.item() == 0


@covering({"first": DTYPES, "second": DTYPES, "out": DTYPES, "channels_last": [True, False]})
def test_axpby(first: torch.dtype, second: torch.dtype, out: torch.dtype, channels_last: bool) -> None:
    """a * x + b * y is right for any two dtypes of arguments and output, in either memory format."""
    memory = torch.channels_last if channels_last else torch.contiguous_format
    xs, ys, outputs = (
        [torch.full((2, 3, 4, 5), value, dtype=dtype).to(memory_format=memory) for _ in range(3)]
        for value, dtype in ((4.0, first), (16.0, second), (-1.0, out))
    )
    noop = flag()
    multi_tensor_applier(amp_C.multi_tensor_axpby, noop, [xs, ys, outputs], 2.0, 8.0, -1)
    assert all(torch.equal(got, torch.full_like(got, 136.0)) for got in outputs)
    assert noop.item() == 0


@pytest.mark.parametrize("checked,flags", [(-1, (1, 1)), (0, (1, 0)), (1, (0, 1))])
@pytest.mark.parametrize("dtype", DTYPES)
def test_axpby_checks_what_it_is_told_to(checked: int, flags: tuple[int, int], dtype: torch.dtype) -> None:
    """`arg_to_check` chooses whether an inf in x, in y, or in either raises the flag."""
    for bad, expected in zip((0, 1), flags, strict=True):
        both = [lists((7, 5), 1, dtype, 1.0), lists((7, 5), 1, dtype, 1.0)]
        both[bad][1][2] = math.inf
        noop = flag()
        multi_tensor_applier(
            amp_C.multi_tensor_axpby, noop, [*both, lists((7, 5), 1, dtype, 0.0)], 1.0, 1.0, checked
        )
        assert noop.item() == expected


@covering(
    {
        "sizes": SIZES,
        "dtype": DTYPES,
        "repeats": [1, 20],
        "name": ["multi_tensor_l2norm", "multi_tensor_l2norm_mp"],
    }
)
def test_l2norm(sizes: tuple[int, int], dtype: torch.dtype, repeats: int, name: str) -> None:
    """The norm of all and the norms of each are those of fp64 arithmetic, in fp32, of shapes (1,) and (n,)."""
    tensors = [torch.linspace(-2, 3, t.numel()).to(dtype) for t in lists(sizes, repeats, dtype, 0.0)]
    noop = flag()
    total, each = multi_tensor_applier(getattr(amp_C, name), noop, [tensors], True)
    expected = torch.stack([tensor.double().norm() for tensor in tensors])
    torch.testing.assert_close(each.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(total.double(), expected.norm().reshape(1), rtol=1e-5, atol=1e-6)
    assert total.dtype is each.dtype is torch.float32
    assert noop.item() == 0
    assert multi_tensor_applier(getattr(amp_C, name), noop, [tensors], False)[1].shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_l2norm_of_a_long_tensor(dtype: torch.dtype) -> None:
    """Rounding errors do not pile up over a million elements, next to a short and an empty tensor."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.rand(size, generator=generator).to(dtype) for size in (1_000_003, 5, 0)]
    total, each = multi_tensor_applier(amp_C.multi_tensor_l2norm, flag(), [tensors], True)
    expected = torch.stack([tensor.double().norm() for tensor in tensors])
    torch.testing.assert_close(each.double(), expected, rtol=3e-6, atol=0)
    torch.testing.assert_close(total.double(), expected.norm().reshape(1), rtol=3e-6, atol=0)


def test_l2norm_mp_does_nothing_under_a_raised_flag() -> None:
    """The mixed-precision form returns zeros once the flag is set."""
    noop = torch.ones(1, dtype=torch.int32)
    total, each = multi_tensor_applier(amp_C.multi_tensor_l2norm_mp, noop, [[torch.ones(4)]], True)
    assert total.tolist() == each.tolist() == [0.0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_unscale_l2norm(dtype: torch.dtype) -> None:
    """Norms come out as of unscaled tensors, which stay as they are."""
    tensors = lists((9, 16), 1, dtype, 8.0)
    total, each = multi_tensor_applier(
        amp_C.multi_tensor_unscale_l2norm, flag(), [tensors], torch.tensor([0.25]), True
    )
    assert each.tolist() == [6.0, 8.0]
    assert total.tolist() == [10.0]
    assert tensors[0][0].item() == 8.0


def test_l2norm_scale() -> None:
    """Outputs are scaled, and the norms are those of the inputs."""
    inputs, outputs = lists((9, 16), 1, torch.float16, 1.0), lists((9, 16), 1, torch.float32, 0.0)
    total, each = multi_tensor_applier(amp_C.multi_tensor_l2norm_scale, flag(), [inputs, outputs], 2.0, True)
    assert each.tolist() == [3.0, 4.0]
    assert total.tolist() == [5.0]
    assert outputs[1].tolist() == [2.0] * 16


@pytest.mark.parametrize(
    "wrong,message",
    [
        ([[torch.ones(1)]], "takes 2"),
        ([[], []], "not zero"),
        ([[torch.ones(1)], [torch.ones(1), torch.ones(1)]], "lengths"),
        ([[torch.ones(2)], [torch.ones(3)]], "shapes"),
        ([[torch.ones(2, dtype=torch.int64)], [torch.ones(2)]], "floating"),
        ([[torch.ones(2, device="meta")], [torch.ones(2, device="meta")]], "one device"),
    ],
)
def test_bad_lists(wrong: list[list[Tensor]], message: str) -> None:
    """Lists that do not fit are RuntimeErrors that say what is wrong."""
    with pytest.raises(RuntimeError, match=message):
        multi_tensor_applier(amp_C.multi_tensor_scale, flag(), wrong, 1.0)


def hysteresis_by_hand(
    found: list[bool], growth: float, backoff: float, interval: int, limit: int
) -> list[float]:
    scale, clean, remaining, seen = 16.0, 0, limit, []
    for overflow in found:
        if overflow:
            remaining, clean = remaining - 1, 0
            if remaining <= 0:
                scale *= backoff
        else:
            remaining, clean = limit, clean + 1
            if clean == interval:
                clean, scale = 0, scale * growth
        seen.append(scale)
    return seen


@pytest.mark.parametrize("limit", [1, 2, 4])
@pytest.mark.parametrize("interval", [1, 3])
def test_hysteresis(limit: int, interval: int) -> None:
    """The scale backs off from the n-th overflow in a row on, grows per interval, and a clean step renews patience."""
    generator = torch.Generator().manual_seed(limit)
    flags = (torch.rand(60, generator=generator) < 0.5).tolist() + [True] * 5 + [False] * 7
    scale, growth = torch.tensor([16.0]), torch.zeros(1, dtype=torch.int32)
    hysteresis = torch.tensor([limit], dtype=torch.int32)
    seen = []
    for overflow in flags:
        returned = amp_C.update_scale_hysteresis(
            scale, growth, hysteresis, torch.tensor([float(overflow)]), 2.0, 0.5, interval, limit
        )
        assert returned is scale
        seen.append(scale.item())
    assert seen == hysteresis_by_hand(flags, 2.0, 0.5, interval, limit)


def test_hysteresis_never_grows_to_infinity() -> None:
    """A growth that leaves fp32's range is not made; a scale below fp32's normal numbers becomes 0."""
    scale, counter, patience = (
        torch.tensor([3e38]),
        torch.zeros(1, dtype=torch.int32),
        torch.ones(1, dtype=torch.int32),
    )
    amp_C.update_scale_hysteresis(scale, counter, patience, torch.tensor([0.0]), 2.0, 0.5, 1, 1)
    assert scale.tolist() == pytest.approx([3e38])
    scale.fill_(2e-38)
    amp_C.update_scale_hysteresis(scale, counter, patience, torch.tensor([1.0]), 2.0, 0.25, 1, 1)
    assert scale.tolist() == [0.0]


def step_lists(count: int, dtype: torch.dtype = torch.float32) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [[torch.rand(size, generator=generator).to(dtype) + 0.5 for size in (3, 4)] for _ in range(count)]


def test_lamb_in_two_stages_is_lamb() -> None:
    """Stage 1, norms and stage 2, called one by one as BERT's own optimizer does, give the weights of one LAMB step."""
    whole, staged = step_lists(4), step_lists(4)
    updates = [torch.zeros_like(tensor) for tensor in staged[0]]
    norm, _ = multi_tensor_applier(amp_C.multi_tensor_l2norm, flag(), [whole[0]], False)
    decays = torch.full((2,), 0.01)
    multi_tensor_applier(
        amp_C.multi_tensor_lamb_stage1_cuda, flag(), [*staged, updates], decays, 2, 0.9, 0.99, 1e-6, norm, 1.0
    )
    _, param_norms = multi_tensor_applier(amp_C.multi_tensor_l2norm, flag(), [staged[1]], True)
    _, update_norms = multi_tensor_applier(amp_C.multi_tensor_l2norm, flag(), [updates], True)
    multi_tensor_applier(
        amp_C.multi_tensor_lamb_stage2_cuda,
        flag(),
        [staged[1], updates],
        param_norms,
        update_norms,
        0.1,
        0.01,
    )
    multi_tensor_applier(
        amp_C.multi_tensor_lamb, flag(), whole, 0.1, 0.9, 0.99, 1e-6, 3, 1, 0.01, 1, 1, norm, 1.0, False
    )
    torch.testing.assert_close(staged[1:], whole[1:])
    torch.testing.assert_close(updates, whole[0])


@pytest.mark.parametrize("masters", [False, True])
def test_capturable_adam_is_adam(masters: bool) -> None:
    """With tensors for numbers, scaled gradients and masters, the step is that of the plain operation."""
    plain, ours = step_lists(4), step_lists(4)
    ours[0] = [gradient * 4 for gradient in ours[0]]
    multi_tensor_applier(amp_C.multi_tensor_adam, flag(), plain, 0.1, 0.9, 0.99, 1e-8, 3, 1, 1, 0.01)
    args: list[Any] = [
        torch.tensor(0.1),
        0.9,
        0.99,
        1e-8,
        torch.tensor([3]),
        1,
        1,
        0.01,
        torch.tensor([0.25]),
    ]
    if masters:
        models = [tensor.half() for tensor in ours[1]]
        used = [ours[0], models, ours[2], ours[3], ours[1]]
        multi_tensor_applier(amp_C.multi_tensor_adam_capturable_master, flag(), used, *args)
        assert all(torch.equal(model, master.half()) for model, master in zip(models, ours[1], strict=True))
    else:
        multi_tensor_applier(amp_C.multi_tensor_adam_capturable, flag(), ours, *args)
    torch.testing.assert_close(ours, plain)


def test_flagged_steps_change_nothing() -> None:
    """SGD, capturable Adam and mixed-precision LAMB leave every tensor alone under a raised flag."""
    one = torch.ones(1)
    raised = torch.ones(1, dtype=torch.int32)
    sgd, adam, lamb = step_lists(3), step_lists(4), step_lists(4)
    multi_tensor_applier(amp_C.multi_tensor_sgd, raised, sgd, 0.1, 0.9, 0.0, 0.1, False, True, False, 1.0)
    multi_tensor_applier(
        amp_C.multi_tensor_adam_capturable, raised, adam, one, 0.9, 0.99, 1e-8, one.int(), 1, 1, 0.1, one / 4
    )
    numbers = (one, 0.9, 0.99, 1e-8, one.int(), 1, 0.1, 1, 1, one, one, None, one, one)
    multi_tensor_applier(amp_C.multi_tensor_lamb_mp, raised, lamb, *numbers)
    torch.testing.assert_close(sgd, step_lists(3), rtol=0, atol=0)
    torch.testing.assert_close(adam, step_lists(4), rtol=0, atol=0)
    torch.testing.assert_close(lamb, step_lists(4), rtol=0, atol=0)


def test_remaining_steps_through_the_applier() -> None:
    """SGD with fp16 copies, Adagrad, NovoGrad and mixed-precision LAMB take Apex's argument order."""
    grads, params, buffers = step_lists(3)
    expected = [p - 0.1 * (0.5 * g + 0.2 * p) for p, g in zip(params, grads, strict=True)]
    halves = [torch.zeros_like(p, dtype=torch.float16) for p in params]
    multi_tensor_applier(
        amp_C.multi_tensor_sgd,
        flag(),
        [grads, params, buffers, halves],
        0.2,
        0.9,
        0.0,
        0.1,
        False,
        True,
        False,
        0.5,
    )
    torch.testing.assert_close(params, expected)
    assert all(torch.equal(half, param.half()) for half, param in zip(halves, params, strict=True))

    grads, params, sums = step_lists(3)
    expected = [
        p - 0.1 * (g / ((h + g * g).sqrt() + 1e-3) + 0.2 * p)
        for g, p, h in zip(grads, params, sums, strict=True)
    ]
    multi_tensor_applier(amp_C.multi_tensor_adagrad, flag(), [grads, params, sums], 0.1, 1e-3, 1, 0.2)
    torch.testing.assert_close(params, expected)

    grads, params, moments = step_lists(3)
    norms = torch.stack([g.abs().max() for g in grads])
    expected = [
        p - 0.1 * ((0.9 * m + 0.1 * g) / (1 - 0.9**2) / (n / (1 - 0.99**2) ** 0.5 + 1e-3) + 0.2 * p)
        for g, p, m, n in zip(grads, params, moments, norms, strict=True)
    ]
    args = (norms.clone(), 0.1, 0.9, 0.99, 1e-3, 2, 1, 0.2, 1, 1, 0)
    multi_tensor_applier(amp_C.multi_tensor_novograd, flag(), [grads, params, moments], *args)
    torch.testing.assert_close(params, expected)

    plain, mixed = step_lists(4), step_lists(4)
    norm, _ = amp_C.multi_tensor_l2norm(1, flag(), [plain[0]], False)
    multi_tensor_applier(
        amp_C.multi_tensor_lamb, flag(), plain, 0.1, 0.9, 0.99, 1e-6, 3, 1, 0.01, 1, 1, norm, 0.5, False
    )
    mixed[0] = [gradient * 8 for gradient in mixed[0]]
    halves = [tensor.half() for tensor in mixed[1]]
    numbers = (
        torch.tensor(0.1),
        0.9,
        0.99,
        1e-6,
        torch.tensor([3]),
        1,
        0.01,
        1,
        1,
        norm * 8,
        torch.tensor([4.0]),
    )
    multi_tensor_applier(
        amp_C.multi_tensor_lamb_mp,
        flag(),
        [*mixed, halves],
        *numbers,
        False,
        torch.zeros(1),
        torch.tensor([1 / 8]),
    )
    torch.testing.assert_close(mixed[1:], plain[1:])
    assert all(torch.equal(half, param.half()) for half, param in zip(halves, mixed[1], strict=True))


def mixed_tensors() -> list[Tensor]:
    """Tensors of several layouts and sizes, one of them larger than those that share a product."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(7,), (), (0,), (3, 5), (2**18 + 1,), (4, 3, 2, 2), (5, 1), (2, 2), (9,), (1, 6)]
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    tensors[5] = tensors[5].to(memory_format=torch.channels_last)
    return [
        *tensors,
        torch.randn(4, 6, generator=generator)[:, ::2],
        torch.randn(3, generator=generator).double(),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_shared_products_have_the_same_bits(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Small tensors that share one product get the bits, dtypes and strides of one product for each tensor."""
    tensors = mixed_tensors()
    scalars = torch.linspace(0.1, 3.0, len(tensors), dtype=dtype)
    expected = [
        torch._foreach_mul(tensors, list(scalars.unbind())),
        torch._foreach_div(tensors, list(scalars.unbind())),
    ]
    expected_in_place = [tensor.clone() for tensor in tensors]
    torch._foreach_mul_(expected_in_place, list(scalars.unbind()))
    monkeypatch.setattr(arithmetic, "_DEVICE_TYPES", frozenset({"cpu"}))
    monkeypatch.setattr(arithmetic, "_MIN_SHARED_TENSORS", 1)
    in_place = [tensor.clone() for tensor in tensors]
    arithmetic.multiply_each_(in_place, scalars)
    results = [arithmetic.multiply_each(tensors, scalars), arithmetic.divide_each(tensors, scalars)]
    for ours, theirs in zip([*results, in_place], [*expected, expected_in_place], strict=True):
        for ours_one, theirs_one in zip(ours, theirs, strict=True):
            assert ours_one.dtype is theirs_one.dtype
            assert ours_one.stride() == theirs_one.stride()
            assert torch.equal(ours_one, theirs_one)
