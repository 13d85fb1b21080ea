"""O4 and O5, which ROCm's Apex has: bfloat16's O1 and O2. `test_golden.py` replays what it recorded."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.overrides import TorchFunctionMode

from ampcompare.apex import amp
from ampcompare.base.errors import ConfigError
from ampcompare.training.precision.base import make_precision

BF16, FP32 = torch.bfloat16, torch.float32
X = torch.linspace(-1, 1, 24).reshape(6, 4)


def net() -> nn.Sequential:
    """A network with batch norm."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def initialized(level: str, **options: Any) -> tuple[Any, Any]:
    """A network and its optimizer after `amp.initialize`."""
    model = net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared: tuple[Any, Any] = amp.initialize(
            model, SGD(model.parameters(), lr=0.1, momentum=0.9), opt_level=level, verbosity=0, **options
        )
    return prepared


def test_o4_casts_as_o1_does_but_to_bfloat16() -> None:
    """Products become bfloat16, sensitive functions fp32, mixed arguments the wider type; weights stay fp32."""
    model, _ = initialized("O4")
    narrow, full = torch.ones(2, 2, dtype=BF16), torch.ones(2, 2)
    assert {param.dtype for param in model.parameters()} == {FP32}
    assert model(X).dtype is BF16
    assert (full @ full).dtype is BF16
    assert F.conv1d(full[None], full[None]).dtype is BF16
    assert nn.LSTM(2, 2)(full)[0].dtype is BF16
    assert F.softmax(narrow, 0).dtype is FP32
    assert narrow.exp().dtype is FP32
    assert (narrow + full).dtype is FP32
    assert torch.cat([narrow, full]).dtype is FP32
    assert F.cross_entropy(narrow, torch.zeros(2, dtype=torch.long)).dtype is FP32
    with pytest.raises(NotImplementedError):
        F.binary_cross_entropy(narrow, narrow)
    with pytest.raises(NotImplementedError, match=r"O4 cannot choose a type .* promotes bfloat16"):
        torch.add(torch.ones(2, dtype=torch.float16), torch.ones(2))
    amp._amp_state.close()
    assert (full @ full).dtype is FP32


def test_o1_after_o4_casts_to_fp16_again() -> None:
    """A second `initialize` replaces the casts of the first."""
    initialized("O4")
    initialized("O1")
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float16


class Recurrent(nn.Module):
    """A cell that is called at each of four time steps."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell = kind(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        for scale in (1.0, 0.7, 1.3, 0.4):
            state = self.cell(x * scale, state)
        return state[0] if isinstance(state, tuple) else state


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("make", [partial(Recurrent, kind) for kind in (nn.LSTMCell, nn.GRUCell, nn.RNNCell)])
def test_o4_sums_the_gradients_of_a_weights_uses_in_fp32(make: Any, strict: bool) -> None:
    """O4 casts a weight at each use: its gradient has the bits of as many casts by hand."""
    model = make()
    parameters = {name: param.detach().clone().requires_grad_() for name, param in model.named_parameters()}
    uses: list[Tensor] = []

    class CastsByHand(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            low = [
                value.to(BF16) if isinstance(value, Tensor) and value.dtype is FP32 else value
                for value in args
            ]
            takes = function.__name__ in ("lstm_cell", "gru_cell", "rnn_tanh_cell")
            uses.extend(args[:1] if takes else [])
            if takes and function.__name__ == "lstm_cell":
                low[1] = [value.to(BF16) for value in args[1]]
            return function(*(low if takes else args), **(kwargs or {}))

    with CastsByHand():
        torch.func.functional_call(model, parameters, (X,)).float().square().sum().backward()
    assert len(uses) > 1
    optimizer = SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O4", verbosity=0, strict=strict)
    with amp.scale_loss(model(X).float().square().sum(), optimizer) as loss:
        loss.backward()
    for name, param in model.named_parameters():
        assert torch.equal(param.grad, parameters[name].grad), name


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_bfloat16_weights_are_still_refused_elsewhere(level: str) -> None:
    """Apex's own levels know fp16 and fp32 only."""
    _, optimizer = initialized(level)
    optimizer.zero_grad()
    with pytest.raises(TypeError, match="float16 or float32"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=BF16))]})


def _trained(arm: str, make: Any) -> list[Tensor]:
    precision = make_precision(arm)
    model: nn.Module = net()
    (model,), (optimizer,) = precision.prepare([model], [make(model.parameters(), lr=0.05)])
    for index in range(4):
        with precision.autocast():
            loss = model(X * (index + 1)).float().square().mean()
        precision.backward(loss, [optimizer])
        torch.nn.utils.clip_grad_norm_(precision.unscale(optimizer), 0.5)
        precision.step(optimizer)
        optimizer.zero_grad()
    amp._amp_state.close()
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("make", [SGD, Adam])
@pytest.mark.parametrize(
    ("level", "twin"),
    [
        ("apex:O5,engine=compat", "half:bf16,bn_fp32,masters=fp32"),
        ("apex:O5,keep_batchnorm_fp32=false,engine=compat", "half:bf16,masters=fp32"),
    ],
)
def test_o5_has_the_bits_of_masters_by_hand(level: str, twin: str, make: Any) -> None:
    """Two implementations that share no code of the step agree to the last bit."""
    assert all(torch.equal(a, b) for a, b in zip(_trained(level, make), _trained(twin, make), strict=True))


@pytest.mark.parametrize("level", ["O4", "O5"])
def test_the_real_apex_is_refused(level: str) -> None:
    """NVIDIA's Apex has no such level: the arm says so, and `auto` takes ampcompare's engine."""
    with pytest.raises(ConfigError, match=f"{level} is a level of ROCm's Apex.*engine=compat"):
        make_precision(f"apex:{level},engine=nvidia")
    engine = make_precision(f"apex:{level}").engine
    assert (engine.name, "ROCm" in engine.reason) == ("compat", True)
