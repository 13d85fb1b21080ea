"""`amp.scale_loss`, loss scalers, master weights, and what amp installs on optimizers."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from ampcompare.apex import amp
from ampcompare.apex.amp.scaler import LossScaler
from ampcompare.errors import AmpCompareError

LEVELS = ("O0", "O1", "O2", "O3")
X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Net(nn.Module):
    """A half-able layer and a batch norm, so that O2 has both kinds of masters."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.bn = nn.BatchNorm1d(4)
        with torch.no_grad():
            self.fc.weight.copy_(torch.linspace(-0.5, 0.5, 16).reshape(4, 4))
            self.fc.bias.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bn(self.fc(x))


def start(level: str, **options: Any) -> tuple[Net, torch.optim.Optimizer]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    return model, optimizer


def loss_of(model: nn.Module, factor: float = 1.0) -> torch.Tensor:
    # Small enough for half gradients at the first dynamic scale.
    return (model(X).float() * torch.arange(1.0, 5.0) + 1).square().mean() * (factor / 256)


def backward(model: nn.Module, optimizer: Any, factor: float = 1.0, **options: Any) -> None:
    with amp.scale_loss(loss_of(model, factor), optimizer, **options) as scaled:
        scaled.backward()


def grads(optimizer: Any) -> list[torch.Tensor | None]:
    return [p.grad for p in amp.master_params(optimizer)]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("scale", [1.0, 64.0, "dynamic"])
def test_gradients_are_unscaled_and_in_the_master_dtype(level: str, scale: Any) -> None:
    """After the block master gradients are those of the unscaled loss, whatever the scale."""
    model, optimizer = start(level, loss_scale=scale)
    backward(model, optimizer)
    reference = Net()
    loss_of(reference).backward()
    for got, want in zip(grads(optimizer), reference.parameters(), strict=True):
        assert got is not None
        torch.testing.assert_close(got.float(), want.grad, rtol=0.02, atol=1e-4)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("strict", [False, True])
def test_accumulation_over_blocks(level: str, strict: bool) -> None:
    """Gradients of several blocks add up, unscaled, also with different scales per block."""
    model, optimizer = start(level, loss_scale="dynamic", num_losses=2, strict=strict)
    amp._amp_state.loss_scalers[1]._loss_scale = 4.0
    backward(model, optimizer, loss_id=0)
    once = [g.clone() for g in grads(optimizer) if g is not None]
    backward(model, optimizer, loss_id=1)
    for got, want in zip(grads(optimizer), once, strict=True):
        torch.testing.assert_close(got.float(), 2 * want.float(), rtol=0.01, atol=1e-5)


@pytest.mark.parametrize("level", LEVELS)
def test_accumulation_with_delayed_unscale(level: str) -> None:
    """Delayed passes pile up scaled gradients; the last pass unscales the sum."""
    model, optimizer = start(level, loss_scale="dynamic")
    backward(model, optimizer)
    once = [g.clone() for g in grads(optimizer) if g is not None]
    optimizer.zero_grad()
    backward(model, optimizer, delay_unscale=True)
    backward(model, optimizer)
    for got, want in zip(grads(optimizer), once, strict=True):
        torch.testing.assert_close(got.float(), 2 * want.float(), rtol=0.01, atol=1e-5)


@pytest.mark.parametrize("strict", [False, True])
def test_accumulation_at_a_static_scale_of_one(strict: bool) -> None:
    """Master weights at scale 1 accumulate gradients of fp32 parameters; strict mode loses them (deviation 4)."""
    model, optimizer = start("O2", loss_scale=1.0, strict=strict)
    backward(model, optimizer)
    once = model.bn.weight.grad.clone()
    backward(model, optimizer)
    torch.testing.assert_close(model.bn.weight.grad, once if strict else 2 * once)


@pytest.mark.parametrize("strict", [False, True])
def test_first_passes_delayed(strict: bool) -> None:
    """Delayed passes before any zero_grad keep gradients of fp32 parameters; strict loses them (deviation 40)."""
    model, optimizer = start("O2", strict=strict)
    backward(model, optimizer, delay_unscale=True)
    backward(model, optimizer)
    if strict:
        assert model.bn.weight.grad is None
    else:
        assert model.bn.weight.grad is not None


@pytest.mark.parametrize("strict", [False, True])
def test_a_tuple_of_optimizers(strict: bool) -> None:
    """A tuple of optimizers accumulates like a list; strict divides old gradients again (deviation 23)."""
    model, optimizer = start("O1", strict=strict)
    backward(model, (optimizer,))
    once = model.fc.weight.grad.clone()
    backward(model, (optimizer,))
    torch.testing.assert_close(model.fc.weight.grad, once + once / 65536 if strict else 2 * once, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("level", LEVELS)
def test_overflow_skips_one_step(
    level: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An overflow halves the scale and skips exactly one step, which says so; then training goes on."""
    # Said once in a process, by whichever test comes first.
    monkeypatch.setattr(LossScaler, "warned_unscaling_non_fp32_grad", True)
    model, optimizer = start(level, loss_scale="dynamic")
    amp._amp_state.verbosity = 1
    before = [p.detach().clone() for p in model.parameters()]
    backward(model, optimizer, math.inf)
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 32768.0, "unskipped": 0}}
    assert optimizer.step() is None
    out = capsys.readouterr().out
    assert out == "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0\n"
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    optimizer.zero_grad()
    backward(model, optimizer)
    optimizer.step()
    assert not torch.equal(model.bn.bias, before[-1])
    assert capsys.readouterr().out == ""


def test_two_overflows_skip_one_step() -> None:
    """Two overflowing losses on one optimizer halve the scale twice and skip one step."""
    model, optimizer = start("O2")
    backward(model, optimizer, math.inf)
    backward(model, optimizer, math.nan)
    assert amp._amp_state.loss_scalers[0].loss_scale() == 16384.0
    optimizer.step()
    optimizer.zero_grad()
    backward(model, optimizer)
    before = model.bn.bias.clone()
    optimizer.step()
    assert not torch.equal(model.bn.bias, before)


def test_overflow_skips_only_the_optimizers_of_its_block() -> None:
    """An optimizer that took no part in an overflowing backward pass steps."""
    models = [Net(), Net()]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    amp.initialize(models, optimizers, opt_level="O1", verbosity=0, num_losses=2)
    backward(models[0], optimizers[0], math.inf, loss_id=0)
    backward(models[1], optimizers[1], loss_id=1)
    before = [m.bn.bias.clone() for m in models]
    for optimizer in optimizers:
        optimizer.step()
    assert torch.equal(models[0].bn.bias, before[0])
    assert not torch.equal(models[1].bn.bias, before[1])
    assert [s.loss_scale() for s in amp._amp_state.loss_scalers] == [32768.0, 65536.0]


def test_skip_drops_master_gradients() -> None:
    """A skipped step leaves master gradients None, so that model.zero_grad() is enough."""
    model, optimizer = start("O2")
    backward(model, optimizer, math.inf)
    optimizer.step()
    assert all(p.grad is None for p in optimizer._amp_stash.all_fp32_from_fp16_params)


def test_static_scale_never_skips() -> None:
    """A static scale lets non-finite gradients reach the weights, as in Apex (deviation 24 is kept)."""
    model, optimizer = start("O2", loss_scale=128.0)
    backward(model, optimizer, math.inf)
    optimizer.step()
    assert not torch.isfinite(model.fc.weight).all()


def test_delay_overflow_check_freezes_the_scale() -> None:
    """With delay_overflow_check gradients are unscaled, but nothing is skipped and the counter rests."""
    model, optimizer = start("O2")
    backward(model, optimizer, delay_overflow_check=True)
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 65536.0, "unskipped": 0}
    assert 0 < grads(optimizer)[0].abs().max() < 1


@pytest.mark.parametrize("strict", [False, True])
def test_large_finite_gradients(strict: bool) -> None:
    """Finite gradients whose sum leaves fp32 are not an overflow, except in strict mode, which sums (deviation 33)."""
    param = nn.Parameter(torch.zeros(4))
    model = nn.Module()
    model.p = param
    optimizer = torch.optim.SGD([param], lr=0.0)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0, strict=strict)
    with amp.scale_loss(torch.zeros(()), optimizer):
        param.grad = torch.full((4,), 2e38)
    assert (amp._amp_state.loss_scalers[0].loss_scale() == 32768.0) is strict


@pytest.mark.parametrize("strict", [False, True])
def test_gradients_of_a_skipped_step(strict: bool) -> None:
    """An overflow leaves all gradients unscaled; in strict mode those up to the first bad one, as without kernels."""
    params = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    model = nn.ParameterList(params)
    optimizer = torch.optim.SGD(params, lr=0.0)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0, strict=strict)
    with amp.scale_loss(torch.zeros(()), optimizer):
        for param, value in zip(params, (65536.0, math.inf, 65536.0), strict=True):
            param.grad = torch.full((2,), value)
    assert [p.grad[0].item() for p in params if p.grad is not None] == [1.0, math.inf, 65536.0 if strict else 1.0]


@pytest.mark.parametrize("stashed", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_unscale_of_a_scaler_with_a_bad_gradient(strict: bool, stashed: bool) -> None:
    """`LossScaler.unscale` and its twin with a stash write all masters; in strict mode those before the bad one."""
    amp._amp_state.strict = strict
    scaler = LossScaler("dynamic")
    model = [torch.full((2,), value) for value in (65536.0, math.inf, 65536.0)]
    masters = [torch.full((2,), 7.0) for _ in model]
    if stashed:
        scaler.unscale_with_stashed(model, [torch.ones(2) for _ in model], masters)
    else:
        scaler.unscale(model, masters, 1.0)
    one = 2.0 if stashed else 1.0
    assert [m[0].item() for m in masters] == ([one, 7.0, 7.0] if strict else [one, math.inf, one])
    assert scaler.update_scale()


@pytest.mark.parametrize("level", LEVELS)
def test_exception_in_the_block(level: str) -> None:
    """Gradients of earlier blocks come back when a later block raises; strict mode leaves them away (deviation 14)."""
    model, optimizer = start(level, loss_scale="dynamic")
    backward(model, optimizer)
    before = [g.clone() for g in grads(optimizer)]
    with pytest.raises(ZeroDivisionError), amp.scale_loss(loss_of(model), optimizer) as scaled:
        _ = scaled.backward() or 1 / 0
    for got, want in zip(grads(optimizer), before, strict=True):
        assert torch.equal(got, want)
    backward(model, optimizer)
    optimizer.step()


def test_exception_in_the_block_strict() -> None:
    """In strict mode an exception inside the block loses stashed gradients from view."""
    model, optimizer = start("O1", strict=True)
    backward(model, optimizer)
    with pytest.raises(ZeroDivisionError), amp.scale_loss(loss_of(model), optimizer):
        _ = 1 / 0
    assert model.fc.weight.grad is None


@pytest.mark.parametrize("level", ["O0", "O3"])
@pytest.mark.parametrize("kind, strict", [("failed", True), ("nested", True), ("nested", False)])
def test_what_a_pass_lost_does_not_come_back(level: str, kind: str, strict: bool) -> None:
    """Gradients lost in a failed block (strict) or nested ones stay lost: Apex 25.05 left None, None, 3 and 2."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0, strict=strict)
    first, last = model
    x = torch.ones(1, 2)
    with amp.scale_loss(model(x).sum(), optimizer) as scaled:
        scaled.backward()
    if kind == "failed":
        with pytest.raises(KeyError), amp.scale_loss(model(x).sum(), optimizer):
            raise KeyError
    else:
        with amp.scale_loss(model(x).sum(), optimizer), amp.scale_loss(model(x).sum(), optimizer) as scaled:
            scaled.backward()
    for param in model.parameters():
        param.grad = None
    last.weight.grad = torch.ones_like(last.weight)
    with amp.scale_loss(last(x.to(last.weight.dtype)).float().sum() * 2, optimizer) as scaled:
        scaled.backward()
    assert first.weight.grad is None
    assert first.bias.grad is None
    assert last.weight.grad.tolist() == [[3.0, 3.0]]
    assert last.bias.grad.tolist() == [2.0]


def test_errors_of_scale_loss() -> None:
    """Wrong order, wrong loss_id and unknown optimizers raise Apex's types, with ampcompare's family."""
    loss = torch.ones(())
    with pytest.raises(RuntimeError, match=r"amp\.initialize") as caught, amp.scale_loss(loss, None):
        pass
    assert isinstance(caught.value, AmpCompareError)
    _model, optimizer = start("O2")
    with pytest.raises(IndexError, match="num_losses=2"), amp.scale_loss(loss, optimizer, loss_id=1):
        pass
    stranger = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(AttributeError, match=r"did not go through amp\.initialize"), amp.scale_loss(loss, stranger):
        pass
    start("O2", num_losses=0)
    with pytest.raises(IndexError), amp.scale_loss(loss, optimizer):
        pass


def test_short_circuit_asks_nothing_of_the_optimizer() -> None:
    """At a static scale of 1 without masters the loss comes back in fp32, and optimizers are not looked at."""
    start("O0")
    loss = torch.ones((), dtype=torch.float16)
    with amp.scale_loss(loss, "no optimizer") as scaled:
        assert scaled.dtype == torch.float32


def test_masters_survive_an_initialize_at_another_level() -> None:
    """An O2 optimizer still gets master gradients after a second model was initialized at O0."""
    model, optimizer = start("O2", loss_scale=8.0)
    start("O0")
    backward(model, optimizer)
    assert all(g is not None for g in grads(optimizer))


@pytest.mark.parametrize("level", LEVELS)
def test_half_loss_of_several_elements(level: str) -> None:
    """The loss may be half and have several elements; it is scaled in fp32."""
    _, optimizer = start(level, loss_scale=2.0**17)
    with amp.scale_loss(torch.ones(3, dtype=torch.float16), optimizer) as scaled:
        assert scaled.dtype == torch.float32
        assert scaled.tolist() == [2.0**17] * 3


def test_masters_are_made_late_and_in_place() -> None:
    """Masters appear at zero_grad, at the same index, as fp32 copies of the rounded weights; frozen ones stay half."""
    model = Net()
    model.fc.bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    params = list(model.parameters())
    assert all(a is b for a, b in zip(amp.master_params(optimizer), params, strict=True))
    assert not optimizer._amp_stash.lazy_init_called
    optimizer.zero_grad()
    masters = list(amp.master_params(optimizer))
    assert masters[0] is not params[0]
    assert masters[0].dtype == torch.float32
    assert masters[0].requires_grad
    assert torch.equal(masters[0], params[0].float())
    assert [masters[i] is params[i] for i in (1, 2, 3)] == [True] * 3
    stash = optimizer._amp_stash
    assert [len(g) for g in (stash.fp16_groups, stash.fp32_from_fp16_groups, stash.fp32_from_fp32_groups)] == [1, 1, 1]
    assert not stash.already_patched


def test_step_with_masters() -> None:
    """A step rounds masters into the model, drops master gradients, and refuses closures and unknown keywords."""
    model, optimizer = start("O2")
    backward(model, optimizer)
    with pytest.raises(RuntimeError, match="closure"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(TypeError):
        optimizer.step(grad_scaler=None)
    optimizer.step()
    masters = list(amp.master_params(optimizer))
    assert masters[0].grad is None
    assert model.bn.weight.grad is not None
    assert model.fc.weight.grad is not None
    assert torch.equal(model.fc.weight, masters[0].half())


def test_step_before_any_backward() -> None:
    """A first step without gradients, as scripts do to please schedulers, changes nothing."""
    model, optimizer = start("O2")
    before = model.fc.weight.clone()
    optimizer.step()
    assert torch.equal(model.fc.weight, before)


def test_zero_grad_with_masters() -> None:
    """zero_grad zeroes what exists and drops master gradients; set_to_none works too (deviation 12)."""
    model, optimizer = start("O2")
    backward(model, optimizer)
    optimizer.zero_grad()
    assert model.fc.weight.grad.abs().sum() == 0
    assert model.bn.weight.grad.abs().sum() == 0
    assert next(iter(amp.master_params(optimizer))).grad is None
    backward(model, optimizer)
    optimizer.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("level", LEVELS)
def test_add_param_group(level: str) -> None:
    """A group added while training trains, and the caller's dict is left alone (deviation 37)."""
    models = [Net(), Net()]
    optimizer = torch.optim.SGD(models[0].parameters(), lr=0.1)
    amp.initialize(models, optimizer, opt_level=level, verbosity=0)
    backward(models[0], optimizer)
    group = {"params": list(models[1].parameters()), "lr": 0.5}
    optimizer.add_param_group(group)
    assert all(a is b for a, b in zip(group["params"], models[1].parameters(), strict=True))
    assert set(group) == {"params", "lr"}
    with amp.scale_loss(loss_of(models[0]) + loss_of(models[1]), optimizer) as scaled:
        scaled.backward()
    before = [model.bn.bias.clone() for model in models]
    optimizer.step()
    after = [model.bn.bias for model in models]
    assert not any(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_add_param_group_takes_tensors_and_refuses_sets() -> None:
    """`params` may be one tensor; a set, another dtype and a group that is not a dict raise Apex's types."""
    _, optimizer = start("O2")
    optimizer.add_param_group({"params": nn.Parameter(torch.ones(2, dtype=torch.float16))})
    assert optimizer.param_groups[1]["params"][0].dtype == torch.float32
    with pytest.raises(TypeError):
        optimizer.add_param_group({"params": {nn.Parameter(torch.ones(2))}})
    with pytest.raises(TypeError, match="float64"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2).double())]})
    with pytest.raises(AssertionError):
        optimizer.add_param_group([nn.Parameter(torch.ones(2))])


def test_other_dtypes_are_refused_at_the_first_backward() -> None:
    """An optimizer over float64 parameters raises TypeError when its gradients are first handled."""
    param = nn.Parameter(torch.ones(2, dtype=torch.float64))
    model = nn.Module()
    model.p = param
    optimizer = torch.optim.SGD([param], lr=0.1)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    with pytest.raises(TypeError, match="float64"), amp.scale_loss(param.sum(), optimizer) as scaled:
        scaled.backward()


def test_parameters_without_gradients() -> None:
    """Parameters that no loss reaches keep gradient None, and the others train."""
    for level in LEVELS:
        model, optimizer = start(level, loss_scale="dynamic")
        with amp.scale_loss(model.fc(X.to(model.fc.weight.dtype)).float().sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        assert model.bn.weight.grad is None
        amp._amp_state.close()


def test_a_kept_gradient_is_not_overwritten() -> None:
    """A master gradient that someone holds on to keeps its values when the next step writes its own."""
    model, optimizer = start("O2")
    backward(model, optimizer)
    kept = next(iter(amp.master_params(optimizer))).grad
    copy = kept.clone()
    optimizer.step()
    optimizer.zero_grad()
    backward(model, optimizer, 3.0)
    assert torch.equal(kept, copy)


def test_sparse_gradients() -> None:
    """Sparse gradients of an embedding are unscaled like dense ones."""
    for level in ("O1", "O2"):
        model = nn.Embedding(4, 2, sparse=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        with torch.no_grad():
            model.weight.zero_()
        for _ in range(2):
            with amp.scale_loss(model(torch.tensor([1, 1])).float().sum() / 4, optimizer) as scaled:
                scaled.backward()
        optimizer.step()
        assert model.weight.tolist() == [[0.0, 0.0], [-0.5, -0.5], [0.0, 0.0], [0.0, 0.0]]
        amp._amp_state.close()


def scheduler_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("when", ["before", "after", "pending"])
def test_schedulers(level: str, when: str) -> None:
    """A scheduler may be built before initialize, after it, or while a skip is pending, and never warns
    (deviations 36, 38)."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = scheduler_of(optimizer) if when == "before" else None
    amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    if when == "after":
        scheduler = scheduler_of(optimizer)
    backward(model, optimizer, math.inf)
    if when == "pending":
        scheduler = scheduler_of(optimizer)
    before = model.bn.bias.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        scheduler.step()
        assert torch.equal(model.bn.bias, before)
        optimizer.zero_grad()
        amp._amp_state.loss_scalers[0]._loss_scale = 64.0
        backward(model, optimizer)
        optimizer.step()
        scheduler.step()
    assert not torch.equal(model.bn.bias, before)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)


def test_scaler_constants() -> None:
    """Window 2000, factor 2 both ways, floor when halving only, ceiling at start and when growing (deviation 25)."""
    scaler = LossScaler("dynamic", scale_factor=10.0)
    for _ in range(1999):
        assert scaler.update_scale() is False
    assert (scaler.loss_scale(), scaler._unskipped) == (65536.0, 1999)
    scaler.update_scale()
    assert (scaler.loss_scale(), scaler._unskipped) == (131072.0, 0)
    scaler = LossScaler("dynamic", min_loss_scale=100000.0)
    assert scaler.loss_scale() == 65536.0
    scaler._has_overflow = True
    assert scaler.update_scale() is True
    assert scaler.loss_scale() == 100000.0
    scaler = LossScaler("dynamic", max_loss_scale=1024.0, scale_window=1)
    assert scaler.loss_scale() == 1024.0
    scaler._loss_scale = 4096.0
    scaler.update_scale()
    assert scaler.loss_scale() == 1024.0
    static = LossScaler(8.0)
    static.update_scale()
    assert (static.loss_scale(), static._unskipped, static.dynamic) == (8.0, 1, False)


def test_scaler_methods_for_callers_of_apex() -> None:
    """unscale and unscale_with_stashed work on plain lists, and honor an overflow flag set by a user's kernel."""
    scaler = LossScaler("dynamic")
    scaler._loss_scale = 4.0
    half, master = [torch.full((2,), 8.0).half()], [torch.zeros(2)]
    scaler.unscale(half, master, 4.0)
    assert master[0].tolist() == [2.0, 2.0]
    scaler.unscale_with_stashed(half, [torch.ones(2)], master)
    assert master[0].tolist() == [3.0, 3.0]
    scaler.unscale_with_stashed(half, [torch.ones(2)], master, scale_override=(8.0, 1.0, 2.0))
    assert master[0].tolist() == [4.0, 4.0]
    assert scaler.loss_scale() == 4.0
    scaler._overflow_buf.fill_(1)
    assert scaler.update_scale() is True
    scaler.clear_overflow_state()
    assert scaler.update_scale() is False


def test_a_scale_near_zero() -> None:
    """An endless overflow never crashes: gradients stay NaN, the scale goes on falling."""
    model, optimizer = start("O2")
    scaler = amp._amp_state.loss_scalers[0]
    for scale in (2.0**-140, 5e-324, 0.0):
        scaler._loss_scale = scale
        backward(model, optimizer, math.nan)
        assert scaler.loss_scale() == scale / 2
        optimizer.step()


def test_private_fields_are_live() -> None:
    """Scripts set `_loss_scale` and `_scale_seq_len`; the next block uses them."""
    _, optimizer = start("O2")
    scaler = amp._amp_state.loss_scalers[0]
    scaler._loss_scale, scaler._scale_seq_len = 2.0**20, 1
    with amp.scale_loss(torch.ones(()), optimizer) as scaled:
        assert scaled.item() == 2.0**20
    assert scaler.loss_scale() == 2.0**21


def test_mixed_dtypes_in_one_optimizer() -> None:
    """One optimizer over half and fp32 parameters gets both unscaled (cast_model_type=False)."""
    amp._amp_state.allow_incoming_model_not_fp32 = True
    model = nn.Module()
    model.a, model.b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2).half())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level="O0", cast_model_type=False, loss_scale=4.0, verbosity=0)
    for _ in range(2):
        with amp.scale_loss(model.a.sum() + model.b.float().sum(), optimizer) as scaled:
            scaled.backward()
    assert model.a.grad.tolist() == model.b.grad.tolist() == [2.0, 2.0]


def test_master_params_of_anything_with_groups() -> None:
    """master_params yields the parameters of any object with param_groups, in order."""
    thing = type("Thing", (), {"param_groups": [{"params": [1, 2]}, {"params": [3]}]})()
    assert list(amp.master_params(thing)) == [1, 2, 3]
