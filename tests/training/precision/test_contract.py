"""Every registered backend against the traps that the contract encodes; a new backend is tested by its description."""

import inspect
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from ampcompare.apex.amp import _amp_state
from ampcompare.apex.amp._engine import device_skip
from ampcompare.backends.arm import Arm
from ampcompare.backends.catalog import BUILT_IN, described_backends
from ampcompare.backends.spec import BackendSpec, ContractTestArm
from ampcompare.base.errors import PreparationError, UnsupportedCombination
from ampcompare.base.tensors.sharded import gather_whole
from ampcompare.base.tensors.skippable_step import make_step_skippable
from ampcompare.training.precision.base import Precision, PrecisionWrapper, make_precision
from ampcompare.training.process.process_group import choose_group_backend, process_group_of_one

LR = 0.5


def _arms(
    keep: Callable[[BackendSpec, ContractTestArm], bool] = lambda spec, arm: True,
) -> list[ParameterSet]:
    """The contract arms of every described backend, skipped with the line to type if a library is not installed."""
    parameters = []
    for spec in described_backends().values():
        lacks = spec.library.why_missing() if spec.library is not None else ""
        mark = pytest.mark.skipif(bool(lacks), reason=lacks or "-")
        parameters += [pytest.param(arm.text, marks=mark) for arm in spec.contract if keep(spec, arm)]
    return parameters


ALL = _arms()
FIRST = _arms(lambda spec, arm: arm is spec.contract[0])
SHARING = _arms(lambda spec, arm: arm.shares_steps)
NOT_SHARING = _arms(lambda spec, arm: not arm.shares_steps)
SKIPPING = _arms(lambda spec, arm: arm.skips_steps)
SKIPPING_WHOLE = _arms(lambda spec, arm: arm.skips_steps and not spec.parallel)  # it copies weights
OWN = _arms(lambda spec, arm: Arm.parse(arm.text).underlying_arm is None)
NEVER_SKIPPING = _arms(lambda spec, arm: not arm.skips_steps and Arm.parse(arm.text).underlying_arm is None)


@pytest.fixture(autouse=True)
def scaled_on_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let libraries that have no fp16 on a CPU take it, with a scaler, by their own code for GPUs."""
    arm = request.node.callspec.params.get("arm", "") if hasattr(request.node, "callspec") else ""
    if arm == "accelerate:fp16":
        from accelerate import Accelerator

        initialize = Accelerator.__init__

        def scaled(self: Accelerator, **options: object) -> None:
            initialize(self, **options)
            self.native_amp, self.scaler = True, torch.amp.GradScaler("cpu")

        monkeypatch.setattr(Accelerator, "__init__", scaled)
    elif arm == "fabric:16-mixed":
        from lightning_fabric.connector import _Connector
        from lightning_fabric.plugins import MixedPrecision

        monkeypatch.setattr(
            _Connector, "_check_and_init_precision", lambda self: MixedPrecision("16-mixed", "cpu")
        )


@pytest.fixture(autouse=True)
def a_group_for_shards(request: pytest.FixtureRequest, device: torch.device) -> Iterator[None]:
    """Give arms that shard weights the process group that they need, of this process alone."""
    arm = request.node.callspec.params.get("arm", "") if hasattr(request.node, "callspec") else ""
    if not arm.startswith("fsdp"):
        yield
        return
    with process_group_of_one(choose_group_backend("auto", str(device)), device):
        yield


def net(device: torch.device, seed: int = 0) -> nn.Sequential:
    """A linear layer with batch norm, on a grid coarse enough for bf16."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.BatchNorm1d(3), nn.Linear(3, 2)).to(device)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_((param * 16).round() / 16)
    return model


def batch(device: torch.device, rows: int = 8) -> Tensor:
    """Inputs on a coarse grid, different in every row."""
    return (torch.arange(rows * 4, device=device).view(rows, 4).float().sin() * 16).round() / 16


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """A loss whose gradients are of order 1."""
    return model(x).float().square().mean()


def start(arm: str, device: torch.device) -> tuple[Precision, nn.Module, SGD]:
    precision = make_precision(arm, device=str(device))
    model = net(device)
    (model,), (optimizer,) = precision.prepare([model], [SGD(model.parameters(), lr=LR)])  # type: ignore[assignment]
    optimizer.zero_grad()
    return precision, model, optimizer


def start_two(arm: str, device: torch.device) -> tuple[Precision, nn.Module, list[Optimizer]]:
    """A prepared model with two optimizers."""
    precision = make_precision(arm, device=str(device))
    model = net(device)
    optimizers = [
        SGD(model[0].parameters(), lr=LR),
        SGD([*model[1].parameters(), *model[2].parameters()], lr=LR),
    ]
    (prepared,), optimizers = precision.prepare([model], optimizers)  # type: ignore[assignment]
    for optimizer in optimizers:
        optimizer.zero_grad()
    return precision, prepared, list(optimizers)


def stepped(parts: list[Tensor], device: torch.device) -> list[Tensor]:
    """The weights after a step of fp32 by the mean loss of the parts."""
    reference = net(device)
    for part in parts:
        (loss_of(reference, part) / len(parts)).backward()
    return [param.detach() - LR * param.grad for param in reference.parameters() if param.grad is not None]


def weights(model: nn.Module) -> list[Tensor]:
    return [gather_whole(param.detach()).float().clone() for param in model.parameters()]


def backward(
    precision: Precision, model: nn.Module, optimizers: list[SGD], x: Tensor, **options: object
) -> None:
    """One forward and backward pass as the loop makes it."""
    with precision.autocast():
        loss = loss_of(model, x)
    precision.backward(loss, optimizers, **options)


def test_every_builtin_backend_has_contract_arms() -> None:
    """No built-in backend escapes the contract, except Horovod (it has a stub) and `script` (replaces nothing)."""
    assert [name for name, spec in BUILT_IN.items() if not spec.contract] == ["horovod", "script"]


@pytest.mark.parametrize("arm", OWN)
def test_the_description_names_the_type_that_computes(arm: str, device: torch.device) -> None:
    """`doctor` says of an arm's 16-bit products what the arm does, without building it."""
    parsed = Arm.parse(arm)
    dtype = make_precision(arm, device=str(device)).half_dtype
    assert parsed.roles is not None
    assert parsed.roles.half == {torch.float16: "fp16", torch.bfloat16: "bf16", None: ""}[dtype]


@pytest.mark.parametrize("arm", ALL)
def test_gradients_are_unscaled_once_and_a_step_moves_the_weights_by_them(
    arm: str, device: torch.device
) -> None:
    """Clipping on what `unscale` returns sees gradients of fp32's size; `backward` and `scale_loss` give the same bits.

    A second call of `unscale` changes nothing, and a step uses them: set to zero they move no weight.
    """
    reference = net(device)
    loss_of(reference, batch(device)).backward()
    expected_norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1e9)
    expected = [
        param.detach() - LR * param.grad for param in reference.parameters() if param.grad is not None
    ]
    precision, model, optimizer = start(arm, device)
    backward(precision, model, [optimizer], batch(device))
    params = precision.unscale(optimizer)
    owned = {id(param) for group in optimizer.param_groups for param in group["params"]}
    assert {id(param) for param in params} == owned
    norm = gather_whole(torch.nn.utils.clip_grad_norm_(params, 1e9))
    torch.testing.assert_close(norm.float(), expected_norm, rtol=0.05, atol=0.01)
    before = [None if param.grad is None else param.grad.clone() for param in params]
    assert any(grad is not None for grad in before)
    assert_same(precision.unscale(optimizer), before)
    for param in params:
        if param.grad is not None:
            param.grad.zero_()
    frozen = weights(model)
    precision.step(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(weights(model), frozen, strict=True))
    optimizer.zero_grad()
    with precision.autocast():
        loss = loss_of(model, batch(device))
    with precision.scale_loss(loss, [optimizer]) as scaled:
        scaled.backward()
    params = precision.unscale(optimizer)
    torch.nn.utils.clip_grad_norm_(params, 1e9)
    assert_same(params, before)
    assert precision.step(optimizer).applied == (True,)
    torch.testing.assert_close(weights(model), expected, rtol=0.05, atol=0.02)


def assert_same(params: Iterable[Tensor], gradients: Iterable[Tensor | None]) -> None:
    """Check that gradients have the bits of those given, or are missing as well."""
    for param, grad in zip(params, gradients, strict=True):
        assert (param.grad is None) == (grad is None)
        if grad is not None:
            assert param.grad is not None
            assert torch.equal(param.grad, grad)


@pytest.mark.parametrize("arm", SKIPPING)
def test_overflow_skips_the_step_and_halves_the_scale(arm: str, device: torch.device) -> None:
    """An infinite loss leaves the weights alone, halves the scale, and the next step is applied."""
    precision, model, optimizer = start(arm, device)
    scale = precision.loss_scales()[0]
    before = weights(model)
    backward(precision, model, [optimizer], batch(device) * float("inf"))
    skipped = precision.step(optimizer)
    optimizer.zero_grad()
    next(module for module in model.modules() if isinstance(module, nn.BatchNorm1d)).reset_running_stats()
    assert all(torch.equal(a, b) for a, b in zip(weights(model), before, strict=True))
    backward(precision, model, [optimizer], batch(device))
    applied = precision.step(optimizer)
    assert (skipped.applied, skipped.loss_scales) == ((False,), (scale / 2,))
    assert (applied.applied, applied.loss_scales) == ((True,), (scale / 2,))
    assert precision.loss_scales() == (scale / 2,)
    assert not all(torch.equal(a, b) for a, b in zip(weights(model), before, strict=True))


@pytest.mark.parametrize("arm", SKIPPING_WHOLE)
def test_a_skip_on_the_device_has_the_bits_of_one_on_the_host(
    arm: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and scales over three skips and growing moments are equal, whoever skips."""
    monkeypatch.setattr(device_skip, "_DEVICE_TYPES", frozenset({"cpu", "cuda"}))
    monkeypatch.setattr("ampcompare.training.precision.half._DEVICE_TYPES", frozenset({"cpu", "cuda"}))
    results = []
    for on_device in (False, True):
        precision = make_precision(arm, device=str(device))
        model = net(device)
        optimizer: Optimizer = AdamW(model.parameters(), lr=0.01, eps=1e-3)
        if on_device:
            make_step_skippable(optimizer)
        (model,), (optimizer,) = precision.prepare([model], [optimizer])  # type: ignore[assignment]
        optimizer.zero_grad()
        outcomes = []
        for index in range(6):
            with precision.autocast():
                loss = loss_of(model, batch(device)) * (float("inf") if index in (0, 3, 4) else 1.0)
            precision.backward(loss, [optimizer])
            outcomes.append(precision.step(optimizer))
            optimizer.zero_grad()
        told = [(outcome.applied, outcome.loss_scales) for outcome in outcomes]
        results.append((told, weights(model), list(optimizer.state_dict()["state"].values())))
        _amp_state.close()
    (told, on_host, states), (told_too, moved, states_too) = results
    assert told == told_too
    assert [applied for applied, _ in told] == [(index not in (0, 3, 4),) for index in range(6)]
    assert all(torch.equal(a, b) for a, b in zip(on_host, moved, strict=True))
    for state, other in zip(states, states_too, strict=True):
        assert all(torch.equal(state[name], other[name]) for name in state)


@pytest.mark.parametrize("arm", NEVER_SKIPPING)
def test_without_dynamic_scaling_nothing_is_skipped(arm: str, device: torch.device) -> None:
    """Where no overflow is looked for, a non-finite gradient reaches the weights and the step counts as applied."""
    precision, model, optimizer = start(arm, device)
    backward(precision, model, [optimizer], batch(device) * float("inf"))
    assert precision.step(optimizer).applied == (True,)
    assert not all(torch.isfinite(weight).all() for weight in weights(model))


@pytest.mark.parametrize("arm", SHARING)
def test_two_optimizers_of_one_update_use_one_scale(arm: str, device: torch.device) -> None:
    """The second optimizer of an update is unscaled by the scale of its own backward pass, whatever the first did."""
    precision, model, prepared = start_two(arm, device)
    expected = stepped([batch(device)], device)
    backward(precision, model, prepared, batch(device))  # type: ignore[arg-type]
    assert precision.step(*prepared).applied == (True, True)
    torch.testing.assert_close(weights(model), expected, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("arm", NOT_SHARING)
def test_libraries_that_would_unscale_wrongly_refuse_several_optimizers(
    arm: str, device: torch.device
) -> None:
    """A library that moves its scale at each optimizer's step is not given two of them."""
    model = net(device)
    optimizers = [SGD(model[0].parameters(), lr=LR), SGD(model[2].parameters(), lr=LR)]
    with pytest.raises(UnsupportedCombination, match="use one optimizer"):
        make_precision(arm, device=str(device)).prepare([model], optimizers)


@pytest.mark.parametrize("arm", ["native:fp16", "apex:O1,engine=compat", "apex:O2,engine=compat"])
def test_overflow_in_a_shared_backward_is_seen_for_each_optimizer(arm: str, device: torch.device) -> None:
    """`applied` tells per optimizer, also when several share one scaler and read their outcome later."""
    precision, model, prepared = start_two(arm, device)
    backward(precision, model, prepared, batch(device) * float("inf"))  # type: ignore[arg-type]
    bad = precision.step(*prepared)
    for optimizer in prepared:
        optimizer.zero_grad()
    backward(precision, model, prepared, batch(device))  # type: ignore[arg-type]
    good = precision.step(*prepared)
    assert good.applied == (True, True)
    assert bad.applied == (False, False)


@pytest.mark.parametrize("arm", ALL)
def test_accumulation_equals_the_whole_batch_and_more_steps_train(arm: str, device: torch.device) -> None:
    """Two micro-batches with a delayed unscale give the update of their mean loss; the loss falls from there.

    The loop's order is backward, step, and zero_grad without arguments.
    """
    halves = [batch(device)[:4], batch(device)[4:]]
    expected = stepped(halves, device)
    precision, model, optimizer = start(arm, device)
    for index, part in enumerate(halves):
        with precision.autocast():
            loss = loss_of(model, part) / 2
        precision.backward(loss, [optimizer], delay_unscale=index == 0)
    assert precision.step(optimizer).applied == (True,)
    torch.testing.assert_close(weights(model), expected, rtol=0.05, atol=0.02)
    for group in optimizer.param_groups:
        group["lr"] = 0.05
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        with precision.autocast():
            loss = loss_of(model, batch(device))
        precision.backward(loss, [optimizer])
        precision.step(optimizer)
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("arm", SKIPPING)
def test_state_survives_a_round_trip(arm: str, device: torch.device) -> None:
    """Scale and counter come back after `load_state_dict` in a fresh backend."""
    precision, model, optimizer = start(arm, device)
    backward(precision, model, [optimizer], batch(device) * float("inf"))
    precision.step(optimizer)
    optimizer.zero_grad()
    state = precision.state_dict()
    scale = precision.loss_scales()
    _amp_state.close()
    again, model, optimizer = start(arm, device)
    assert again.loss_scales() != scale
    again.load_state_dict(state)
    assert again.loss_scales() == scale
    backward(again, model, [optimizer], batch(device))
    assert again.step(optimizer).loss_scales == scale


@pytest.mark.parametrize("arm", FIRST)
def test_wrapped_models_are_refused(arm: str, device: torch.device) -> None:
    """A model that is already wrapped would record the wrong dtypes in any backend; the error names the wrapper."""
    wrapped = nn.DataParallel(net(device))
    with pytest.raises(PreparationError, match="DataParallel"):
        make_precision(arm, device=str(device)).prepare([wrapped], [SGD(wrapped.parameters(), lr=LR)])


@pytest.mark.parametrize("arm", ALL)
def test_a_group_added_later_is_trained(arm: str, device: torch.device) -> None:
    """`add_param_group` after `prepare` brings in parameters that the next step updates."""
    precision = make_precision(arm, device=str(device))
    model = net(device)
    (prepared,), (optimizer,) = precision.prepare([model], [SGD(model[0].parameters(), lr=LR)])
    optimizer.add_param_group({"params": list(model[2].parameters())})
    optimizer.zero_grad()
    before = weights(model[2])
    backward(precision, prepared, [optimizer], batch(device))  # type: ignore[list-item]
    precision.step(optimizer)
    assert not any(torch.equal(a, b) for a, b in zip(weights(model[2]), before, strict=True))


def test_a_wrapper_passes_everything_on() -> None:
    """No public method of the contract is left at its fp32 default, except those of CUDA graphs, which are refused."""
    public = {name for name, value in vars(Precision).items() if inspect.isfunction(value) and name[0] != "_"}
    left_out = {name for name in public if name not in vars(PrecisionWrapper)} - {"prepare"}
    assert left_out == {"why_no_cuda_graph", "capturing", "replayed_outcome"}
    assert PrecisionWrapper(make_precision("fp32")).why_no_cuda_graph([]) is not None
    assert "_prepare" in vars(PrecisionWrapper)


@pytest.mark.parametrize("name", BUILT_IN)
def test_arguments_of_backward_are_explicit(name: str) -> None:
    """Every backend names `loss_id` and `delay_unscale`, so that a mistyped keyword is an error."""
    spec = BUILT_IN[name]
    arm = spec.contract[0].text if spec.contract else name
    if spec.library is not None and spec.library.why_missing():
        pytest.skip(spec.library.why_missing())
    parameters = inspect.signature(make_precision(arm).backward).parameters
    assert list(parameters) == ["loss", "optimizers", "loss_id", "delay_unscale"]
    assert all(parameters[key].kind is inspect.Parameter.KEYWORD_ONLY for key in ("loss_id", "delay_unscale"))
