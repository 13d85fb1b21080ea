"""Calls of `apex.amp` in a script under another arm, and backward passes outside of `scale_loss`."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from ampcompare.base.errors import PreparationError, ScalingError
from tests.script.small_script import ARMS, Make, batch, network


def loss_of(model: nn.Module) -> Tensor:
    return model(batch(0)[0]).float().square().mean()


def initialized(amp: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    model = network()
    return amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), *args, **kwargs)


def backward(amp: Any, model: Any, optimizer: Any) -> None:
    with amp.scale_loss(loss_of(model), optimizer) as scaled:
        scaled.backward()


def test_casts_are_on_where_those_of_o1_would_be(script_amp: Make) -> None:
    """They are on from `initialize` on, but not in `scale_loss`, `disable_casts` and `step`."""
    amp = script_amp("bf16")
    assert network()(batch(0)[0]).dtype is torch.float32
    model, optimizer = initialized(amp)
    x = batch(0)[0]
    assert model(x).dtype is torch.bfloat16
    with amp.disable_casts():
        assert model(x).dtype is torch.float32
    with torch.autocast("cpu", enabled=False), amp.scale_loss(model(x).sum(), optimizer) as scaled:
        assert model(x).dtype is torch.float32
        scaled.backward()
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    optimizer.step()
    assert seen == [False]
    assert model(x).dtype is torch.bfloat16


def test_functions_are_cast_as_registered(script_amp: Make) -> None:
    """`half_function` and its kin cast while casts are on, and only under an arm that casts functions."""

    class Library:
        same = staticmethod(lambda *tensors: tuple(tensor.dtype for tensor in tensors))

    wide, narrow = torch.ones(2), torch.ones(2, dtype=torch.bfloat16)
    amp = script_amp("bf16")
    half, promote = amp.half_function(Library.same), amp.promote_function(Library.same)
    amp.register_float_function(Library, "same")
    assert half(wide) == (torch.float32,)
    initialized(amp)
    assert half(wide) == (torch.bfloat16,)
    assert promote(wide, narrow) == (torch.float32, torch.float32)
    assert promote(narrow, narrow) == (torch.bfloat16, torch.bfloat16)
    assert Library.same(narrow) == (torch.float32,)
    with pytest.raises(ValueError, match="No function named absent"):
        amp.register_half_function(Library, "absent")


@pytest.mark.parametrize("arm", ["fp32", "native:fp16", "native:bf16", "half:masters=fp32,dynamic"])
def test_hooks_of_a_script_for_apex_get_true_gradients(script_amp: Make, arm: str) -> None:
    """Those of Apex itself are scaled; here they are not, also of what a model returns."""
    amp = script_amp(arm)
    model, optimizer = initialized(amp)
    output = model(batch(0)[0])
    seen: list[float] = []
    output.register_hook(lambda gradient: seen.append(float(gradient.float().abs().max())))
    with amp.scale_loss(output.float().mean(), optimizer) as scaled:
        scaled.backward()
    assert seen == pytest.approx([1 / output.numel()], rel=0.01)


def test_functions_stay_as_they_are_under_an_arm_without_casts(script_amp: Make) -> None:
    amp = script_amp("fp32")
    same = amp.half_function(lambda tensor: tensor.dtype)
    initialized(amp)
    assert same(torch.ones(2)) is torch.float32


@pytest.mark.parametrize("arm", ["native:fp16", "half:masters=fp32,dynamic"])
def test_models_of_a_second_initialize_train_too(script_amp: Make, arm: str) -> None:
    """They share the loss scale, which moves at each step."""
    amp = script_amp(arm)
    first, second = initialized(amp), initialized(amp)
    for model, optimizer in (first, second, first):
        before = [param.clone() for param in amp.master_params(optimizer)]
        optimizer.zero_grad()
        backward(amp, model, optimizer)
        optimizer.step()
        assert not any(map(torch.equal, before, amp.master_params(optimizer)))
    assert amp.state_dict()["_growth_tracker"] == 3


def test_gradients_that_were_cleared_are_those_of_no_step(script_amp: Make) -> None:
    """A script that drops gradients it does not like goes on with the next batch."""
    amp = script_amp(ARMS["fp16"])
    model, optimizer = initialized(amp)
    before = [param.clone() for param in model.parameters()]
    backward(amp, model, optimizer)
    clip_grad_norm_(model.parameters(), 1.0)
    model.zero_grad()
    backward(amp, model, optimizer)
    assert all(map(torch.equal, before, model.parameters()))
    grads = [param.grad.clone() for param in model.parameters()]
    optimizer.step()
    for param, weight, grad in zip(model.parameters(), before, grads, strict=True):
        torch.testing.assert_close(param, weight - 0.1 * grad)


@pytest.mark.parametrize("arm", ["native:fp16", "half:masters=fp32,dynamic"])
def test_what_has_no_translation_is_refused_at_its_line(script_amp: Make, arm: str) -> None:
    """Each refusal names file and line of the script, and the reason."""
    amp = script_amp(arm)
    with pytest.raises(ScalingError, match="before amp"):
        amp.state_dict()
    with pytest.raises(PreparationError, match=r"test_apex_amp\.py:\d+: amp.initialize has enabled=False"):
        initialized(amp, enabled=False)
    with pytest.raises(ScalingError, match=r"test_apex_amp\.py:\d+: amp.scale_loss before amp.initialize"):
        with amp.scale_loss(torch.ones(()), None):
            pass
    initialized(amp)
    with pytest.raises(ScalingError, match="the checkpoint is another arm's"):
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 1.0, "unskipped": 0}})


@pytest.mark.parametrize("arm", ["fp32", "O1", "O2"])
def test_the_api_before_initialize_is_refused(script_amp: Make, arm: str) -> None:
    """Under O1 its handle would scale a loss that the arm scales too."""
    with pytest.raises(PreparationError, match=r"test_apex_amp\.py:\d+: amp.init has no models"):
        script_amp(arm).init()


def test_a_step_without_a_block_is_the_optimizers_own(script_amp: Make) -> None:
    """Before the first batch, or after a plain backward pass, nothing is scaled."""
    amp = script_amp("native:fp16")
    model, optimizer = initialized(amp)
    optimizer.step()
    loss_of(model).backward()
    before = [(param.clone(), param.grad.clone()) for param in model.parameters()]
    optimizer.step()
    for param, (weight, grad) in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(param, weight - 0.1 * grad)


HALF = "half:masters=fp32,loss_scale=64"


@pytest.mark.parametrize("arm", [ARMS["fp16"], HALF])
@pytest.mark.parametrize("case", ["block first", "plain first", "delayed"])
def test_a_plain_backward_pass_adds_true_gradients(script_amp: Make, arm: str, case: str) -> None:
    """To those of a block, and in any order; alone it is a step as well."""
    amp, model = script_amp(arm), nn.Linear(6, 3, bias=False)
    expected = model.weight.detach().clone()
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.25))
    x = torch.ones(1, 6)
    if case == "plain first":
        (2 * model(x).float()).sum().backward()
    with amp.scale_loss(model(x).float().sum(), optimizer, delay_unscale=case == "delayed") as scaled:
        scaled.backward()
    if case != "plain first":
        (2 * model(x).float()).sum().backward()
    optimizer.step()
    masters = next(iter(amp.master_params(optimizer)))
    after = expected.half().float() if arm == HALF else expected
    assert torch.equal(masters, after - 0.75)
    optimizer.zero_grad()
    (2 * model(x).float()).sum().backward()
    optimizer.step()
    assert torch.equal(masters, after - 0.75 - 0.5)


def test_a_plain_backward_pass_of_another_model_changes_nothing(script_amp: Make) -> None:
    amp, model, other = script_amp(ARMS["fp16"]), nn.Linear(6, 3, bias=False), nn.Linear(6, 3)
    before = model.weight.detach().clone()
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0))
    for _ in range(2):
        with amp.scale_loss(model(torch.ones(1, 6)).float().sum(), optimizer) as scaled:
            scaled.backward()
        other(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    assert torch.equal(model.weight, before - 2)


@pytest.mark.parametrize(("arm", "scale"), [("fp32", 1.0), (ARMS["fp16"], 1024.0), (HALF, 64.0)])
def test_loss_scalers_show_the_scale_of_the_arm(script_amp: Make, arm: str, scale: float) -> None:
    """Scripts log it, set it before the first step and ask whether it has moved; the arm decides."""
    amp = script_amp(arm)
    model, optimizer = initialized(amp, num_losses=2)
    scaler = amp._amp_state.loss_scalers[1]
    scaler._loss_scale = 2.0**20
    backward(amp, model, optimizer)
    assert (scaler.loss_scale(), scaler._loss_scale, scaler.update_scale()) == (scale, scale, False)
    optimizer.step()
