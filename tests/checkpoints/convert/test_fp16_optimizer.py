"""Checkpoints of scripts with `apex.fp16_utils.FP16_Optimizer`, converted with their masters."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampcompare.apex.fp16_utils import BN_convert_float, DynamicLossScaler, FP16_Optimizer, network_to_half
from ampcompare.apex.fp16_utils.loss_scaler import LossScaler
from ampcompare.base.errors import ConversionError
from ampcompare.checkpoints.convert.convert import convert_file, convert_state
from ampcompare.checkpoints.convert.inspect import inspect_file
from ampcompare.checkpoints.convert.scalers import values_of_loss_scaler

pytestmark = pytest.mark.filterwarnings("ignore::ampcompare.apex.DeprecatedFeatureWarning")
HALF = 2.0**-9  # two units in the last place of fp16, on a mean of sixteen losses
DYNAMIC: dict[str, Any] = {
    "dynamic_loss_scale": True,
    "dynamic_loss_args": {"init_scale": 1024.0, "scale_window": 50},
}


def net() -> nn.Module:
    """A network with a batch norm, and two biases of zeros that are alike in fp16 and in fp32."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 10)
    )
    for bias in (model[0].bias, model[3].bias):
        nn.init.zeros_(bias)  # type: ignore[arg-type]
    return model


def loss_of(model: nn.Module, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
    return nn.functional.cross_entropy(model(x.to(dtype)).float(), x[:, :3].argmax(1))


class Script:
    """A script with `FP16_Optimizer`, whose model is fp16 but for batch norms."""

    def __init__(self, kind: Any = torch.optim.AdamW, **options: Any) -> None:
        self.model = BN_convert_float(net().half())
        self.optimizer = FP16_Optimizer(kind(self.model.parameters(), lr=1e-2), verbose=False, **options)

    def loss(self, step: int) -> Tensor:
        """Return the loss of a batch; batch norms take and give fp32."""
        first, norm, act, second, last = self.model
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        hidden = norm(first(x.half()).float())
        logits = last(second(act(hidden).half()))
        return nn.functional.cross_entropy(logits.float(), x[:, :3].argmax(1))

    def step(self, number: int) -> float:
        loss = self.loss(number)
        self.optimizer.zero_grad()
        self.optimizer.backward(loss)
        self.optimizer.step()
        return loss.item()

    def save(self, path: Path) -> None:
        state = {"epoch": 2, "state_dict": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(state, path)


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Script, Path]:
    """A script after six steps, and its file."""
    script = Script(**DYNAMIC)
    for number in range(6):
        script.step(number)
    path = tmp_path / "a.pt"
    script.save(path)
    return script, path


def test_inspect_shows_masters_and_scale_and_no_trap(trained: tuple[Script, Path]) -> None:
    """The scaler's object is read as values: writer, masters by name, scale and window, and no trap."""
    found = inspect_file(trained[1])
    assert found.writer == "a script with FP16_Optimizer"
    assert [(row["place"], row["kind"], row["entries"]) for row in found.rows] == [
        ("state_dict", "weights", 11),
        ("optimizer.optimizer_state_dict", "optimizer", 8),
        ("optimizer.fp32_from_fp16", "fp32 masters", 6),
    ]
    assert found.scales == [
        {"place": "optimizer.loss_scaler", "scale": 1024.0, "clean_steps": 6, "growth_interval": 50}
    ]
    assert (found.traps, found.objects, found.calls, found.keys) == ([], [], [], ["epoch"])


def test_native_training_goes_on_with_masters_state_and_scale(
    trained: tuple[Script, Path], tmp_path: Path
) -> None:
    script, path = trained
    result = convert_file(path, tmp_path / "b.pt", "native")
    saved = torch.load(tmp_path / "b.pt")
    assert (result.source, list(saved)) == ("FP16_Optimizer", ["epoch", "state_dict", "optimizer", "scaler"])
    names = [name for name, _ in script.model.named_parameters()]
    owned = [param for group in script.optimizer.param_groups for param in group["params"]]
    for name, param in zip(names, owned, strict=True):
        assert torch.equal(saved["state_dict"][name], param.detach())
        assert saved["state_dict"][name].dtype is torch.float32
    model = net()
    model.load_state_dict(saved["state_dict"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer.load_state_dict(saved["optimizer"])
    for ours, theirs in zip(model.parameters(), owned, strict=True):
        for key, value in script.optimizer.state[theirs].items():
            assert torch.equal(optimizer.state[ours][key], value)
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(saved["scaler"])
    assert (scaler.get_scale(), scaler.get_growth_interval(), scaler._get_growth_tracker()) == (1024.0, 50, 6)
    assert abs(loss_of(model, 6).item() - script.loss(6).item()) < HALF
    assert result.lost == ["max_loss_scale 1.67772e+07: GradScaler has none"]


def test_bounds_flags_and_a_static_scale_are_listed(tmp_path: Path) -> None:
    """A floor, another ceiling, an overflow in flight and a scale that never moves each have their line."""
    options = {"min_loss_scale": 2.0, "max_loss_scale": 512.0, "init_scale": 256.0}
    script = Script(dynamic_loss_scale=True, dynamic_loss_args=options)
    script.optimizer.backward(script.loss(0) * float("inf"))
    script.save(tmp_path / "a.pt")
    overflow = "overflow=True: saved between backward and step, that step is no longer skipped; saved after it, nothing"
    native = convert_file(tmp_path / "a.pt", tmp_path / "b.pt", "native")
    assert native.state["scaler"]["scale"] == 128.0
    assert native.lost == [
        overflow,
        "min_loss_scale 2: GradScaler has none",
        "max_loss_scale 512: GradScaler has none",
    ]
    apex = convert_file(tmp_path / "a.pt", tmp_path / "b.pt", "apex", opt_level="O1")
    assert apex.lost == [
        overflow,
        "min_loss_scale 2: no state of amp has it; give it to amp.initialize",
        "max_loss_scale 512: no state of amp has it; give it to amp.initialize",
    ]
    for scale in (1.0, 64.0):
        script = Script(torch.optim.SGD, static_loss_scale=scale)
        script.step(0)
        script.save(tmp_path / "a.pt")
        state = convert_file(tmp_path / "a.pt", tmp_path / "b.pt", "native").state
        never = {"scale": scale, "growth_interval": 2**31 - 1, "_growth_tracker": 0}
        assert {key: state["scaler"][key] for key in never} == never
        state = convert_file(tmp_path / "a.pt", tmp_path / "b.pt", "apex").state
        assert state["amp"] == {"loss_scaler0": {"loss_scale": scale, "unskipped": 1}}


def test_wrappers_and_weights_without_masters(tmp_path: Path) -> None:
    """DDP's prefix goes, and masters of other weights are counted."""
    model = nn.DataParallel(network_to_half(nn.Sequential(nn.Linear(8, 4))))
    optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), verbose=False, **DYNAMIC)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "a.pt")
    result = convert_file(tmp_path / "a.pt", tmp_path / "b.pt", "native")
    assert list(result.state["model"]) == ["1.0.weight", "1.0.bias"]
    state["model"]["module.1.0.weight"] += 1.0
    torch.save(state, tmp_path / "a.pt")
    result = convert_file(tmp_path / "a.pt", tmp_path / "b.pt", "native")
    assert "1 masters: no weight has their values in 16 bits, to tell their names" in result.lost


def test_two_optimizers_keep_two_scalers() -> None:
    """Each scaler goes its own way; what a script has to do with them is said."""
    first, second = Script(**DYNAMIC), Script(static_loss_scale=8.0)
    state = {
        "models": [_plain(script.model.state_dict()) for script in (first, second)],
        "optimizers": [_plain(script.optimizer.state_dict()) for script in (first, second)],
    }
    native = convert_state(state, "native")
    assert [scaler["scale"] for scaler in native.state["scaler"]] == [1024.0, 8.0]
    for made, source in zip(native.state["optimizers"], state["optimizers"], strict=True):
        assert made["param_groups"] == source["optimizer_state_dict"]["param_groups"]
        assert made is not source["optimizer_state_dict"]  # the source is untouched
    assert any("one for each optimizer" in line for line in native.lost)
    apex = convert_state(state, "apex")
    assert [entry["loss_scale"] for entry in apex.state["amp"].values()] == [1024.0, 8.0]
    assert any("num_losses=2" in line for line in apex.lost)


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """A state whose scaler is the dict of what it holds, as a file is read."""
    return {key: vars(value) if key == "loss_scaler" else value for key, value in state.items()}


def test_the_scalers_that_came_before(tmp_path: Path) -> None:
    """Those of fp16_utils count iterations: the clean steps since the last change are what is left of them."""
    scaler = DynamicLossScaler(init_scale=64.0, scale_window=5)
    for overflow in (False, True, *[False] * 7):
        scaler.update_scale(overflow)
    held = values_of_loss_scaler({"loss_scaler": vars(scaler)})
    assert (held.scale, held.clean, held.interval, held.least) == (64.0, 2, 5, 1.0)
    grad_scaler = convert_state(_with(vars(scaler)), "native").state["scaler"]
    native = torch.amp.GradScaler("cpu")
    native.load_state_dict(grad_scaler)
    weight = torch.nn.Parameter(torch.ones(1))
    for _ in range(4):  # both grow after the same step
        scaler.update_scale(False)
        native.scale(weight.sum()).backward()
        native.step(torch.optim.SGD([weight], lr=0.0))
        native.update()
        assert native.get_scale() == scaler.loss_scale
    assert scaler.loss_scale == 128.0
    torch.save(_with(LossScaler(16.0)), tmp_path / "a.pt")
    assert convert_file(tmp_path / "a.pt", tmp_path / "b.pt", "native").state["scaler"]["scale"] == 16.0


def _with(scaler: Any) -> dict[str, Any]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    inner = {"optimizer_state_dict": optimizer.state_dict(), "fp32_from_fp16": [[torch.ones(2)]]}
    return {"model": {"w": torch.ones(2).half()}, "optimizer": {"loss_scaler": scaler, **inner}}


class OwnScaler:
    """A loss scaler of a user's program."""

    cur_scale = 8.0


def test_another_scaler_says_what_to_do(tmp_path: Path) -> None:
    """An object that is not known is not read without its code, and nobody guesses what its attributes mean."""
    path = tmp_path / "a.pt"
    torch.save(_with(OwnScaler()), path)
    with pytest.raises(ConversionError, match="of a class that is not known"):
        convert_file(path, tmp_path / "b.pt", "native")
    assert inspect_file(path).scales == []
    for scale in (0.0, float("nan"), True, None):
        with pytest.raises(ConversionError, match="not a usable loss scale"):
            values_of_loss_scaler({"loss_scaler": {"_loss_scale": scale}})
