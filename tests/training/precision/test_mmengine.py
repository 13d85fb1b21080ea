"""mmengine as it is installed; what needs its GPU is run on the CPU with torch's own scaler in its place."""

import functools
import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from ampcompare.base.errors import UnsupportedCombination
from ampcompare.training.precision.base import Precision, make_precision
from ampcompare.training.precision.mmengine import MMEngine

pytest.importorskip("mmengine", reason="not installed: pip install mmengine")


def start(precision: Precision) -> tuple[nn.Module, SGD]:
    torch.manual_seed(0)
    bare = nn.Linear(8, 4)
    (model,), (optimizer,) = precision.prepare([bare], [SGD(bare.parameters(), lr=0.1)])
    assert isinstance(optimizer, SGD)
    return model, optimizer


def backward(precision: Precision, model: nn.Module, optimizer: SGD, x: Tensor) -> Tensor:
    """One forward and backward pass as the loop makes it; returns the output."""
    with precision.autocast():
        output: Tensor = model(x)
        loss = output.float().square().mean()
    precision.backward(loss, [optimizer])
    return output


@pytest.fixture
def amp_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `AmpOptimWrapper` run on the CPU: its check, its scaler and its autocast are those of a GPU."""
    make_precision("mmengine")  # imports it, with the warnings of what it imports
    from mmengine.optim.optimizer import amp_optimizer_wrapper as module

    runner, amp = ModuleType("mmengine.runner"), ModuleType("mmengine.runner.amp")
    amp.autocast = functools.partial(torch.autocast, "cpu")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mmengine.runner", runner)  # the real one needs OpenCV
    monkeypatch.setitem(sys.modules, "mmengine.runner.amp", amp)
    monkeypatch.setattr(module, "is_cuda_available", lambda: True)
    monkeypatch.setattr(module, "GradScaler", functools.partial(torch.amp.GradScaler, "cpu"))


@pytest.mark.parametrize(("dtype", "half"), [("float16", torch.float16), ("bfloat16", torch.bfloat16)])
@pytest.mark.usefixtures("amp_on_cpu")
def test_amp_scales_skips_and_goes_on(dtype: str, half: torch.dtype) -> None:
    """The wrapper's own scaler unscales once, skips an overflow and halves; its state survives a round trip."""
    precision = MMEngine(device="cuda", dtype=dtype)
    model, optimizer = start(precision)
    before = model.get_parameter("weight").detach().clone()
    backward(precision, model, optimizer, torch.full((2, 8), float("inf")))
    skipped = precision.step(optimizer)
    optimizer.zero_grad()
    assert (skipped.applied, skipped.loss_scales) == ((False,), (2.0**15,))
    assert torch.equal(model.get_parameter("weight"), before)
    output = backward(precision, model, optimizer, torch.ones(2, 8))
    assert output.dtype is half
    grads = [param.grad.clone() for param in precision.unscale(optimizer) if param.grad is not None]
    assert all(grad.abs().max() < 10 for grad in grads)
    precision.unscale(optimizer)
    assert precision.step(optimizer).applied == (True,)
    assert not torch.equal(model.get_parameter("weight"), before)
    again = MMEngine(device="cuda", dtype=dtype)
    start(again)
    again.load_state_dict(precision.state_dict())
    assert again.loss_scales() == (2.0**15,)


@pytest.mark.usefixtures("amp_on_cpu")
def test_amp_refuses_several_optimizers() -> None:
    """Each wrapper has a scaler of its own, and one loss cannot be scaled by two."""
    model = nn.Linear(4, 2)
    optimizers = [SGD([model.weight], lr=0.1), SGD([model.bias], lr=0.1)]
    with pytest.raises(UnsupportedCombination, match="use one optimizer"):
        MMEngine(device="cuda", dtype="float16").prepare([model], optimizers)
