"""Checkpoints between Apex and torch.amp."""

from __future__ import annotations

import copy
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampcompare.checkpoint.convert.convert import convert_file, convert_state
from ampcompare.checkpoint.convert.load import load_any, objects_of
from ampcompare.checkpoint.convert.scalers import apex_from_scalers, scalers_from_apex
from ampcompare.checkpoint.store.file import read_checkpoint, write_checkpoint
from ampcompare.cli import main
from ampcompare.errors import CheckpointError, ConversionError

pytestmark = pytest.mark.filterwarnings("ignore::ampcompare.apex.DeprecatedFeatureWarning")
HALF = 2.0**-9  # two units in the last place of fp16, on a mean of sixteen losses
STEPS = 12


def build(kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A network with a batch norm, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    return model, kind(model.parameters(), lr=1e-2, **options)


def loss_of(model: nn.Module, step: int) -> Tensor:
    """The loss of one fixed batch."""
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
    return nn.functional.cross_entropy(model(x).float(), x[:, :3].argmax(1))


class ApexScript:
    """A script with `apex.amp`."""

    def __init__(
        self, amp: Any, opt_level: str, kind: Any = torch.optim.AdamW, model: Any = None, optimizer: Any = None
    ) -> None:
        if model is None:
            model, optimizer = build(kind)
        self.amp = amp
        self.model, self.optimizer = amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)

    def load(self, saved: dict[str, Any]) -> None:
        """Restore a checkpoint in the documented order."""
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.amp.load_state_dict(saved["amp"])

    def step(self, number: int) -> float:
        """Make one step and return its loss."""
        loss = loss_of(self.model, number)
        with self.amp.scale_loss(loss, self.optimizer) as scaled_loss:
            scaled_loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def save(self) -> dict[str, Any]:
        """What the script saves."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "amp": self.amp.state_dict(),
            "epoch": 3,
        }


class NativeScript:
    """A script with `torch.amp`."""

    def __init__(self, kind: Any = torch.optim.AdamW) -> None:
        self.model, self.optimizer = build(kind)
        self.scaler = torch.amp.GradScaler("cpu")

    def load(self, saved: dict[str, Any]) -> None:
        """Restore a checkpoint."""
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.scaler.load_state_dict(saved["scaler"])

    def step(self, number: int) -> float:
        """Make one step and return its loss."""
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_of(self.model, number)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss.item()

    def save(self) -> dict[str, Any]:
        """What the script saves."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "epoch": 5,
        }


def steps(script: Any, first: int, count: int) -> list[float]:
    """Make steps and return their losses."""
    return [script.step(number) for number in range(first, first + count)]


def train_apex(amp: Any, path: Path, opt_level: str, kind: Any = torch.optim.AdamW) -> float:
    """Write the checkpoint of a legacy script; return the loss of the step after it. The session is closed again."""
    script = ApexScript(amp, opt_level, kind)
    steps(script, 0, STEPS)
    torch.save(script.save(), path)
    loss = script.step(STEPS)
    amp._amp_state.close()
    return loss


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_native_training_goes_on_from_a_legacy_checkpoint_and_back(
    tmp_path: Path, amp: Any, opt_level: str, kind: Any
) -> None:
    """Apex to native to Apex: the first loss agrees within fp16 rounding each time, and the scale is carried."""
    path = tmp_path / "legacy.pt"
    expected = train_apex(amp, path, opt_level, kind)
    scale = torch.load(path)["amp"]["loss_scaler0"]
    result = convert_file(path, tmp_path / "native.pt", "native")
    assert (result.source, result.level) == ("apex", opt_level)

    native = NativeScript(kind)
    native.load(torch.load(tmp_path / "native.pt"))
    assert native.scaler.get_scale() == scale["loss_scale"]
    assert native.scaler.state_dict()["_growth_tracker"] == scale["unskipped"] == STEPS
    losses = steps(native, STEPS, 20)
    assert losses[0] == pytest.approx(expected, rel=HALF)
    assert losses[-1] < losses[0]
    torch.save(native.save(), path)
    expected = native.step(STEPS + 20)

    result = convert_file(path, tmp_path / "back.pt", "apex", opt_level=opt_level)
    assert list(torch.load(tmp_path / "back.pt")) == ["model", "optimizer", "amp", "epoch"]
    script = ApexScript(amp, opt_level, kind)
    script.load(torch.load(tmp_path / "back.pt"))
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": scale["loss_scale"], "unskipped": STEPS + 20}}
    assert script.step(STEPS + 20) == pytest.approx(expected, rel=HALF)


def test_what_an_o2_checkpoint_has_lost_is_listed_exactly(tmp_path: Path, amp: Any) -> None:
    """Of a legacy O2 file two things cannot be carried, and the optimizer state is carried to the last bit."""
    path = tmp_path / "legacy.pt"
    train_apex(amp, path, "O2")
    saved = torch.load(path)
    result = convert_state(saved, "native")
    assert result.lost == [
        "min_loss_scale and max_loss_scale, if they were set: no file has them, nor has GradScaler",
        "the last bits of the weights: they were saved as fp16 values, without masters",
    ]
    assert list(result.state) == ["model", "optimizer", "scaler", "epoch"]
    for index, state in saved["optimizer"]["state"].items():
        for name, value in state.items():
            assert torch.equal(result.state["optimizer"]["state"][index][name], value)
    assert list(saved) == ["model", "optimizer", "amp", "epoch"], "the source is untouched"


def test_a_legacy_layout_resumes_alike_in_both_orders(tmp_path: Path, amp: Any) -> None:
    """Loaded after or before `initialize`, an O2 file keeps its moments to the last bit, and trains on alike."""
    path = tmp_path / "legacy.pt"
    script = ApexScript(amp, "O2")
    steps(script, 0, STEPS)
    torch.save(script.save(), path)
    unbroken = steps(script, STEPS, 4)
    amp._amp_state.close()
    losses, moments = [], []
    for load_first in (False, True):
        saved = torch.load(path)
        model, optimizer = build()
        if load_first:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        script = ApexScript(amp, "O2", model=model, optimizer=optimizer)
        if load_first:
            amp.load_state_dict(saved["amp"])
        else:
            script.load(saved)
        script.optimizer.zero_grad()  # makes the masters, which take the state over
        moments.append(copy.deepcopy(script.save()["optimizer"]["state"]))
        losses.append(steps(script, STEPS, 4))
        amp._amp_state.close()
    saved = torch.load(path)["optimizer"]["state"]
    for found in moments:
        assert all(torch.equal(found[index]["exp_avg_sq"], state["exp_avg_sq"]) for index, state in saved.items())
    assert losses[0] == losses[1]
    assert losses[0] == pytest.approx(unbroken, rel=HALF)


def ours(arm: str, **more: Any) -> dict[str, Any]:
    """A checkpoint of ours whose master weights differ from the half weights in their last bits."""
    model, optimizer = build()
    loss_of(model, 0).backward()
    optimizer.step()
    weights = {name: value.half().float() for name, value in model.state_dict().items() if name.startswith("0.")}
    return {
        "model": {**model.state_dict(), **weights} if arm == "apex:O2" else model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "masters": {name: model.state_dict()[name] for name in weights} if arm == "apex:O2" else {},
        "progress": {"step": 1, "epoch": 0},
        "rng": [{"torch": torch.get_rng_state()}],
        "arm": arm,
        **more,
    }


def test_ours_goes_to_native_with_its_masters_and_back(tmp_path: Path) -> None:
    """Masters become the weights, so nothing is lost; back they are masters again, bit for bit."""
    state = ours("apex:O2", amp={"loss_scaler0": {"loss_scale": 2048.0, "unskipped": 5}})
    write_checkpoint(tmp_path / "o2.pt", state)
    result = convert_file(tmp_path / "o2.pt", tmp_path / "native.pt", "native")
    assert (result.arm, result.lost) == ("native:fp16", [])
    native = read_checkpoint(tmp_path / "native.pt")
    assert torch.equal(native["model"]["0.weight"], state["masters"]["0.weight"])
    assert (native["arm"], native["masters"], native["scaler"]["scale"]) == ("native:fp16", {}, 2048.0)
    assert torch.equal(native["rng"][0]["torch"], state["rng"][0]["torch"])
    result = convert_file(tmp_path / "native.pt", tmp_path / "back.pt", "apex", opt_level="O2")
    assert (result.arm, result.lost) == ("apex:O2", [])
    back = read_checkpoint(tmp_path / "back.pt")
    assert torch.equal(back["masters"]["0.weight"], state["masters"]["0.weight"])
    assert back["amp"] == state["amp"]
    assert "scaler" not in back


@pytest.mark.parametrize(
    "arm, amp_state, becomes, scaler",
    [
        ("apex:O0", {"loss_scale": 1.0, "unskipped": 0}, "fp32", None),
        ("apex:O1", {"loss_scale": 512.0, "unskipped": 9}, "native:fp16", (512.0, 9, 2000)),
        ("apex:O3", {"loss_scale": 1.0, "unskipped": 0}, "native:fp16", (65536.0, 0, 2000)),
        (
            "apex:O1,loss_scale=128",
            {"loss_scale": 128.0, "unskipped": 12345},
            "native:fp16,init_scale=128,growth_interval=2147483647",
            (128.0, 0, 2**31 - 1),
        ),
    ],
)
def test_arms_become_their_native_twins(
    arm: str, amp_state: dict[str, Any], becomes: str, scaler: tuple[float, int, int] | None
) -> None:
    """O0 becomes fp32, a static scale a GradScaler that never grows, and O3 a new GradScaler."""
    result = convert_state({"schema": 1, **ours(arm, amp={"loss_scaler0": amp_state})}, "native")
    assert result.arm == becomes
    if scaler is None:
        assert result.state["precision"] == {}
    else:
        state = result.state["scaler"]
        assert (state["scale"], state["_growth_tracker"], state["growth_interval"]) == scaler
        torch.amp.GradScaler("cpu").load_state_dict(state)


def test_arms_that_are_neither_convert_too() -> None:
    """What a run of fp32 or half saved goes to torch.amp and to Apex, and says what it was."""
    state = {"schema": 1, **ours("fp32", precision={})}
    result = convert_state(state, "native")
    assert (result.source, result.arm, result.state["scaler"]["scale"]) == ("fp32", "native:fp16", 65536.0)
    result = convert_state(state, "apex", opt_level="O2")
    assert (result.source, result.arm) == ("fp32", "apex:O2")
    with pytest.raises(ConversionError, match=r"torch\.amp already"):
        convert_state({"schema": 1, **ours("native:bf16", scaler={})}, "native")


def test_the_legacy_layout_of_ours(tmp_path: Path) -> None:
    """`--save-apex-format` writes what an Apex script loads, from either kind, and lists what such a script has not."""
    write_checkpoint(tmp_path / "a.pt", ours("apex:O2", amp={"loss_scaler0": {"loss_scale": 8.0, "unskipped": 1}}))
    result = convert_file(tmp_path / "a.pt", tmp_path / "b.pt", "apex", legacy_layout=True)
    assert list(torch.load(tmp_path / "b.pt")) == ["model", "optimizer", "amp", "epoch"]
    assert [line.partition(":")[0] for line in result.lost] == ["masters", "rng", "arm"]
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    write_checkpoint(tmp_path / "a.pt", ours("native:fp16", scaler={**scaler.state_dict(), "scale": 4096.0,
        "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 3}))  # fmt: skip
    convert_file(tmp_path / "a.pt", tmp_path / "b.pt", "apex", opt_level="O1", legacy_layout=True)
    legacy = torch.load(tmp_path / "b.pt")
    assert legacy["amp"] == {"loss_scaler0": {"loss_scale": 4096.0, "unskipped": 3}}
    with pytest.raises(ConversionError, match="needs --to apex"):
        convert_file(tmp_path / "a.pt", tmp_path / "c.pt", "native", legacy_layout=True)


GRADSCALER = {
    "scale": 2.0**25,
    "growth_factor": 3.0,
    "backoff_factor": 0.25,
    "growth_interval": 5000,
    "_growth_tracker": 4000,
}


def test_what_a_gradscaler_has_and_apex_has_not() -> None:
    """Factors, interval, a count past Apex's window and a scale above its ceiling are each listed once."""
    lost: list[str] = []
    state = apex_from_scalers([GRADSCALER, {}], level="O1", lost=lost, changed=[])
    assert state["loss_scaler0"] == {"loss_scale": 2.0**25, "unskipped": 1999}
    assert state["loss_scaler1"] == {"loss_scale": 65536.0, "unskipped": 0}
    assert [line.split()[0] for line in lost] == [
        "growth_factor",
        "backoff_factor",
        "growth_interval",
        "_growth_tracker",
        "scale",
    ]


def test_several_scalers_and_a_static_one() -> None:
    """Each Apex scaler becomes a GradScaler; one that counted past 2000 was static and never grows."""
    lost: list[str] = []
    states = {
        "loss_scaler0": {"loss_scale": 64.0, "unskipped": 1999},
        "loss_scaler1": {"loss_scale": 128.0, "unskipped": 7777},
    }
    first, second = scalers_from_apex(states, level="O1", static=None, lost=lost, changed=[])
    assert (first["_growth_tracker"], first["growth_interval"]) == (1999, 2000)
    assert (second["_growth_tracker"], second["growth_interval"]) == (0, 2**31 - 1)
    assert len(lost) == 1


@pytest.mark.parametrize("scale", [0.0, math.inf, math.nan, -1.0, "64", True])
def test_a_scale_that_cannot_train_is_refused(scale: Any) -> None:
    """A run whose scale had collapsed is not worth converting."""
    with pytest.raises(ConversionError, match="scale of"):
        scalers_from_apex(
            {"loss_scaler0": {"loss_scale": scale, "unskipped": 0}}, level=None, static=None, lost=[], changed=[]
        )
    with pytest.raises(ConversionError, match="scale of"):
        apex_from_scalers([{**GRADSCALER, "scale": scale}], level="O1", lost=[], changed=[])


def test_fused_adam_gets_its_steps_back(amp: Any) -> None:
    """The count of steps that FusedAdam keeps in its groups lies beside each parameter, and AdamW takes the state."""
    from ampcompare.apex.optimizers import FusedAdam

    script = ApexScript(amp, "O2", FusedAdam)
    steps(script, 0, 4)
    result = convert_state(script.save(), "native")
    model, optimizer = build()
    optimizer.load_state_dict(result.state["optimizer"])
    state = optimizer.state[next(model.parameters())]
    assert state["step"].item() == 4
    assert torch.equal(state["exp_avg"], script.save()["optimizer"]["state"][0]["exp_avg"])
    loss_of(model, 5).backward()
    optimizer.step()


def test_wrappers_and_half_weights_and_half_state() -> None:
    """`module.` goes from every name, fp16 weights and moments become fp32, and each loss has its line."""
    weights = {"module.w": torch.full((3,), 1 / 3).half(), "module.n": torch.tensor(3)}
    optimizer = {"state": {0: {"momentum_buffer": torch.ones(3).half()}}, "param_groups": [{"params": [0]}]}
    result = convert_state({"model": weights, "optimizer": optimizer}, "native", opt_level="O2")
    assert list(result.state["model"]) == ["w", "n"]
    assert result.state["model"]["w"].dtype is torch.float32
    assert result.state["optimizer"]["state"][0]["momentum_buffer"].dtype is torch.float32
    assert [line.partition(":")[0] for line in result.lost] == [
        "no state of amp was saved",
        "the last bits of the weights",
        "the last bits of the state of optimizer",
    ]


APEX = {"loss_scaler0": {"loss_scale": 16.0, "unskipped": 2}}
SCALER = {"scale": 16.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 2}
WEIGHTS = {"w": torch.full((9,), 1 / 3)}
OPTIMIZER: dict[str, Any] = {"state": {}, "param_groups": [{"params": [0], "lr": 0.1}]}


@pytest.mark.parametrize(
    "apex, native",
    [
        (
            {"epoch": 1, "arch": "net", "state_dict": WEIGHTS, "optimizer": OPTIMIZER, "version": 2, "amp": APEX},
            {"epoch": 1, "arch": "net", "state_dict": WEIGHTS, "optimizer": OPTIMIZER, "version": 2, "scaler": SCALER},
        ),
        (
            {"meta": {"epoch": 1}, "state_dict": WEIGHTS, "optimizer": {**OPTIMIZER, "apex_amp": APEX}},
            {"meta": {"epoch": 1}, "state_dict": WEIGHTS, "optimizer": {**OPTIMIZER, "loss_scaler": SCALER}},
        ),
        (
            {"pytorch-lightning_version": "1.5", "state_dict": WEIGHTS, "optimizer_states": [OPTIMIZER],
             "amp_scaling_state": APEX},
            {"pytorch-lightning_version": "1.5", "state_dict": WEIGHTS, "optimizer_states": [OPTIMIZER],
             "MixedPrecision": SCALER},
        ),
        ({"net": WEIGHTS, "apex": APEX, "lr": 0.1}, {"net": WEIGHTS, "scaler": SCALER, "lr": 0.1}),
    ],
    ids=["timm", "mmengine", "Lightning", "a script"],
)  # fmt: skip
def test_each_program_keeps_its_layout(apex: dict[str, Any], native: dict[str, Any]) -> None:
    """The state of the scaler takes the place and the name that the same program gives the other kind."""
    result = convert_state(apex, "native").state
    if "arch" in native:
        native = {("amp_scaler" if key == "scaler" else key): value for key, value in native.items()}
    assert json.dumps(result, default=str) == json.dumps(native, default=str)
    back = convert_state(native, "apex").state
    if "net" not in apex:
        assert json.dumps(back, default=str) == json.dumps(apex, default=str)
    else:
        assert back["amp"] == APEX


def test_what_cannot_be_converted_says_why(tmp_path: Path) -> None:
    """Nothing to convert, the wanted kind already, no weights, and the same file twice."""
    with pytest.raises(ConversionError, match="a checkpoint of Apex already"):
        convert_state({"model": WEIGHTS, "amp": APEX}, "apex")
    with pytest.raises(ConversionError, match=r"a checkpoint of torch\.amp already"):
        convert_state({"model": WEIGHTS, "scaler": SCALER}, "native")
    with pytest.raises(ConversionError, match="no sign of Apex"):
        convert_state({"model": WEIGHTS}, "native")
    with pytest.raises(ConversionError, match="no weights"):
        convert_state({"amp": APEX}, "native")
    path = tmp_path / "a.pt"
    torch.save({"model": WEIGHTS, "amp": APEX}, path)
    with pytest.raises(ConversionError, match="overwritten"):
        convert_file(path, path, "native")


def test_objects_need_trust(tmp_path: Path) -> None:
    """A pickled model is refused with its place; trusted, it becomes its state dict, and other objects are listed."""
    path = tmp_path / "a.pt"
    net = nn.Linear(2, 2)
    torch.save({"model": net, "amp": APEX, "sampler": torch.Generator, "rate": Rate()}, path)
    with pytest.raises(CheckpointError, match=r"model: torch\.nn\.modules\.linear\.Linear.*--unsafe-load"):
        load_any(path)
    state, left_out = load_any(path, trust=True)
    assert torch.equal(state["model"]["weight"], net.weight)
    torch.save({"\x1b[2J" + "long" * 500: net}, tmp_path / "b.pt")
    with pytest.raises(CheckpointError) as refusal:
        load_any(tmp_path / "b.pt")
    assert str(refusal.value).isprintable()
    assert len(str(refusal.value)) < 500
    assert all(place.isprintable() and len(place) <= 80 for place in objects_of(tmp_path / "b.pt"))
    assert [line.partition(":")[0] for line in left_out] == ["sampler", "rate"]


def test_objects_of_a_program_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trusted objects whose code is not installed are left out, and the tensors beside them are carried."""
    path = tmp_path / "a.pt"
    module = ModuleType("lost_program")
    module.Hub = type("Hub", (), {"__module__": "lost_program", "__qualname__": "Hub"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lost_program", module)
    torch.save({"meta": {}, "message_hub": module.Hub(), "state_dict": WEIGHTS, "amp": APEX}, path)
    monkeypatch.delitem(sys.modules, "lost_program")
    result = convert_file(path, tmp_path / "b.pt", "native", trust=True)
    assert torch.equal(result.state["state_dict"]["w"], WEIGHTS["w"])
    assert "ModuleNotFoundError" in result.lost[-2]
    assert result.lost[-1].startswith("message_hub: an object of lost_program.Hub")


class Rate:
    """An object of a user's program."""


def test_the_command_converts_and_says_what_was_lost(
    tmp_path: Path, amp: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Text and JSON of one conversion name level, what is carried and what is not; the exit code is 0."""
    path = tmp_path / "legacy.pt"
    train_apex(amp, path, "O2")
    assert main(["convert", str(path), str(tmp_path / "native.pt"), "--to", "native"]) == 0
    text = capsys.readouterr().out
    assert "native.pt: Apex O2 to torch.amp" in text
    assert "  not carried: the last bits of the weights" in text
    assert main(["convert", str(path), str(tmp_path / "native.pt"), "--to", "native", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["from"], document["to"], document["opt_level"]) == ("apex", "native", "O2")
    assert len(document["lost"]) == 2
    assert NativeScript().load(torch.load(tmp_path / "native.pt")) is None


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["a.pt"], "or --inspect"),
        (["a.pt", "b.pt"], "--to native or --to apex"),
        (["a.pt", "b.pt", "--inspect"], "writes nothing"),
        (["none.pt", "b.pt", "--to", "native"], "cannot read the checkpoint none.pt: No such file"),
        (["none.pt", "--inspect"], "cannot read the checkpoint none.pt: No such file"),
    ],
)
def test_wrong_calls_of_the_command(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Usage errors and missing files are one line and exit code 2."""
    assert main(["convert", *arguments]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("key", [7, None, b"net", 0.5, True])
def test_keys_need_not_be_text(key: Any) -> None:
    """Weights, optimizers and scalers are found and converted under whatever key a script gave them."""
    half = {"module.w": torch.full((9,), 1 / 3).half()}
    nested = convert_state({"nets": {key: half}, "amp": {key: APEX}}, "native", opt_level="O2").state
    assert nested["nets"][key]["w"].dtype is torch.float32
    assert nested["amp"]["scaler"] == SCALER


@pytest.mark.parametrize("key", ["native_amp_scaling_state", "NativeMixedPrecisionPlugin"])
def test_lightning_before_2_had_other_names(key: str) -> None:
    """The scaler goes to where the same Lightning had the state of Apex, as it does from the name of today."""
    state = {"pytorch-lightning_version": "1.9.5", "state_dict": WEIGHTS, "optimizer_states": [OPTIMIZER], key: SCALER}
    assert list(convert_state(state, "apex").state) == [*list(state)[:-1], "amp_scaling_state"]
