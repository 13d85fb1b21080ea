"""A script for `torch.amp` under other arms: what stands behind its names, and what is refused."""

import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.ao.quantization import fake_quantize

from ampcompare.backends import fp32, half, native
from ampcompare.backends.arm import Arm
from ampcompare.backends.catalog import BUILT_IN
from ampcompare.backends.script_arms import require_in_script
from ampcompare.base.errors import ScalingError, UnsupportedCombination
from ampcompare.script.recording import recorder


class RecordedSteps(recorder.RecordedSteps):
    """Keeps what is recorded."""

    def __init__(self) -> None:
        super().__init__(recorder.Recorder(None, {}))
        self.rows: list[dict[str, Any]] = []
        self.recorder.call_after_each_row(self.rows.append)

    def _of(self, kind: str) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["kind"] == kind]

    losses = property(lambda self: [row["loss"] for row in self._of("backward")])
    plain = property(lambda self: [row["loss"] for row in self._of("plain_backward")])
    notes = property(lambda self: [row["text"] for row in self._of("note")])
    steps = property(lambda self: len(self._of("step")))


def script(
    scale: bool = True, steps: int = 4, overflow_at: int = -1
) -> tuple[list[Tensor], list[torch.dtype], Any]:
    """Train as a user's script does, with autocast and GradScaler in fp16."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024, growth_interval=2) if scale else None
    dtypes = []
    for step in range(steps):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x)
            with torch.autocast("cpu", enabled=False):
                dtypes += [out.dtype, model(x).dtype]
            loss = out.float().square().mean() * (float("inf") if step == overflow_at else 1)
        optimizer.zero_grad()
        if scaler is None:
            loss.backward()
            optimizer.step()
            continue
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    return [param.detach().clone() for param in model.parameters()], dtypes, scaler and scaler.state_dict()


def by_hand(dtype: torch.dtype | None, steps: int = 4) -> list[Tensor]:
    """Return the weights of the script, written for fp32 or bf16."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        with nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype):
            loss = model(x).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize(("arm", "dtype"), [("fp32", None), ("bf16", torch.bfloat16)])
def test_a_script_for_torch_amp_trains_as_written_for_the_arm(behind: Any, arm: str, dtype: Any) -> None:
    """Under fp32 and bf16 nothing is scaled, and blocks without autocast stay so."""
    expected = by_hand(dtype)
    stand_in = behind(arm)
    weights, dtypes, _ = script()
    assert all(map(torch.equal, weights, expected))
    assert set(dtypes[::2]) == {dtype or torch.float32}
    assert set(dtypes[1::2]) == {torch.float32}
    assert stand_in.has_acted()


def test_under_its_own_arm_the_script_is_unchanged(behind: Any) -> None:
    """native:fp16 keeps the script's own settings of the scaler, and takes those that the arm names."""
    plain = script(overflow_at=1)
    behind("native:fp16")
    own = script(overflow_at=1)
    assert all(map(torch.equal, plain[0], own[0]))
    assert plain[2] == own[2]


@pytest.mark.parametrize("arm", ["fp32", "bf16"])
def test_a_scaler_without_a_scale_has_its_state(behind: Any, arm: str) -> None:
    """A script that has it on may log the scale from its state, save it and ask for its settings."""
    keys = set(torch.amp.GradScaler("cpu").state_dict())
    behind(arm)
    scaler = torch.amp.GradScaler("cpu", growth_interval=2)
    state = scaler.state_dict()
    assert set(state) == keys
    assert (state["scale"], scaler.get_scale(), state["growth_interval"]) == (1.0, 1.0, 2)
    assert (scaler.get_growth_interval(), scaler.get_growth_factor(), scaler.get_backoff_factor()) == (
        2,
        2.0,
        0.5,
    )
    scaler.load_state_dict(state)
    assert torch.amp.GradScaler("cpu", enabled=False).state_dict() == {}


def test_options_of_the_arm_win_over_the_scripts(behind: Any) -> None:
    """An initial scale that the arm names is that of the scaler."""
    behind("native:fp16,init_scale=8")
    state = script(steps=1)[2]
    assert (state["scale"], state["growth_interval"]) == (8.0, 2)


def test_o1_stands_behind_torch_amp(behind: Any) -> None:
    """O1 casts inside the blocks only, and Apex's scaler halves after an overflow and skips the step."""
    stand_in = behind("O1")
    weights, dtypes, state = script(overflow_at=1)
    assert set(dtypes[::2]) == {torch.float16}
    assert set(dtypes[1::2]) == {torch.float32}
    assert (state["scale"], state["_growth_tracker"]) == (32768.0, 2)
    assert nn.Linear(6, 3)(torch.ones(1, 6)).dtype is torch.float32
    torch.testing.assert_close(weights, script_like_o1(), rtol=1e-2, atol=1e-3)
    assert stand_in.has_acted()


def script_like_o1() -> list[Tensor]:
    """Return the weights in fp32 with the second step left out."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in (0, 2, 3):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        nn.functional.linear(x, model.weight, model.bias).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


def switchable(
    *, autocast: bool | None, scaler: bool, device: str = "cpu", model: nn.Module | None = None
) -> tuple[torch.dtype, float]:
    """Train a step as a script does that has a switch for each, and return the type of its output and the scale.

    Args:
        autocast: None has no block, as nanoGPT in fp32.
    """
    model = nn.Linear(6, 3) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scales = torch.amp.GradScaler(device, enabled=scaler)
    block = (
        nullcontext() if autocast is None else torch.autocast(device, dtype=torch.bfloat16, enabled=autocast)
    )
    with block:
        out = model(torch.ones(2, 6))
    scales.scale(out.float().square().mean()).backward()
    scales.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    scales.step(optimizer)
    scales.update()
    return out.dtype, scales.get_scale()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("arm", ["native:fp16", "O1"])
def test_a_script_in_bf16_gets_the_scale_of_the_arm(behind: Any, arm: str, device: str) -> None:
    """Its GradScaler is off, since bf16 needs none; one for a device that is not there would be off as well."""
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("the device is there")
    behind(arm)
    assert switchable(autocast=True, scaler=False, device=device) == (torch.float16, 65536.0)


@pytest.mark.filterwarnings("ignore::ampcompare.apex.DeprecatedFeatureWarning")
@pytest.mark.parametrize("autocast", [False, None])
@pytest.mark.parametrize("arm", ["native:fp16", "bf16", "O1", "O2", "half"])
def test_a_script_with_torch_amp_off_is_a_plain_one(behind: Any, arm: str, autocast: bool | None) -> None:
    """The arm casts and scales as in a script without `torch.amp`, and the scaler stays off."""
    made = [nn.Linear(6, 3), nn.Linear(6, 3)]
    made[1].load_state_dict(made[0].state_dict())
    stand_in = behind(arm)
    assert switchable(autocast=autocast, scaler=False, model=made[0])[1] == 1.0
    assert stand_in.has_acted()
    behind.end()
    behind(arm)
    optimizer = torch.optim.SGD(made[1].parameters(), lr=0.1)
    made[1](torch.ones(2, 6)).float().square().mean().backward()
    nn.utils.clip_grad_norm_(made[1].parameters(), 0.01)
    optimizer.step()
    assert all(map(torch.equal, made[0].state_dict().values(), made[1].state_dict().values()))


def test_a_script_without_a_scaler_is_recorded(behind: Any) -> None:
    """Its losses come from the backward pass, its steps from the optimizer."""
    rows = RecordedSteps()
    behind("bf16", rows)
    script(scale=False)
    assert (len(rows.losses), rows.steps) == (4, 4)


def test_apex_names_lead_to_the_arm(behind: Any) -> None:
    """`from apex import amp` and its submodules give the arm's functions, and the first weights are noted before."""
    behind("bf16")
    from ampcompare.apex import amp
    from ampcompare.apex.amp.frontend import initialize

    model = nn.Linear(6, 3)
    model, optimizer = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1))
    out = model(torch.ones(1, 6))
    assert out.dtype is torch.bfloat16
    with amp.scale_loss(out.float().sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()


def test_data_are_loaded_without_casts(behind: Any) -> None:
    """What a loader computes in this process is the same under all arms."""
    behind("bf16")
    from ampcompare.apex import amp

    class Products(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Tensor:
            return torch.ones(2, 2) @ torch.ones(2, 2)

    model = nn.Linear(2, 2)
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1))
    (batch,) = torch.utils.data.DataLoader(Products(), batch_size=2)
    assert batch.dtype is torch.float32


def test_other_backends_cannot_stand_behind_a_script() -> None:
    """A library that trains by itself is no arm for a script."""
    with pytest.raises(UnsupportedCombination, match="cannot replace amp"):
        require_in_script(Arm.parse("accelerate"))


@pytest.mark.parametrize(("like", "arm"), [(native, "bf16"), (half, "bf16,masters=fp32"), (fp32, "")])
def test_a_backend_of_another_name_stands_behind_a_script(
    behind: Any, monkeypatch: pytest.MonkeyPatch, like: ModuleType, arm: str
) -> None:
    """What its description says decides, not its name: a script trains as under the backend that says the same."""
    behind(f"{like.__name__.rpartition('.')[2]}:{arm}".removesuffix(":"))
    expected = script()
    behind.end()
    monkeypatch.setitem(BUILT_IN, "mine", like.SPEC)
    behind(f"mine:{arm}".removesuffix(":"))
    found = script()
    assert found[1] == expected[1]
    assert all(map(torch.equal, found[0], expected[0]))
    monkeypatch.setitem(BUILT_IN, "mine", replace(like.SPEC, in_script=None))
    with pytest.raises(UnsupportedCombination, match="cannot replace amp"):
        behind("mine")


@pytest.mark.parametrize("arm", ["native:fp16", "O1"])
def test_a_step_of_a_scaler_that_scaled_nothing_is_refused(behind: Any, arm: str) -> None:
    """It would divide true gradients by the scale."""
    behind(arm)
    model = nn.Linear(6, 3)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    for step in range(2):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(torch.ones(1, 6)).float().sum()
        if step == 0:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    loss.backward()
    with pytest.raises(
        ScalingError, match=r"test_stand_in\.py:\d+: .*has scaled no loss since its last update"
    ):
        scaler.step(optimizer)


@pytest.mark.parametrize("arm", ["native:fp16", "O1", "O2", "half:dynamic"])
@pytest.mark.parametrize("unscales", [False, True])
def test_an_update_between_the_steps_of_two_optimizers_is_named(
    behind: Any, arm: str, unscales: bool
) -> None:
    """Not the backward pass, which is right; a scaled pass for each optimizer trains."""
    behind(arm)
    models = [nn.Linear(6, 3) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    scaler = torch.amp.GradScaler("cpu")

    def scale_and_pass_back() -> None:
        with torch.autocast("cpu", dtype=torch.float16):
            losses = [model(torch.ones(1, 6)).float().sum() for model in models]
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale(sum(losses)).backward()

    for optimizer in optimizers:
        scale_and_pass_back()
        scaler.step(optimizer)
        scaler.update()
    scale_and_pass_back()
    scaler.step(optimizers[0])
    line = sys._getframe().f_lineno + 1
    scaler.update()
    update = rf"scaler\.update\(\) in .*test_stand_in\.py:{line} ran between .* once, after the last step"
    with pytest.raises(ScalingError, match=rf"test_stand_in\.py:{line + 3}: {update}"):
        (scaler.unscale_ if unscales else scaler.step)(optimizers[1])


@pytest.mark.parametrize("arm", ["native:fp16", "O1"])
def test_a_scaler_without_casts_is_refused(behind: Any, arm: str) -> None:
    """A script whose mixed precision is switched off would train in fp32 under the name of the arm."""
    behind(arm)
    model = nn.Linear(6, 3)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    with torch.autocast("cpu", enabled=False):
        loss = model(torch.ones(1, 6)).sum()
    scaler.scale(loss).backward()
    with pytest.raises(ScalingError, match="has entered no enabled autocast block"):
        scaler.step(optimizer)


def test_amp_that_is_switched_off_is_refused(behind: Any) -> None:
    """Under arms of Apex too: the script would train in fp32."""
    behind("O2")
    from ampcompare.apex import amp

    model = nn.Linear(6, 3)
    with pytest.raises(
        UnsupportedCombination, match=r"test_stand_in\.py:\d+: amp\.initialize has enabled=False"
    ):
        amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), enabled=False)


@pytest.mark.parametrize(("arm", "notes"), [("bf16", 0), ("native:fp16", 1)])
def test_losses_without_a_scale_are_recorded(behind: Any, arm: str, notes: int) -> None:
    """A plain backward pass of a script for Apex has a loss too; that several losses share one scale is noted."""
    rows = RecordedSteps()
    behind(arm, rows)
    from ampcompare.apex import amp

    model = nn.Linear(6, 3)
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), num_losses=2)
    with amp.scale_loss(model(torch.ones(1, 6)).float().sum(), optimizer) as scaled:
        scaled.backward()
    model(torch.ones(1, 6)).float().sum().backward()
    assert (len(rows.losses), len(rows.plain)) == ((0, 0) if notes else (1, 1))  # a scaler records its own
    assert len(rows.notes) == notes


@pytest.mark.parametrize("arm", ["native:fp16", "O1", "O2"])
def test_a_closure_is_refused_where_a_step_may_be_skipped(behind: Any, arm: str) -> None:
    """The reason is the closure, not the loss that it has not scaled yet."""
    behind(arm)
    model = nn.Linear(6, 3)
    optimizer, scaler = torch.optim.LBFGS(model.parameters()), torch.amp.GradScaler("cpu")
    with pytest.raises(
        UnsupportedCombination, match=r"test_stand_in\.py:\d+: scaler\.step is called with a closure"
    ):
        scaler.step(optimizer, lambda: 0.0)


class Positions(nn.Module):
    """Multiplies by fp32 numbers that it makes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x * torch.arange(4.0))


class Graph(nn.Module):
    """Multiplies by a sparse matrix, which no list of Apex names."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        return torch.sparse.mm(torch.eye(3).to_sparse(), self.layer(x))


class Probability(nn.Module):
    """Ends in a probability, and a loss that torch and Apex refuse in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        return nn.BCELoss()(torch.sigmoid(self.layer(x)), torch.ones(3, 2))


class Head(nn.Module):
    """Widens what its body makes before its last layer, as many classifiers and language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(x).float())


class Attention(nn.Module):
    """Rotates its keys in fp32, and leaves its queries as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        hidden = self.layer(x)[None, None]
        return nn.functional.scaled_dot_product_attention(hidden, hidden.float(), hidden)


class Masked(nn.Module):
    """Masks with a number that fp16 does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        hidden = self.layer(x)
        return hidden.masked_fill(hidden > 0, -1e9).softmax(-1)


class Wrapped(Positions):
    """Raises what torch has raised again, in words of its own."""

    def forward(self, x: Tensor) -> Any:
        try:
            return super().forward(x)
        except RuntimeError as error:
            raise ValueError(f"exception encountered when calling the layer:\n{error}") from None


class Twice(Wrapped):
    """And once more."""

    def forward(self, x: Tensor) -> Any:
        try:
            return super().forward(x)
        except ValueError as error:
            raise KeyError("layer") from error


class Turn(nn.Module):
    """A layer that turns by the inverse of a matrix, which torch computes in fp32 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.turn = Cayley()

    def forward(self, x: Any) -> Any:
        return self.turn(self.body(x))


class Cayley(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.skew = nn.Parameter(torch.zeros(4, 4))

    def forward(self, x: Any) -> Any:
        skew, eye = self.skew - self.skew.t(), torch.eye(4, dtype=x.dtype)
        return x @ ((eye + skew) @ (eye - skew).inverse())


class Inside(nn.Module):
    """Calls a function of torch, of which a part is written in Python, with what a layer returns."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x: Any) -> Any:
        return self.function(self.layer(x))


class Spectrum(nn.Module):
    """A part of a model without weights, which torch computes in fp32 alone."""

    def forward(self, x: Any) -> Any:
        return torch.fft.rfft(x).abs()


class SparseTable(nn.Module):
    """A table that is read twice, whose sparse gradients torch adds up in fp32 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 4, sparse=True)

    def forward(self, x: Any) -> Any:
        return self.table(x.long()) + self.table(x.long() * 2)


class Table(nn.Module):
    """A part without weights, whose product of a buffer and of positions is written for fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.ones(1, 4))

    def forward(self, positions: Any) -> Any:
        return positions[:, None].float() @ self.frequencies


class Positioned(nn.Module):
    """A model with such a table."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.layer, self.table, self.most = nn.Linear(4, 4), Table(), most

    def forward(self, x: Any) -> Any:
        return self.layer(x) + self.table(torch.arange(self.most - 2, self.most + 1)).to(x.dtype)


class Running(nn.Module):
    """Writes what a layer returns into a state of its own, in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        state = torch.zeros(3, 4)
        state[x[:, 0] > 0] = self.cell(x[x[:, 0] > 0])
        return self.head(state)


class Windowed(Inside):
    """A model that computes a spectrum, with a window that arms with autocast leave in fp32."""

    def __init__(self) -> None:
        super().__init__(lambda x: torch.stft(x.flatten(), 4, return_complex=True, window=self.window).abs())
        self.register_buffer("window", torch.ones(4))


class Outside(nn.Module):
    """A model with such a part, which `keep_fp32` can name."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.inside = nn.Linear(4, 4), Inside(function)

    def forward(self, x: Any) -> Any:
        return self.inside(self.layer(x))


class Product(torch.autograd.Function):
    """A product by hand, whose backward pass lacks `custom_bwd`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.t() @ gradient


class ProductOnGpu(Product):
    """The same, decorated for a GPU alone."""

    forward = staticmethod(torch.amp.custom_fwd(Product.forward, device_type="cuda"))
    backward = staticmethod(torch.amp.custom_bwd(Product.backward, device_type="cuda"))


class ByHand(nn.Module):
    def __init__(self, function: type[torch.autograd.Function] = Product) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.ones(4, 4)), function

    def forward(self, x: Tensor) -> Any:
        return self.function.apply(x, self.weight)


def make_quantized_model() -> nn.Module:
    """A model of two layers, each with a part of torch without weights, whose scales are fp32 and which takes no other
    type."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        layer.register_module("quantizer", fake_quantize.FusedMovingAvgObsFakeQuantize())
        layer.register_forward_hook(lambda module, _, output: module.quantizer(output))
    return model


def largest_eigenvalue(x: Tensor) -> Tensor:
    return torch.lobpcg(x.t() @ x, k=1)[0]


def spectrum(x: Tensor) -> Tensor:
    return torch.stft(x.flatten(), 4, return_complex=True, window=torch.ones(4, dtype=x.dtype)).abs()


def frequencies(x: Tensor) -> Tensor:
    return torch.fft.rfft(x).abs()


def make_spectral_model() -> nn.Module:
    """Return a model with a complex weight, whose gradients torch cannot unscale."""
    model = Outside(frequencies)
    model.inside.weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    return model


IN_16_BITS = (
    r"torch cannot compute this in 16 bits on this device \(.*\); compare fp32, or cast "
    r"its inputs to fp32 there$"
)
IN_FP32_BLOCK = (
    r"torch cannot compute this in 16 bits on this device \(.*\); compare fp32, or call {} inside of "
    r"`with {}.*`, with its inputs cast to fp32$"
)
KEPT = r"test_stand_in.py:\d+: under apex:O2 the script makes or keeps fp32 tensors .*; "
ONE_TYPE = r"give it tensors of one type there, for example with .to\(other.dtype\)$"
PRODUCT = rf"{KEPT}compare apex:O2,keep_fp32=layer, native:bf16, native:fp16 or apex:O1, or {ONE_TYPE}"


@pytest.mark.filterwarnings("ignore::ampcompare.apex.DeprecatedFeatureWarning")
@pytest.mark.parametrize(
    ("arm", "advised"),
    [
        ("apex:O1,keep_fp32=inside", "native:bf16,keep_fp32=inside or fp32"),
        ("native:fp16", "native:bf16 or fp32"),
    ],
)
def test_complex_gradients_are_advised_an_arm_without_a_scale(behind: Any, arm: str, advised: str) -> None:
    """With the modules in fp32 that the arm keeps so, which are those without a kernel."""
    stand_in = behind(arm)
    model = Outside(torch.relu)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # one that lives: what it holds is trained
    model(torch.ones(3, 4))
    assert optimizer.param_groups
    error = RuntimeError(
        "\"_amp_foreach_non_finite_check_and_unscale_cpu\" not implemented for 'ComplexFloat'"
    )
    assert str(stand_in.find_refusal_of_error(error)).endswith(f"; compare {advised}")


class Curved(torch.optim.Optimizer):
    """Takes a product of the second derivative with ones for each weight, by the graph of the gradients."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self) -> None:  # type: ignore[override]
        params = [one for one in self.param_groups[0]["params"] if one.grad is not None]
        seconds = torch.autograd.grad([one.grad.sum() for one in params], params)
        with torch.no_grad():
            for param, second in zip(params, seconds, strict=True):
                param -= 0.1 * param.grad / (1 + second.abs())


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize(
    ("arm", "trains"),
    [("native:fp16", False), ("apex:O2", False), ("half:bf16,masters=fp32", False), ("native:bf16", True)],
)
def test_an_optimizer_that_differentiates_gradients_has_a_reason(behind: Any, arm: str, trains: bool) -> None:
    """Unscaled gradients, and those of masters, have no graph."""
    stand_in = behind(arm)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    optimizer = Curved(model.parameters())

    def train() -> None:
        for _ in range(3):
            model(torch.ones(3, 4)).float().square().mean().backward(create_graph=True)
            optimizer.step()
            for param in model.parameters():
                param.grad = None

    if trains:
        train()
        return
    with pytest.raises((RuntimeError, ValueError)) as raised:
        train()
    found = str(stand_in.find_refusal_of_error(raised.value))
    assert "have no graph" in found
    assert "compare native:bf16 or fp32" in found


@pytest.mark.parametrize("arm", ["native:fp16", "apex:O2", "native:bf16"])
def test_an_overflow_in_anomaly_mode_has_its_reason(behind: Any, arm: str) -> None:
    """A loss scale would have skipped the step; under an arm without one the error is the script's own."""
    stand_in = behind(arm)
    error = RuntimeError("Function 'AddmmBackward0' returned nan values in its 0th output.")
    with torch.autograd.set_detect_anomaly(True):
        found = stand_in.find_refusal_of_error(error)
    assert (found is None) == (arm == "native:bf16")
    assert found is None or "leave out set_detect_anomaly" in str(found)
    assert stand_in.find_refusal_of_error(error) is None


@pytest.mark.filterwarnings("ignore::ampcompare.apex.DeprecatedFeatureWarning")
@pytest.mark.parametrize(
    ("arm", "kind", "why"),
    [
        ("apex:O2", Positions, PRODUCT),
        ("apex:O2", Head, PRODUCT.replace("=layer", "=head")),
        ("apex:O2", Wrapped, PRODUCT),
        ("apex:O2", Twice, PRODUCT),
        (
            "apex:O1",
            Probability,
            r"test_stand_in.py:\d+: under apex:O1 Apex refuses BCELoss.*; compare fp32, or .*Logits",
        ),
        *(
            (
                arm,
                Masked,
                rf"test_stand_in.py:\d+: under {arm} a tensor there is fp16, .* 65504.*; compare native:bf16, or use",
            )
            for arm in ("apex:O1", "apex:O2", "native:fp16", "half")
        ),
        (
            "apex:O1",
            Graph,
            rf"test_stand_in.py:\d+: under apex:O1 .* Apex's lists .* lack it \(.*\); {ONE_TYPE}",
        ),
        (
            "apex:O2",
            SparseTable,
            r"cannot compute a gradient in 16 bits .*; compare native:bf16, native:fp16 or fp32, or keep the module",
        ),
        (
            "apex:O2",
            lambda: nn.Sequential(nn.Linear(4, 4), Spectrum()),
            r"cannot compute this in 16 bits .*; compare apex:O2,keep_fp32=1 or fp32, or cast its inputs",
        ),
        (
            "apex:O2",
            Turn,
            r"cannot compute this in 16 bits .*; compare apex:O2,keep_fp32=turn or fp32, or cast its inputs",
        ),
        ("apex:O2", partial(Inside, largest_eigenvalue), IN_16_BITS.replace(".*", "KeyError: torch.float16")),
        ("apex:O2", partial(Inside, spectrum), IN_16_BITS),
        *(
            (arm, Windowed, IN_16_BITS.replace("compare fp32", f"compare {trains} or fp32"))
            for arm, trains in (
                ("apex:O2", "native:fp16"),
                ("half", "native:fp16"),
                ("half:bf16", "native:bf16"),
            )
        ),
        *(
            (
                arm,
                make_spectral_model,
                IN_16_BITS.replace("compare fp32", f"compare {kept},keep_fp32=inside or fp32"),
            )
            for arm, kept in (("apex:O2", "native:bf16"), ("half:bf16", "half:bf16"))
        ),
        ("apex:O1", partial(Inside, spectrum), IN_FP32_BLOCK.format("stft", "amp.disable_casts")),
        *(
            (
                "native:bf16",
                partial(Inside, function),
                IN_FP32_BLOCK.format("svd_lowrank", "torch.autocast.device_type, enabled=False"),
            )
            for function in (
                lambda x: torch.svd_lowrank(x, 2)[1],
                lambda x: torch.svd_lowrank(x.float(), 2)[1],
            )
        ),
        *(
            (
                arm,
                partial(Outside, frequencies),
                IN_16_BITS.replace("compare fp32", f"compare {kept}=inside or fp32"),
            )
            for arm, kept in (("apex:O1", "apex:O1,keep_fp32"), ("native:bf16", "native:bf16,keep_fp32"))
        ),
        (
            "apex:O1",
            make_spectral_model,
            IN_16_BITS.replace("compare fp32", "compare native:bf16,keep_fp32=inside or fp32"),
        ),
        (
            "half:bf16",
            partial(Inside, largest_eigenvalue),
            r"code of torch itself in lobpcg computes with both types \(.*\); compare fp32, or cast its inputs",
        ),
        (
            "native:fp16",
            ByHand,
            r"Product gets tensors of both types in its backward pass, where autocast is off \(.*\); compare fp32, or "
            r"decorate its forward with torch.amp.custom_fwd and its backward with torch.amp.custom_bwd, both with the "
            r"device_type that it computes on$",
        ),
        *(
            (
                arm,
                partial(Positioned, most),
                rf"do not fit the 16-bit buffers, which the arm has cast \(.*\); compare {arm}.keep_fp32=table"
                rf"(, native:bf16, native:fp16 or apex:O1)?, or {remedy}",
            )
            for arm, most, remedy in (
                ("half:bf16", 511, r"compute in fp32 there: 16 bits round its whole numbers"),
                ("half:bf16", 255, ONE_TYPE),
                ("apex:O2", 511, ONE_TYPE),
                ("apex:O2", 4095, r"compute in fp32 there: 16 bits round its whole numbers"),
            )
        ),
        (
            "native:bf16",
            Running,
            rf"tensors of both types, .* \(.*\); compare native:bf16,keep_fp32=cell or fp32, or {ONE_TYPE}",
        ),
        (
            "native:fp16",
            partial(ByHand, ProductOnGpu),
            r"Product\w* gets .* where autocast is off, as its custom_fwd is for cuda \(.*\); compare fp32, or give "
            r"custom_fwd and custom_bwd the device_type that it computes on$",
        ),
        *(
            (
                arm,
                make_quantized_model,
                rf"{why} \(.*\); compare {arm}{':,'[':' in arm]}keep_fp32=FusedMovingAvgObsFakeQuantize or fp32",
            )
            for arm, why in (
                (
                    "native:fp16",
                    r"code of torch itself in 0.quantizer .*, which torch.autocast does not cast",
                ),
                ("apex:O2", r"takes fp32 alone, and gets 16-bit tensors"),
                ("half", r"takes fp32 alone, and gets 16-bit tensors"),
            )
        ),
        (
            "apex:O1",
            Attention,
            rf".*Apex's lists .* lack it .*; compare native:bf16 or native:fp16, or {ONE_TYPE}",
        ),
    ],
)
def test_types_that_do_not_fit_are_explained(
    behind: Any, arm: str, kind: Callable[[], nn.Module], why: str
) -> None:
    """What torch raises on mixed types names the line, the arm and the way out; other errors and fp32 are as raised."""
    stand_in = behind(arm)
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()

    with pytest.raises((RuntimeError, ValueError, KeyError)) as raised:
        train()
    assert re.search(why, str(stand_in.find_refusal_of_error(raised.value)))
    assert stand_in.find_refusal_of_error(RuntimeError("out of memory")) is None
    behind.end()
    assert behind("fp32").find_refusal_of_error(raised.value) is None
