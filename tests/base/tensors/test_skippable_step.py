"""Steps that are skipped on the device, in every arm with a dynamic scale, against those skipped on the host."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from ampcompare.apex.amp import _amp_state
from ampcompare.apex.amp._engine import device_skip
from ampcompare.base.tensors import skippable_step
from ampcompare.base.tensors.skippable_step import is_step_skippable, make_step_skippable
from ampcompare.training.precision.base import Precision, make_precision, owned_params
from tests.covering import covering

pytestmark = pytest.mark.integration  # every optimizer is trained with every arm

ARMS = (
    "apex:O1,engine=compat",
    "apex:O2,engine=compat",
    "apex:O3,loss_scale=dynamic,engine=compat",
    "native:fp16,growth_interval=3",
    "half:dynamic,growth_interval=3",
    "half:masters=fp32,dynamic,growth_interval=3",
    "half:bf16,masters=fp32,dynamic,growth_interval=3",
)
Make = Callable[[Iterable[Tensor]], Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda params: SGD(params, lr=0.05, foreach=True),
    "momentum": lambda params: SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-3, foreach=True),
    "nesterov": lambda params: SGD(params, lr=0.05, momentum=0.9, nesterov=True),
    "dampening": lambda params: SGD(
        params, lr=0.05, momentum=0.9, dampening=0.5, maximize=True, foreach=False
    ),
    "adam": lambda params: Adam(params, lr=0.01, eps=1e-3, weight_decay=1e-3, foreach=True),
    "adamw": lambda params: AdamW(params, lr=0.01, eps=1e-3, amsgrad=True),
    "fused": lambda params: SGD(params, lr=0.05, fused=True),
}
STEPS, OVERFLOWS = 11, (0, 1, 6, 8, 9)  # scales grow after three steps without one
X = torch.linspace(-1, 1, 24).reshape(6, 4)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a CPU be served like a device that makes the host wait."""
    monkeypatch.setattr(device_skip, "_DEVICE_TYPES", frozenset({"cpu", "cuda"}))
    monkeypatch.setattr("ampcompare.training.precision.half._DEVICE_TYPES", frozenset({"cpu", "cuda"}))
    yield
    _amp_state.close()


def net() -> nn.Sequential:
    """A network with batch norm, whose statistics no overflow reaches: it is in the loss."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


class Training:
    """An arm in training; `on_device` chooses who skips."""

    def __init__(self, arm: str, make: Make, *, on_device: bool, num_optimizers: int = 1) -> None:
        _amp_state.close()
        model = net()
        params = list(model.parameters())
        shares = [params] if num_optimizers == 1 else [params[:2], params[2:]]
        optimizers = [make(share) for share in shares]
        if on_device:
            for optimizer in optimizers:
                make_step_skippable(optimizer)
        self.precision: Precision = make_precision(arm)
        (self.model,), self.optimizers = self.precision.prepare([model], optimizers)
        if arm.startswith("apex"):
            _amp_state.loss_scalers[0]._scale_seq_len = 3  # type: ignore[attr-defined]
            if not on_device:  # hooks keep a fused optimizer on the path of the host, too
                for optimizer in optimizers:
                    optimizer.register_step_post_hook(lambda *_: None)

    def step(self, *, overflow: bool = False, accumulation: int = 1, clip: bool = False) -> Any:
        for index in range(accumulation):
            with self.precision.autocast():
                loss = self.model(X * (index + 1)).float().square().mean() / accumulation
                if overflow and index == 0:
                    loss = loss * float("inf")
            self.precision.backward(loss, self.optimizers, delay_unscale=index < accumulation - 1)
        if clip:
            for optimizer in self.optimizers:
                nn.utils.clip_grad_norm_(self.precision.unscale(optimizer), 0.5)
        outcome = self.precision.step(*self.optimizers)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        return outcome

    def weights(self) -> list[Tensor]:
        """Copies of the weights of the model, and of what the optimizers step."""
        owned = [param for optimizer in self.optimizers for param in owned_params(optimizer)]
        return [param.detach().clone() for param in [*self.model.parameters(), *owned]]

    def states(self) -> list[Any]:
        """The state dicts of the optimizers, as lists of tensors by name."""
        return [
            {
                (index, name): value
                for index, state in optimizer.state_dict()["state"].items()
                for name, value in state.items()
            }
            for optimizer in self.optimizers
        ]


def equal(one: Any, other: Any) -> bool:
    """Return whether tensors, in lists and dicts, have equal bits."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return (
            one.dtype is other.dtype
            and one.shape == other.shape
            and one.view(torch.uint8 if one.dim() else one.dtype).equal(
                other.view(torch.uint8 if other.dim() else other.dtype)
            )
        )
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(equal(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def trajectory(arm: str, name: str, *, on_device: bool, num_optimizers: int = 1, **options: Any) -> list[Any]:
    """Weights and outcome of each step, and the state at the end."""
    training = Training(arm, OPTIMIZERS[name], on_device=on_device, num_optimizers=num_optimizers)
    outcomes, seen = [], []
    for index in range(STEPS):
        outcomes.append(training.step(overflow=index in OVERFLOWS, **options))
        seen.append(training.weights())
    told = [(outcome.applied, outcome.loss_scales) for outcome in outcomes]
    assert [all(applied) for applied, _ in told] == [index not in OVERFLOWS for index in range(STEPS)]
    return [seen, told, training.states(), training.precision.state_dict()]


@pytest.mark.parametrize(
    ("arm", "name"),
    [(arm, name) for arm in ARMS for name in OPTIMIZERS if name in ("momentum", "adam") or arm == ARMS[1]],
)
def test_bits_are_those_of_a_skip_on_the_host(arm: str, name: str) -> None:
    """Weights, masters, moments, counts, scales and outcomes are equal, over skips at the start and in a row."""
    assert equal(trajectory(arm, name, on_device=True), trajectory(arm, name, on_device=False))


@covering(
    {
        "name": ["momentum", "adam"],
        "arm": ARMS,
        "options": [
            pytest.param({"num_optimizers": 2}, id="optimizers"),
            pytest.param({"accumulation": 2}, id="accumulation"),
            pytest.param({"clip": True}, id="clip"),
        ],
    }
)
def test_bits_with_several_optimizers_micro_batches_and_clipping(
    arm: str, name: str, options: dict[str, Any]
) -> None:
    """The same holds for two optimizers of one update, for accumulated gradients, and where gradients are clipped."""
    assert equal(
        trajectory(arm, name, on_device=True, **options), trajectory(arm, name, on_device=False, **options)
    )


@pytest.mark.requires(cuda=1)
@pytest.mark.parametrize("name", ["momentum", "adam"])
@pytest.mark.parametrize("arm", ARMS)
def test_on_a_gpu(arm: str, name: str) -> None:
    """On a GPU no step makes the host wait in torch's eyes, and weights and counts are those of a skip on the host."""
    results = []
    for on_device in (True, False):
        _amp_state.close()
        model = net().cuda()
        x = X.cuda()
        optimizer = OPTIMIZERS[name](model.parameters())
        if on_device:
            make_step_skippable(optimizer)
        precision = make_precision(arm, device="cuda:0")
        (model,), (optimizer,) = precision.prepare([model], [optimizer])  # type: ignore[assignment]
        outcomes = []
        try:
            for index in range(12):
                if index == 4 and on_device:
                    torch.cuda.set_sync_debug_mode("error")
                with precision.autocast():
                    loss = model(x).float().square().mean()
                    if index in (0, 1, 7, 8):
                        loss = loss * float("inf")
                precision.backward(loss, [optimizer])
                outcomes.append(precision.step(optimizer))
                optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        told = [(outcome.applied, outcome.loss_scales) for outcome in outcomes]
        state = [
            value.cpu() for entry in optimizer.state_dict()["state"].values() for value in entry.values()
        ]
        results.append([told, [param.detach().cpu() for param in model.parameters()], state])
    assert equal(*results)


@pytest.mark.parametrize("arm", ["apex:O2,engine=compat", "native:fp16", "half:masters=fp32,dynamic"])
def test_a_state_dict_in_between_does_not_count_a_skipped_step(arm: str) -> None:
    for overflows, count in (((0,), None), ((2,), 2.0)):
        training = Training(arm, OPTIMIZERS["adam"], on_device=True)
        for index in range(3):
            training.step(overflow=index in overflows)
            if index == overflows[0] == 0:
                break
        (optimizer,) = training.optimizers
        assert is_step_skippable(optimizer)
        state = optimizer.state_dict()
        counts = {entry["step"].item() for entry in state["state"].values()}
        assert counts == (set() if count is None else {count})
        optimizer.load_state_dict(state)
        training.step()
        assert {entry["step"].item() for entry in optimizer.state.values()} == {(count or 0.0) + 1}


def test_a_state_that_is_loaded_after_a_skipped_step_stays() -> None:
    source = Training("native:fp16", OPTIMIZERS["adam"], on_device=False)
    source.step()
    training = Training("native:fp16", OPTIMIZERS["adam"], on_device=True)
    training.step(overflow=True)
    training.optimizers[0].load_state_dict(source.optimizers[0].state_dict())
    training.step()
    assert {state["step"].item() for state in training.optimizers[0].state.values()} == {2.0}


def test_hooks_see_the_steps_that_are_taken_only() -> None:
    training = Training("native:fp16", OPTIMIZERS["momentum"], on_device=True)
    calls: list[int] = []
    training.optimizers[0].register_step_pre_hook(lambda *_: calls.append(1))
    assert [training.step(overflow=index == 1).applied for index in range(3)] == [(True,), (False,), (True,)]
    assert len(calls) == 2
    plain = Training("native:fp16", OPTIMIZERS["momentum"], on_device=False)
    for index in range(3):
        plain.step(overflow=index == 1)
    assert equal(training.weights(), plain.weights())


def test_gradients_that_grad_scaler_leaves_scaled_are_unscaled_as_by_its_own_pass() -> None:
    """`GradScaler.step` without `unscale_`, with a scale that has no exact inverse: the bits of its own skip."""

    def run(on_device: bool) -> list[Any]:
        torch.manual_seed(0)
        model = net()
        optimizer = OPTIMIZERS["adam"](model.parameters())
        if on_device:
            make_step_skippable(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=1000.3, growth_interval=2, growth_factor=1.7)
        seen = []
        for index in range(8):
            loss = model(X).square().mean()
            scaler.scale(loss * float("inf") if index in (0, 3, 4) else loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen.append([param.detach().clone() for param in model.parameters()])
        return [seen, list(optimizer.state_dict()["state"].values())]

    assert equal(run(True), run(False))


def test_half_keeps_its_rule_on_the_device() -> None:
    """The scale goes down to 1 and no further, and doubles after as many good steps in a row as on the host."""
    scales = {}
    for on_device in (True, False):
        training = Training(
            "half:masters=fp32,dynamic,init_scale=4,growth_interval=2", OPTIMIZERS["sgd"], on_device=on_device
        )
        outcomes = [training.step(overflow=index in (0, 1, 2, 6)) for index in range(9)]
        scales[on_device] = [outcome.loss_scales[0] for outcome in outcomes]
        assert training.precision.loss_scales() == (2.0,)
        assert training.precision.state_dict() == {"loss_scale": 2.0, "good_steps": 0}
    assert scales[True] == scales[False] == [2, 1, 1, 1, 2, 2, 1, 1, 2]


def test_a_scale_without_an_exact_inverse_stays_on_the_host() -> None:
    """A scale of 1000 would get other roundings on the device, so `half` keeps reading its flag."""
    training = Training("half:dynamic,init_scale=1000", OPTIMIZERS["momentum"], on_device=True)
    training.step()
    assert training.precision._on_device is None  # type: ignore[attr-defined]
    assert training.precision.loss_scales() == (1000.0,)


def test_only_known_optimizers() -> None:
    """An optimizer whose state is not known is refused by name, and a second call changes nothing."""
    params = [nn.Parameter(torch.ones(2))]
    with pytest.raises(TypeError, match="cannot skip a step of RMSprop on the device: only SGD, Adam, AdamW"):
        make_step_skippable(torch.optim.RMSprop(params))
    optimizer = SGD(params, lr=0.1)
    make_step_skippable(optimizer)
    step = optimizer.step
    make_step_skippable(optimizer)
    assert optimizer.step == step
    assert skippable_step.is_step_skippable(optimizer)
