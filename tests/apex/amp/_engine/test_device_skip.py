"""Loss scaling without host reads, for optimizers whose fused kernels take the overflow flag."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ampcompare.apex import amp
from ampcompare.apex.amp._engine import device_skip
from ampcompare.apex.amp._engine.device_scale import DeviceScale, is_exact_on_device
from ampcompare.apex.amp.scaler import LossScaler

X = torch.linspace(-1, 1, 12).reshape(3, 4)
Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, fused=True),
    "sgd-momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-3, fused=True),
    "sgd-nesterov": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True, fused=True),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, fused=True),
    "adamw-amsgrad": lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True, fused=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05, fused=True),
}


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a CPU be served like a device that makes the host wait."""
    monkeypatch.setattr(device_skip, "_DEVICE_TYPES", frozenset({"cpu", "cuda"}))


class Net(nn.Module):
    """A half-able layer and a batch norm, so that O2 has both kinds of masters."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.bn = nn.BatchNorm1d(4)
        with torch.no_grad():
            self.fc.weight.copy_(torch.linspace(-0.5, 0.5 + seed, 16).reshape(4, 4))
            self.fc.bias.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bn(self.fc(x))


def loss_of(model: nn.Module, factor: float = 1.0) -> torch.Tensor:
    # Small enough for half gradients at the first dynamic scale.
    return (model(X).float() * torch.arange(1.0, 5.0) + 1).square().mean() * (factor / 256)


def read_on_host(optimizer: torch.optim.Optimizer) -> None:
    """Keep an optimizer on the path that reads flags: Apex's skip runs no hooks, so hooks ask for it."""
    optimizer.register_step_post_hook(lambda *_: None)


def start(level: str, make: Make = OPTIMIZERS["sgd-momentum"], *, host: bool = False, **options: Any) -> Any:
    model = Net()
    optimizer = make(model.parameters())
    if host:
        read_on_host(optimizer)
    return amp.initialize(model, optimizer, opt_level=level, **{"loss_scale": "dynamic", "verbosity": 0, **options})


def train_step(model: nn.Module, optimizer: Any, factor: float = 1.0, **options: Any) -> None:
    with amp.scale_loss(loss_of(model, factor), optimizer, **options) as scaled:
        scaled.backward()
    optimizer.step()
    optimizer.zero_grad()


def bits(tensors: Any) -> list[Any]:
    return [tensor.detach().float().view(torch.int32).tolist() for tensor in tensors]


def moments(optimizer: torch.optim.Optimizer) -> list[Any]:
    return bits(
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    )


@contextmanager
def passes_on_device() -> Iterator[list[bool]]:
    """Note for each exit of `scale_loss` that it went the way without host reads."""
    seen: list[bool] = []
    original = LossScaler.end_device_pass

    def end(self: LossScaler, *, update: bool) -> None:
        seen.append(update)
        original(self, update=update)

    LossScaler.end_device_pass = end  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        LossScaler.end_device_pass = original  # type: ignore[method-assign]


def trajectory(level: str, make: Make, capsys: pytest.CaptureFixture[str], *, host: bool) -> Any:
    model, optimizer = start(level, make, host=host, verbosity=1)
    amp._amp_state.loss_scalers[0]._scale_seq_len = 20
    capsys.readouterr()
    steps = []
    with passes_on_device() as seen:
        for step in range(60):
            train_step(model, optimizer, math.inf if step in (0, 30, 31) else 1.0)
            steps.append((bits(amp.master_params(optimizer)), bits(model.parameters()), amp.state_dict()))
    assert len(seen) == (0 if host else 60)
    amp._amp_state.close()
    return steps, moments(optimizer), capsys.readouterr().out


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_sixty_steps_as_with_host_reads(level: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights, masters, moments, scales, skips and messages equal those of the host-reading path, bit for bit."""
    on_device = trajectory(level, OPTIMIZERS[name], capsys, host=False)
    on_host = trajectory(level, OPTIMIZERS[name], capsys, host=True)
    assert on_device[0] == on_host[0]
    assert on_device[1] == on_host[1]
    assert on_device[2] == on_host[2]
    assert on_device[2].count("Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to") == 3
    weights = [step[0] for step in on_device[0]]
    assert weights[30] == weights[29] != weights[33]


@pytest.mark.parametrize("level", ["O0", "O3"])
def test_a_dynamic_scale_at_other_levels(
    level: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Levels that do not replace `step` themselves skip in the kernel too."""
    monkeypatch.setattr(LossScaler, "warned_unscaling_non_fp32_grad", True)  # said once per process
    # Not SGD: torch 2.13 leaves a stray value in the momentum of half parameters, from run to run another one.
    make = OPTIMIZERS["adam"]
    assert trajectory(level, make, capsys, host=False) == trajectory(level, make, capsys, host=True)


def several(level: str, name: str, capsys: pytest.CaptureFixture[str], *, host: bool) -> Any:
    models = [Net(0), Net(1)]
    optimizers = [OPTIMIZERS[name](model.parameters()) for model in models]
    if host:
        for optimizer in optimizers:
            read_on_host(optimizer)
    amp.initialize(models, optimizers, opt_level=level, num_losses=3, verbosity=1)
    capsys.readouterr()
    steps = []
    overflows = {(0, 2), (3, 0), (7, 1), (7, 0), (11, 2), (11, 1), (20, 1)}
    with passes_on_device() as seen:
        for step in range(30):
            factor = {loss: math.inf if (step, loss) in overflows else 1.0 for loss in range(3)}
            # Both optimizers, accumulation over two losses, and one optimizer that steps every other time.
            with amp.scale_loss(loss_of(models[0], factor[0]), optimizers[0], loss_id=0) as scaled:
                scaled.backward()
            with amp.scale_loss(loss_of(models[1], factor[1]), [optimizers[1]], loss_id=1) as scaled:
                scaled.backward()
            both = loss_of(models[0], factor[2]) + loss_of(models[1])
            with amp.scale_loss(both, optimizers, loss_id=2, delay_unscale=step % 5 == 4) as scaled:
                scaled.backward()
            optimizers[0].step()
            if step % 2:
                optimizers[1].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            weights = [bits(amp.master_params(optimizer)) for optimizer in optimizers]
            steps.append((weights, amp.state_dict(), capsys.readouterr().out))
    assert len(seen) == (0 if host else 84)  # 90 passes, 6 of them delayed
    amp._amp_state.close()
    return steps


@pytest.mark.parametrize("name", ["sgd-momentum", "adam"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_several_losses_and_optimizers(level: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Three scalers, shared and separate backward passes and late steps skip what Apex would skip, and nothing else."""
    on_device, on_host = several(level, name, capsys, host=False), several(level, name, capsys, host=True)
    assert on_device == on_host
    assert sum("Gradient overflow" in step[2] for step in on_host) >= 5


class CountReads(TorchDispatchMode):
    """Count what makes the host wait for a value of the device."""

    reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reads += func.overloadpacket is torch.ops.aten._local_scalar_dense
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["sgd-momentum", "adam"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_no_host_reads(level: str, name: str) -> None:
    """With messages off no step reads a value, overflow or not; the host-reading path reads once per step."""
    counts = []
    for host in (False, True):
        model, optimizer = start(level, OPTIMIZERS[name], host=host)
        train_step(model, optimizer)
        with CountReads() as mode:
            for factor in (1.0, math.inf, 1.0):
                train_step(model, optimizer, factor)
        counts.append(mode.reads)
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


def test_a_cpu_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where reading the flag costs nothing it is read, with any optimizer."""
    monkeypatch.undo()
    model, optimizer = start("O1")
    with passes_on_device() as seen:
        train_step(model, optimizer, math.inf)
    assert seen == []
    assert amp._amp_state.loss_scalers[0].loss_scale() == 32768.0


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


def test_delayed_overflow_check() -> None:
    """Gradients are unscaled while the scale stays and no step is skipped."""
    model, optimizer = start("O1")
    with amp.scale_loss(loss_of(model), optimizer, delay_overflow_check=True) as scaled:
        scaled.backward()
    reference = Net()
    loss_of(reference).backward()
    assert reference.fc.weight.grad is not None
    torch.testing.assert_close(model.fc.weight.grad, reference.fc.weight.grad, rtol=0.02, atol=1e-4)
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 65536.0, "unskipped": 0}
    assert optimizer._amp_stash.flags == []


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


def test_bounds_of_the_scale() -> None:
    """Floor and ceiling hold as on the host; only exact ones are left to the device."""
    assert is_exact_on_device(2.0**16, None, 2.0**24)
    assert is_exact_on_device(2.0**16, 0, 2.0**24)
    assert not is_exact_on_device(2.0**16, 2.0**17, 2.0**24)
    assert not is_exact_on_device(2.0**25, None, 2.0**24)
    assert not is_exact_on_device(2.0**16, None, None)
    assert not is_exact_on_device(3.0, None, 2.0**24)
    for factors in ([math.inf] * 5 + [1.0] * 9, [1.0] * 12):
        seen = []
        for host in (False, True):
            model, optimizer = start("O1", host=host, min_loss_scale=2.0**13, max_loss_scale=2.0**18)
            amp._amp_state.loss_scalers[0]._scale_seq_len = 2
            scales = []
            for factor in factors:
                train_step(model, optimizer, factor)
                scales.append(amp.state_dict())
            seen.append(scales)
            amp._amp_state.close()
        assert seen[0] == seen[1]


def test_an_endless_overflow_keeps_the_inverse_finite() -> None:
    """The inverse scale on the device stops at the largest float, as on the host."""
    scale = DeviceScale(torch.device("cpu"))
    scale.load(2.0**-126, 0)
    for _ in range(30):
        scale.update(torch.ones(()), 2000, None, 2.0**24)
    assert scale.inverse.item() == torch.finfo(torch.float32).max
    assert scale.read() == (0.0, 0)


@pytest.mark.parametrize("windows", [[3], [1], [3, 2, 3]], ids=str)
def test_the_ceiling_is_looked_at_in_time(windows: list[int]) -> None:
    """The scale follows the host's arithmetic though the ceiling is looked at only where it can have been reached."""
    device, host = DeviceScale(torch.device("cpu")), LossScaler("dynamic", max_loss_scale=2.0**18)
    host._unskipped = 1
    device.load(host.loss_scale(), 1)
    for step in range(300):
        overflow = step % 37 == 5 or step > 290
        host._scale_seq_len = windows[step // 100 % len(windows)]
        host.clear_overflow_state()
        host._has_overflow = overflow
        host.update_scale()
        device.update(torch.tensor(float(overflow)), host._scale_seq_len, None, 2.0**18)
        assert device.read() == (host.loss_scale(), host._unskipped)


class FakeEvent:
    """An event of a device that has done its work."""

    def record(self, stream: Any) -> None:
        assert stream == "stream"

    def synchronize(self) -> None:
        return


def test_messages_come_with_the_next_pass(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a device whose reads wait, the next `scale_loss`, or reading the scale, reports a skip."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **options: empty(*size, **options))
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "stream")
    monkeypatch.setattr(device_skip, "_is_free_to_read", lambda flag: False)
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
        with amp.scale_loss(model(x).square().mean() * (math.inf if step == 4 else 1 / 256), optimizer) as scaled:
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
