"""Checkpoints between Apex and torch.amp."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ampcompare.base.errors import ConversionError
from ampcompare.checkpoints.convert.convert import convert_file, convert_state
from ampcompare.checkpoints.convert.scalers import apex_state_from_grad_scalers, grad_scaler_states_from_apex
from ampcompare.checkpoints.store.file import read_checkpoint, write_checkpoint
from tests.checkpoints.convert.small_scripts import (
    APEX,
    OPTIMIZER,
    SCALER,
    WEIGHTS,
    ApexScript,
    build,
    loss_of,
    steps,
)

pytestmark = pytest.mark.filterwarnings("ignore::ampcompare.apex.DeprecatedFeatureWarning")


def ours(arm: str, **more: Any) -> dict[str, Any]:
    """A checkpoint of ours whose master weights differ from the half weights in their last bits."""
    model, optimizer = build()
    loss_of(model, 0).backward()
    optimizer.step()
    weights = {
        name: value.half().float() for name, value in model.state_dict().items() if name.startswith("0.")
    }
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
        (
            "apex:O1",
            {"loss_scale": torch.tensor(512.0), "unskipped": torch.tensor(9)},
            "native:fp16",
            (512.0, 9, 2000),
        ),
        ("apex:O5", {"loss_scale": 1.0, "unskipped": 0}, "native:bf16", None),
        ("half:bf16", {"loss_scale": 1.0, "unskipped": 0}, "native:bf16", None),
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
    """O0 becomes fp32, bf16 stays, a static scale becomes a GradScaler that never grows, and O3 a new GradScaler."""
    result = convert_state({"schema": 1, **ours(arm, amp={"loss_scaler0": amp_state})}, "native")
    assert result.arm == becomes
    if scaler is None:
        assert {} in (result.state.get("precision"), result.state.get("scaler"))
    else:
        state = result.state["scaler"]
        assert (state["scale"], state["_growth_tracker"], state["growth_interval"]) == scaler
        torch.amp.GradScaler("cpu").load_state_dict(state)


def test_the_legacy_layout_of_ours(tmp_path: Path) -> None:
    """`--save-apex-format` writes what an Apex script loads, from either kind, and lists what such a script has not."""
    write_checkpoint(
        tmp_path / "a.pt", ours("apex:O2", amp={"loss_scaler0": {"loss_scale": 8.0, "unskipped": 1}})
    )
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
    state = apex_state_from_grad_scalers([GRADSCALER, {}], level="O1", lost_lines=lost, changed_lines=[])
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
    first, second = grad_scaler_states_from_apex(
        states, level="O1", static=None, lost_lines=lost, changed_lines=[]
    )
    assert (first["_growth_tracker"], first["growth_interval"]) == (1999, 2000)
    assert (second["_growth_tracker"], second["growth_interval"]) == (0, 2**31 - 1)
    assert [line.partition(":")[0] for line in lost] == ["whether the scale is static", "2 loss scalers"]


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
    """What wrappers put before every name goes, fp16 weights and moments become fp32, and each loss has its line."""
    weights = {"module._orig_mod.w": torch.full((3,), 1 / 3).half(), "module._orig_mod.n": torch.tensor(3)}
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


@pytest.mark.parametrize("key", ["amp", "scaler", "apex"])
def test_a_scripts_own_key_is_kept(key: str, tmp_path: Path) -> None:
    """A migrated script reads the key of the Apex script, one by hand `scaler`: a file has both, and goes back."""
    torch.save({"net": WEIGHTS, key: APEX, "lr": 0.1}, tmp_path / "apex.pt")
    native = convert_file(tmp_path / "apex.pt", tmp_path / "native.pt", "native").state
    assert native[key] == native["scaler"] == SCALER
    back = convert_file(tmp_path / "native.pt", tmp_path / "back.pt", "apex").state
    assert back == {"net": back["net"], "amp" if key == "scaler" else key: APEX, "lr": 0.1}


@pytest.mark.parametrize("key, others", [("amp", "scaler"), ("scaler", "scalers")])
def test_several_scalers_stay_for_a_migrated_script(key: str, others: str) -> None:
    """A migrated script takes several scales from the state of Apex, as no state says what its scalers are called."""
    apex = {f"loss_scaler{index}": {"loss_scale": 16.0, "unskipped": 2} for index in range(2)}
    native = convert_state({"net": WEIGHTS, key: apex}, "native").state
    assert native == {"net": native["net"], key: apex, others: [SCALER, SCALER]}


@pytest.mark.parametrize("key", [7, None])
def test_keys_need_not_be_text(key: Any) -> None:
    """Weights, optimizers and scalers are found and converted under whatever key a script gave them."""
    half = {"module.w": torch.full((9,), 1 / 3).half()}
    nested = convert_state({"nets": {key: half}, "amp": {key: APEX}}, "native", opt_level="O2").state
    assert nested["nets"][key]["w"].dtype is torch.float32
    assert nested["amp"]["scaler"] == SCALER


@pytest.mark.parametrize("key", ["native_amp_scaling_state", "NativeMixedPrecisionPlugin"])
def test_lightning_before_2_had_other_names(key: str) -> None:
    state = {
        "pytorch-lightning_version": "1.9.5",
        "state_dict": WEIGHTS,
        "optimizer_states": [OPTIMIZER],
        key: SCALER,
    }
    assert list(convert_state(state, "apex").state) == [*list(state)[:-1], "amp_scaling_state"]
