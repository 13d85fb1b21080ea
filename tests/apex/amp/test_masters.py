"""Master weights, and what amp installs on optimizers."""

import math
import warnings

import pytest
import torch
from torch import nn

from ampcompare.apex import amp
from tests.apex.amp.small_net import LEVELS, Net, backward, grads, start


def test_masters_survive_an_initialize_at_another_level() -> None:
    """An O2 optimizer still gets master gradients after a second model was initialized at O0."""
    model, optimizer = start("O2", loss_scale=8.0)
    start("O0")
    backward(model, optimizer)
    assert all(g is not None for g in grads(optimizer))


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
    assert [
        len(g) for g in (stash.fp16_groups, stash.fp32_from_fp16_groups, stash.fp32_from_fp32_groups)
    ] == [1, 1, 1]
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
