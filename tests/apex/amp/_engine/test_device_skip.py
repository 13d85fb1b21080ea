"""Loss scaling without host reads, for optimizers whose fused kernels take the overflow flag."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from ampcompare.apex import amp
from ampcompare.apex.amp._engine import device_skip
from ampcompare.apex.amp.scaler import LossScaler
from ampcompare.base.tensors.loss_scale import DeviceLossScale
from tests.apex.amp._engine.fused_steps import OPTIMIZERS, Make, bits, passes_on_device, start, train_step
from tests.apex.amp.small_net import Net, X, loss_of
from tests.host_reads import HostReads

pytestmark = pytest.mark.usefixtures("as_on_a_gpu")


@pytest.mark.parametrize("name", ["sgd-momentum", "adam"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_no_host_reads(level: str, name: str) -> None:
    """With messages off no step reads a value, overflow or not; the host-reading path reads once per step."""
    counts = []
    for host in (False, True):
        model, optimizer = start(level, OPTIMIZERS[name], host=host)
        train_step(model, optimizer)
        with HostReads() as mode:
            for factor in (1.0, math.inf, 1.0):
                train_step(model, optimizer, factor)
        counts.append(mode.count)
        assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 32768.0, "unskipped": 1}
        amp._amp_state.close()
    assert counts == [0, 3]


def _momentum_with_dampening(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, dampening=0.5, fused=True)


def _subclass(params: Any) -> torch.optim.Optimizer:
    return type("Own", (torch.optim.SGD,), {})(params, lr=0.05, fused=True)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "make",
    [_momentum_with_dampening, _subclass, lambda params: torch.optim.SGD(params, lr=0.05, foreach=True)],
    ids=["dampening", "subclass", "foreach"],
)
def test_other_optimizers_read_on_the_host(make: Make) -> None:
    """An optimizer whose kernel cannot be trusted with a skip keeps Apex's way, and skips all the same."""
    model, optimizer = start("O1", make)
    with passes_on_device() as seen:
        before = bits(model.parameters())
        train_step(model, optimizer, math.inf)
        assert bits(model.parameters()) == before
        train_step(model, optimizer)
        assert bits(model.parameters()) != before
    assert seen == []


@pytest.mark.parametrize(
    "options",
    [{"strict": True}, {"loss_scale": 128.0}, {"min_loss_scale": 3.0}, {"max_loss_scale": 1e7}],
    ids=str,
)
def test_other_scalers_read_on_the_host(options: dict[str, Any]) -> None:
    """Strict mode, static scales and bounds that fp32 inverses would round differently stay on the host."""
    model, optimizer = start("O1", **options)
    with passes_on_device() as seen:
        train_step(model, optimizer)
    assert seen == []


def test_a_step_wrapped_later_is_bypassed_by_a_skip() -> None:
    """A wrapper put over `step` after `initialize` does not run on a skipped step, as with Apex."""
    model, optimizer = start("O1")
    calls: list[int] = []
    inner = optimizer.step
    optimizer.step = lambda: (calls.append(1), inner())[1]
    train_step(model, optimizer, math.inf)
    train_step(model, optimizer)
    assert len(calls) == 1


@pytest.mark.parametrize("early", [True, False])
def test_schedulers_keep_the_mode(early: bool, recwarn: pytest.WarningsRecorder) -> None:
    """A scheduler built before or after `initialize` neither ends the mode nor warns after a skipped first step."""
    model = Net()
    optimizer = OPTIMIZERS["sgd-momentum"](model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1) if early else None
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    if schedule is None:
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    recwarn.clear()
    with passes_on_device() as seen:
        for factor in (math.inf, 1.0):
            train_step(model, optimizer, factor)
            schedule.step()
    assert seen == [True, True]
    assert [str(warning.message) for warning in recwarn] == []


def test_the_state_can_be_written_at_any_time() -> None:
    """Scale and counter set by a script, or loaded, are what the next pass starts from."""
    model, optimizer = start("O1")
    scaler = amp._amp_state.loss_scalers[0]
    train_step(model, optimizer)
    scaler._loss_scale = 1024.0
    train_step(model, optimizer, math.inf)
    assert (scaler.loss_scale(), scaler._unskipped, scaler._has_overflow) == (512.0, 0, True)
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 64.0, "unskipped": 1998}})
    with passes_on_device() as seen:
        train_step(model, optimizer)
        train_step(model, optimizer)
        scaler._loss_scale = 3.0
        train_step(model, optimizer)
    assert seen == [True, True]
    assert (scaler.loss_scale(), scaler._unskipped) == (3.0, 1)


def test_from_one_path_to_the_other() -> None:
    """A scaler that has lived on the device goes on from there on the host, pending skips included, and back."""
    model, optimizer = start("O1")
    with amp.scale_loss(loss_of(model, math.inf), optimizer) as scaled:
        scaled.backward()
    hook = optimizer.register_step_post_hook(lambda *_: None)
    optimizer.zero_grad()
    with amp.scale_loss(loss_of(model), optimizer) as scaled:
        scaled.backward()
    before = bits(model.parameters())
    optimizer.step()
    assert bits(model.parameters()) == before
    train_step(model, optimizer, math.inf)
    hook.remove()
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 16384.0, "unskipped": 0}
    with passes_on_device() as seen:
        train_step(model, optimizer)
    assert seen == [True]
    assert bits(model.parameters()) != before


def test_a_skip_waits_for_its_step() -> None:
    """An overflow skips the next step of the optimizers listed, however late, and of no other."""
    models = [Net(0), Net(1)]
    optimizers = [OPTIMIZERS["adam"](model.parameters()) for model in models]
    amp.initialize(models, optimizers, opt_level="O1", verbosity=0)
    with amp.scale_loss(loss_of(models[0], math.inf), optimizers[0]) as scaled:
        scaled.backward()
    for _ in range(2 * device_skip._MAX_FLAGS):
        optimizers[0].zero_grad()
        with amp.scale_loss(loss_of(models[0]) + loss_of(models[1]), optimizers) as scaled:
            scaled.backward()
    before = [bits(model.parameters()) for model in models]
    for optimizer in optimizers:
        optimizer.step()
    assert bits(models[0].parameters()) == before[0]
    assert bits(models[1].parameters()) != before[1]
    assert len(optimizers[0]._amp_stash.flags) == 0


def test_closures() -> None:
    """A step with a closure works while nothing overflowed, and raises on a skip, as on the host-reading path."""
    model, optimizer = start("O1")
    with amp.scale_loss(loss_of(model), optimizer) as scaled:
        scaled.backward()
    assert optimizer.step(lambda: 5.0) == 5.0
    with amp.scale_loss(loss_of(model, math.inf), optimizer) as scaled:
        scaled.backward()
    with pytest.raises(RuntimeError, match="closure"):
        optimizer.step(lambda: 5.0)


def test_a_group_added_later() -> None:
    """Parameters added after the first step get momentum of their own and are stepped."""
    model, optimizer = start("O2")
    train_step(model, optimizer, math.inf)
    extra = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [extra]})
    for factor in (math.inf, 1.0):
        with amp.scale_loss(loss_of(model, factor) + extra.sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(extra.detach(), torch.ones(3) - 0.05 * (1 + 1e-3))


def test_an_endless_overflow_keeps_the_inverse_finite() -> None:
    """The inverse scale on the device stops at the largest float, as on the host."""
    scale = DeviceLossScale(torch.device("cpu"))
    scale.set_scale_and_good_steps(2.0**-126, 0)
    for _ in range(30):
        scale.update(torch.ones(()), 2000, None, 2.0**24)
    assert scale.inverse.item() == torch.finfo(torch.float32).max
    assert scale.read_scale_and_good_steps() == (0.0, 0)


@pytest.mark.parametrize("windows", [[3], [1], [3, 2, 3]], ids=str)
def test_the_ceiling_is_looked_at_in_time(windows: list[int]) -> None:
    """The scale follows the host's arithmetic though the ceiling is looked at only where it can have been reached."""
    device, host = DeviceLossScale(torch.device("cpu")), LossScaler("dynamic", max_loss_scale=2.0**18)
    host._unskipped = 1
    device.set_scale_and_good_steps(host.loss_scale(), 1)
    for step in range(300):
        overflow = step % 37 == 5 or step > 290
        host._scale_seq_len = windows[step // 100 % len(windows)]
        host.clear_overflow_state()
        host._has_overflow = overflow
        host.update_scale()
        device.update(torch.tensor(float(overflow)), host._scale_seq_len, None, 2.0**18)
        assert device.read_scale_and_good_steps() == (host.loss_scale(), host._unskipped)


class FakeEvent:
    """An event of a device that has done its work."""

    def record(self, stream: Any) -> None:
        assert stream == "stream"

    def synchronize(self) -> None:
        return


def test_messages_come_with_the_next_pass(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a device whose reads wait, the next `scale_loss`, or reading the scale, reports a skip."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **options: empty(*size, **options))
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "stream")
    monkeypatch.setattr(device_skip, "_is_flag_free_to_read", lambda flag: False)
    model, optimizer = start("O1", verbosity=1)
    capsys.readouterr()
    train_step(model, optimizer, math.inf)
    assert capsys.readouterr().out == ""
    train_step(model, optimizer)
    text = "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to"
    assert capsys.readouterr().out == f"{text} 32768.0\n"
    train_step(model, optimizer, math.inf)
    assert amp._amp_state.loss_scalers[0].loss_scale() == 16384.0
    assert capsys.readouterr().out == f"{text} 16384.0\n"
    train_step(model, optimizer, math.inf)
    amp._amp_state.close()
    assert capsys.readouterr().out == f"{text} 8192.0\n"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_cuda(capsys: pytest.CaptureFixture[str]) -> None:
    """On a GPU no step makes the host wait, and skips are reported with the right scale."""
    model = Net().cuda()
    optimizer = OPTIMIZERS["sgd-momentum"](model.parameters())
    amp.initialize(model, optimizer, opt_level="O2", verbosity=1)
    x = X.cuda()
    capsys.readouterr()
    for step in range(6):
        if step == 3:
            torch.cuda.set_sync_debug_mode("error")
        with amp.scale_loss(
            model(x).square().mean() * (math.inf if step == 4 else 1 / 256), optimizer
        ) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.set_sync_debug_mode("default")
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 32768.0, "unskipped": 1}
    text = "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to"
    assert capsys.readouterr().out == f"{text} 32768.0\n"


def test_a_failed_backward_pass() -> None:
    """An exception inside the block leaves scale, flags and gradients as they were."""
    model, optimizer = start("O1")
    with amp.scale_loss(loss_of(model), optimizer) as scaled:
        scaled.backward()
    kept = bits([model.fc.weight.grad])

    def fail() -> None:
        with amp.scale_loss(loss_of(model), optimizer) as scaled:
            scaled.backward()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert bits([model.fc.weight.grad]) == kept
    assert amp.state_dict()["loss_scaler0"]["unskipped"] == 1
    assert len(optimizer._amp_stash.flags) == 1
