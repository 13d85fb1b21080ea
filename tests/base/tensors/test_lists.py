"""Lists of tensors of several dtypes, tensors inside containers, and the first difference of two states."""

import dataclasses
import math
from collections import UserDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ampcompare.apex.fp16_utils import (
    FP16_Optimizer,
    master_params_to_model_params,
    network_to_half,
    prep_param_lists,
)
from ampcompare.apex.multi_tensor_apply import optimizer_math
from ampcompare.apex.multi_tensor_apply.arithmetic import (
    add_scaled_into,
    as_fp32_tensors,
    copy_into_targets,
    scale_into,
)
from ampcompare.base.tensors.lists import copies_on_host, copy_tensors_by_dtype
from ampcompare.base.tensors.skippable_step import has_changing_global_step_hooks
from ampcompare.base.tensors.tree import (
    cast_floating_tensors,
    first_difference_text,
    first_floating_type,
    map_tensors_in_tree,
    tensors_in_value,
)
from ampcompare.training.ledger import StepTypeRecorder
from ampcompare.training.policies import are_weights_finite
from ampcompare.training.precision.base import make_precision

HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32


class Lists(TorchDispatchMode):
    """Notes list operations that get several dtypes on one side."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        self.mixed: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name.startswith(("_foreach_", "_amp_foreach_", "_fused_")):
            self.seen += 1
            lists = [
                arg for arg in args if isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], Tensor)
            ]
            self.mixed += [name for tensors in lists if len({tensor.dtype for tensor in tensors}) > 1]
        return func(*args, **(kwargs or {}))


def tensors(*dtypes: torch.dtype) -> list[Tensor]:
    """Return a small tensor of each dtype, all of them different."""
    return [torch.linspace(place, place + 1, 6).reshape(2, 3).to(dtype) for place, dtype in enumerate(dtypes)]


MIXED, WIDE = (HALF, FLOAT, BFLOAT, FLOAT), (FLOAT,) * 4


def _fp16_utils() -> None:
    model = network_to_half(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    params, masters = prep_param_lists(model)
    with torch.no_grad():
        for master in masters:
            master.fill_(1 / 3)
    master_params_to_model_params(params, masters)
    assert all(torch.equal(param, torch.full_like(param, 1 / 3)) for param in params)


def _adam() -> None:
    hyper: dict[str, Any] = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "step": 1, "adam_w": True}
    copies = tensors(*MIXED)
    params = tensors(*WIDE)
    rest = (tensors(*WIDE), tensors(*MIXED))
    optimizer_math.make_adam_step(
        tensors(*MIXED), params, *rest, bias_correction=True, weight_decay=0.0, copies=copies, **hyper
    )
    assert all(torch.equal(copy, param.to(copy.dtype)) for copy, param in zip(copies, params, strict=True))


def _sgd() -> None:
    hyper: dict[str, Any] = {"momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}
    copies = tensors(*MIXED)
    args = (tensors(*MIXED), tensors(*MIXED), tensors(*WIDE))
    optimizer_math.make_sgd_step(
        *args, lr=0.1, first_run=True, wd_after_momentum=False, copies=copies, **hyper
    )


def _lamb() -> None:
    hyper: dict[str, Any] = {
        "lr": 0.1,
        "beta1": 0.9,
        "beta2": 0.99,
        "eps": 1e-6,
        "step": 1,
        "bias_correction": True,
    }
    hyper |= {"weight_decay": 0.1, "grad_averaging": True, "adam_w": True, "use_nvlamb": False}
    args = (tensors(*MIXED), tensors(*WIDE), tensors(*WIDE), tensors(*WIDE))
    optimizer_math.make_lamb_step(*args, divisor=torch.ones(()), copies=tensors(*MIXED), **hyper)


def _fp16_optimizer() -> None:
    model = network_to_half(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), verbose=False)
    optimizer.backward(model(torch.ones(2, 4)).float().sum())
    optimizer.step()
    optimizer.zero_grad()


def _static_scale(arm: str) -> Callable[[], None]:
    def step() -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        precision = make_precision(arm)
        (model,), (optimizer,) = precision.prepare([model], [torch.optim.SGD(model.parameters(), lr=0.1)])  # type: ignore[assignment]
        precision.backward(
            model(torch.linspace(-1, 1, 24).reshape(6, 4)).float().square().mean(), [optimizer]
        )
        precision.step(optimizer)

    return step


def _looked_at_step() -> None:
    parameters = [*nn.Linear(2, 2).half().parameters(), *nn.Linear(2, 2).parameters()]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer, look = torch.optim.SGD(parameters, lr=0.1), StepTypeRecorder(lambda: parameters)
    look.begin(0, [optimizer], detailed=True)
    assert not has_changing_global_step_hooks()  # a look does not keep steps on the host
    optimizer.step()
    look.end([optimizer])


USERS: dict[str, Callable[[], Any]] = {
    "fp16_utils": _fp16_utils,
    "FP16_Optimizer": _fp16_optimizer,
    "adam": _adam,
    "sgd": _sgd,
    "lamb": _lamb,
    "write_back": lambda: copy_into_targets(tensors(*MIXED), tensors(*WIDE)),
    "to_fp32": lambda: as_fp32_tensors(tensors(*MIXED)),
    "scale": lambda: scale_into(tensors(*MIXED), tensors(*reversed(MIXED)), 0.5),
    "axpby": lambda: add_scaled_into(tensors(*MIXED), tensors(*WIDE), tensors(*MIXED), 2.0, 3.0),
    "weights_finite": lambda: are_weights_finite([nn.Linear(2, 2), nn.Linear(2, 2).half()]),
    "ledger": _looked_at_step,
    "half:bn_fp32,loss_scale=8": _static_scale("half:bn_fp32,loss_scale=8"),
    "half:bn_fp32,dynamic": _static_scale("half:bn_fp32,dynamic"),
    "half:bn_fp32,masters=fp32,dynamic": _static_scale("half:bn_fp32,masters=fp32,dynamic"),
}


@pytest.mark.filterwarnings("ignore::ampcompare.apex.DeprecatedFeatureWarning")
@pytest.mark.parametrize("name", USERS)
def test_each_call_gets_one_dtype(name: str) -> None:
    """What takes lists of several dtypes never hands one on: torch 2.5 to 2.10 would write garbage on CUDA."""
    with Lists() as mode:
        USERS[name]()
    assert mode.seen
    assert mode.mixed == []


@pytest.mark.parametrize("sources", [WIDE, MIXED, tuple(reversed(MIXED))])
def test_values_are_rounded_into_their_targets(sources: tuple[torch.dtype, ...]) -> None:
    """Each target gets its own source, rounded once, whatever the dtypes and the strides."""
    targets, values = tensors(*MIXED), [tensor.t().contiguous().t() / 3 for tensor in tensors(*sources)]
    copy_tensors_by_dtype(targets, values)
    assert all(
        torch.equal(target, value.to(target.dtype)) for target, value in zip(targets, values, strict=True)
    )
    copy_tensors_by_dtype([], [])


def test_a_model_with_an_empty_parameter_can_be_finite() -> None:
    """A parameter without elements has no largest one, and is no reason to fail."""
    model = nn.Linear(2, 2)
    model.empty = nn.Parameter(torch.empty(0))
    assert are_weights_finite([model])


def test_one_transfer_for_each_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies come back in order and shape, counts without a dimension among them, and share nothing."""
    transfers: list[int] = []
    cpu = Tensor.cpu
    monkeypatch.setattr(Tensor, "cpu", lambda self: transfers.append(self.numel()) or cpu(self))
    sources = [*tensors(*MIXED), torch.tensor(7), torch.tensor(9)]
    copies = copies_on_host(sources)
    assert sorted(transfers) == [2, 6, 6, 12]
    for copy, source in zip(copies, sources, strict=True):
        assert (copy.dtype, copy.shape, copy.tolist()) == (source.dtype, source.shape, source.tolist())
        source.zero_()
    assert (copies[4], copies[5], copies[1][1, 2]) == (7, 9, 2)
    assert copies_on_host([]) == []


Pair = namedtuple("Pair", ["left", "right"])
A, B = torch.ones(1), torch.ones(2, dtype=torch.int64)


@dataclasses.dataclass(frozen=True)
class Batch:
    """What some scripts pass to a model."""

    left: Any
    right: Any
    rest: Any = dataclasses.field(default="text", init=False)


@pytest.mark.parametrize(
    "value",
    [(A, B), [A, [B]], {"a": A, "b": (B, "text")}, Pair(A, {"b": B}), UserDict(a=A, b=B), Batch(A, [B])],
)
def test_tensors_come_in_order(value: Any) -> None:
    assert [id(tensor) for tensor in tensors_in_value(value)] == [id(A), id(B)]


def test_containers_keep_their_types() -> None:
    """Only tensors change; named tuples, lists and other values stay what they are."""
    changed = map_tensors_in_tree(Pair([A], {"b": B, "c": "text"}), lambda tensor: tensor + 1)
    assert isinstance(changed, Pair)
    batch = map_tensors_in_tree(Batch(A, [B]), lambda tensor: tensor + 1)
    assert isinstance(batch, Batch)
    assert (batch.left.item(), batch.right[0].tolist(), batch.rest) == (2, [2, 2], "text")
    assert (changed.left[0].item(), changed.right["b"].tolist(), changed.right["c"]) == (2, [2, 2], "text")


def test_only_floating_tensors_are_cast() -> None:
    half = cast_floating_tensors([B, A], torch.float16)
    assert [tensor.dtype for tensor in half] == [torch.int64, torch.float16]
    assert first_floating_type(half) is torch.float16
    assert first_floating_type([B, "text"]) is None


ONE: dict[str, Any] = {"model": {"weight": torch.tensor([1.0, 0.0])}, "steps": [1, (2.5, None)], "name": "a"}


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({**ONE}, ""),
        ({**ONE, "name": "b"}, "name is 'a', then 'b'"),
        ({**ONE, "more": 1}, "more is only in the second"),
        ({"model": ONE["model"], "steps": ONE["steps"]}, "name is only in the first"),
        ({**ONE, "steps": [1, (3.5, None)]}, "steps.1.0 is 2.5, then 3.5"),
        ({**ONE, "steps": [1]}, "steps has 2 entries, then 1"),
        (
            {**ONE, "model": {"weight": torch.tensor([1.0, -0.0])}},
            "model.weight differs in 1 of 2 elements, first in 1: 0.0, then -0.0",
        ),
        (
            {**ONE, "model": {"weight": torch.tensor([1.0, 0.0]).half()}},
            "model.weight has dtype torch.float32, then torch.float16",
        ),
        (
            {**ONE, "model": {"weight": torch.zeros(2, 1)}},
            "model.weight has shape torch.Size([2]), then torch.Size([2, 1])",
        ),
    ],
)
def test_the_first_difference_is_named(other: dict[str, Any], said: str) -> None:
    """Values, kinds, lengths and single bits of a tensor, by their place."""
    assert first_difference_text(ONE, other) == said


def test_nan_equals_nan_and_what_is_set_apart_is_not_looked_at() -> None:
    """A NaN is a result like any other; keys set apart may differ or be missing at any depth."""
    nan = torch.tensor([math.nan])
    assert first_difference_text({"a": math.nan, "b": nan}, {"a": math.nan, "b": nan.clone()}) == ""
    assert (
        first_difference_text(
            {"x": [{"seconds": 1}]}, {"x": [{"seconds": 2}], "seconds": 3}, ignored_keys=("seconds",)
        )
        == ""
    )
