"""Where the state of a loss scaler lies in files of scripts and programs, and where a conversion puts it."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from ampcompare.base.errors import ConversionError
from ampcompare.checkpoints.convert.convert import convert_file, convert_state
from tests.checkpoints.convert.small_scripts import APEX, OPTIMIZER, SCALER, WEIGHTS

Namespace = importlib.import_module("argparse").Namespace
STATIC = {"loss_scaler0": {"loss_scale": 128.0, "unskipped": 3}}
NEVER = 2**31 - 1


def loaded(state: dict[str, Any]) -> Any:
    """A GradScaler of a migrated script, which has been used before it loads."""
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    scaler.load_state_dict(state)
    return scaler


def scale_after(scaler: Any, steps: int) -> float:
    """Return the scale after some steps without overflow."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for _ in range(steps):
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return float(scaler.get_scale())


@pytest.mark.parametrize(
    ("head", "also"),
    [
        ({"meta": {"mmcv_version": "1.7"}}, "scaler"),
        ({"arch": "resnet", "version": 2}, "amp_scaler"),
        ({}, "scaler"),
    ],
    ids=["mmcv", "timm", "a script"],
)
def test_the_key_that_a_migrated_script_reads_stays(head: dict[str, Any], also: str) -> None:
    """`scaler.load_state_dict(checkpoint["amp"])` works for every program, and its own key is there too, by name."""
    result = convert_state({**head, "state_dict": WEIGHTS, "optimizer": OPTIMIZER, "amp": APEX}, "native")
    assert result.state["amp"] == result.state[also] == SCALER
    assert any(line.startswith(f"amp: the GradScaler is also under {also}") for line in result.changed)
    assert convert_state(result.state, "apex").state["amp"] == APEX
    assert also not in convert_state(result.state, "apex").state


@pytest.mark.parametrize(
    ("head", "place", "key"),
    [({"pytorch-lightning_version": "1.9"}, ("amp_scaling_state",), "MixedPrecision"),
     ({"meta": {}, "message_hub": {}}, ("optimizer", "apex_amp"), "loss_scaler")],
)  # fmt: skip
def test_a_key_that_moves_is_named(head: dict[str, Any], place: tuple[str, ...], key: str) -> None:
    """Lightning and mmengine read their own entries, no script does."""
    optimizer = {**OPTIMIZER, "apex_amp": APEX} if len(place) > 1 else OPTIMIZER
    state = {
        **head,
        "state_dict": WEIGHTS,
        "optimizer": optimizer,
        **({} if len(place) > 1 else {place[0]: APEX}),
    }
    (line,) = [line for line in convert_state(state, "native").changed if line.startswith(".".join(place))]
    assert f"under {key}" in line


@pytest.mark.parametrize("empty", [{}, None, False, []])
@pytest.mark.parametrize("first", ["amp", "scaler"])
def test_an_empty_entry_gives_way(empty: Any, first: str) -> None:
    """What stands for no scaler would make `load_state_dict` raise: both keys hold the scaler."""
    held = {"amp": APEX, "scaler": empty} if first == "amp" else {"scaler": empty, "amp": APEX}
    native = convert_state({"net": WEIGHTS, **held}, "native").state
    assert native["amp"] == native["scaler"] == SCALER
    assert loaded(native["scaler"]).get_scale() == 16.0
    held = {"scaler": SCALER, "amp": empty} if first == "amp" else {"amp": empty, "scaler": SCALER}
    back = convert_state({"net": WEIGHTS, **held}, "apex")
    assert back.state == {"net": back.state["net"], "amp": APEX}
    assert back.lost == []


def test_an_entry_of_another_kind_stays_or_is_named() -> None:
    """A `scaler` may be one of data, and `amp` a flag."""
    data = {"mean": 1.0, "std": 2.0}
    result = convert_state({"net": WEIGHTS, "amp": APEX, "scaler": data}, "native")
    assert (result.state["scaler"], result.state["amp"]) == (data, SCALER)
    assert "amp: the state of a GradScaler, in place of that of Apex" in result.changed
    result = convert_state({"net": WEIGHTS, "amp": True, "scaler": SCALER}, "apex")
    assert result.state["amp"] == APEX
    assert "amp: another entry has this key now" in result.lost
    result = convert_state({"net": WEIGHTS, "scaler": data}, "apex")
    assert (result.state["scaler"], list(result.state["amp"])) == (data, ["loss_scaler0"])


SECOND = {**SCALER, "scale": 2.0}


@pytest.mark.parametrize(
    ("held", "keys", "scales"),
    [
        ({"scaler": [SCALER, SECOND]}, ["amp"], [16.0, 2.0]),
        ({"scaler": [SCALER]}, ["amp"], [16.0]),
        ({"scalers": [{}, SECOND]}, ["amp"], [65536.0, 2.0]),
        ({"scalers": {"G": SCALER, "D": SECOND}}, ["amp"], [16.0, 2.0]),
        ({"scaler_G": SCALER, "x": 1, "scaler_D": SECOND}, ["amp", "x"], [16.0, 2.0]),
        ({"all": {"scalers": [SCALER, SECOND], "x": 1}}, ["all"], [16.0, 2.0]),
        ({"mixed": [1, SCALER, SECOND]}, ["mixed"], [16.0, 2.0]),
        ({"scalers": [SCALER, SECOND], "extra": {**SCALER, "scale": 4.0}}, ["amp"], [16.0, 2.0, 4.0]),
    ],
    ids=str,
)
def test_several_grad_scalers_become_one_state(
    held: dict[str, Any], keys: list[str], scales: list[float]
) -> None:
    """A list, a dict, keys of their own: in their order, by name; nothing of GradScalers stays."""
    result = convert_state({"net": WEIGHTS, **held}, "apex")
    assert [key for key in result.state if key != "net"] == keys
    place: Any = result.state
    while "amp" not in place:
        place = next(
            item for key, item in (place.items() if isinstance(place, dict) else enumerate(place))
            if isinstance(item, dict | list) and key != "net"
        )  # fmt: skip
    assert [entry["loss_scale"] for entry in place["amp"].values()] == scales
    assert "growth_factor" not in str(result.state)
    assert any("GradScalers (" in line for line in result.changed) == (len(scales) > 1)


@pytest.mark.slow  # four thousand steps
def test_a_static_scale_never_grows() -> None:
    """Said by the caller, or shown by a number that no dynamic scale takes; else the file does not say, which is said.

    The state is one that a GradScaler loads and keeps: 2,001 clean steps leave the scale.
    """
    told = convert_state({"net": WEIGHTS, "amp": STATIC}, "native", static_scale=True)
    assert told.state["scaler"]["growth_interval"] == NEVER
    assert scale_after(loaded(told.state["scaler"]), 2001) == 128.0
    assert not any("static" in line for line in told.lost)
    unknown = convert_state({"net": WEIGHTS, "amp": STATIC}, "native")
    assert unknown.state["scaler"]["growth_interval"] == 2000
    assert scale_after(loaded(unknown.state["scaler"]), 1997) == 256.0
    assert "--static-scale" in unknown.lost[0]
    for scale, clean in ((100.0, 3), (1000.0, 0), (128.0, 2000)):
        shown = convert_state(
            {"net": WEIGHTS, "amp": {"loss_scaler0": {"loss_scale": scale, "unskipped": clean}}}, "native"
        )
        assert shown.state["scaler"]["growth_interval"] == NEVER
        assert not any("static" in line for line in shown.lost)
    back = convert_state(told.state, "apex")
    assert back.state["amp"]["loss_scaler0"]["loss_scale"] == 128.0
    assert any("give loss_scale=128 to amp.initialize" in line for line in back.changed)


@pytest.mark.parametrize(
    "state",
    [
        {"meta": {"fp16": {"loss_scaler": {"cur_scale": 512.0, "cur_iter": 9, "mode": "static",
                                           "last_overflow_iter": -1, "scale_factor": 2.0, "scale_window": 1000}}}},
        {"last_optimizer_state": {**OPTIMIZER, "loss_scale": 512.0}},
        {"optimizer": {"dynamic_loss_scale": False, "cur_scale": 512.0, "cur_iter": 9,
                       "optimizer_state_dict": OPTIMIZER}},
    ],
    ids=["mmcv", "a number", "DeepSpeed"],
)  # fmt: skip
def test_a_static_scale_of_another_scaler_never_grows(state: dict[str, Any]) -> None:
    result = convert_state({"model": WEIGHTS, **state}, "native", static_scale=True)
    found = [entry for entry in _dicts(result.state) if "growth_interval" in entry]
    assert [(entry["scale"], entry["growth_interval"]) for entry in found] == [(512.0, NEVER)]


def _dicts(value: Any) -> list[dict[str, Any]]:
    inner = [held for item in value.values() for held in _dicts(item)] if isinstance(value, dict) else []
    return [value, *inner] if isinstance(value, dict) else inner


def test_a_scale_of_one_loads_into_any_scaler() -> None:
    """O0 scales nothing; an empty state would make an enabled GradScaler raise."""
    state = {"net": WEIGHTS, "amp": {"loss_scaler0": {"loss_scale": 1.0, "unskipped": 7}}}
    scaler = loaded(convert_state(state, "native", opt_level="O0").state["amp"])
    assert scale_after(scaler, 5) == 1.0


def test_where_a_static_scale_cannot_be_said(tmp_path: Path) -> None:
    torch.save({"net": WEIGHTS, "scaler": SCALER}, tmp_path / "a.pt")
    with pytest.raises(ConversionError, match="needs --to native"):
        convert_file(tmp_path / "a.pt", tmp_path / "b.pt", "apex", static_scale=True)
    ours = {"schema": 1, "arm": "apex:O1", "model": WEIGHTS, "optimizer": OPTIMIZER, "amp": APEX}
    with pytest.raises(ConversionError, match="its arm, apex:O1, says"):
        convert_state(ours, "native", static_scale=True)


@pytest.mark.parametrize("half", [True, False])
def test_weights_below_a_key_named_state_are_seen(half: bool) -> None:
    """Composer has all it saves there; optimizers in whatever form are no weights."""
    weights = {"module.w": torch.rand(3, 4)}
    held = {name: value.half() if half else value for name, value in weights.items()}
    odd = {"state": {0: {"exp_avg": torch.rand(3)}, "w": {"exp_avg": torch.rand(3)}}}
    state = {"state": {"model": held, "optimizers": {"DecoupledAdamW": OPTIMIZER, "Own": odd},
                       "timestamp": {"epoch": 1}, "amp": APEX}, "rng": []}  # fmt: skip
    result = convert_state(state, "native", opt_level="O2" if half else "O1").state["state"]
    assert list(result["model"]) == ["w"]
    assert result["model"]["w"].dtype is torch.float32
    assert result["amp"] == result["scaler"] == SCALER
    assert result["optimizers"]["Own"] == odd


def test_what_is_written_loads_by_default_and_names_its_changes(tmp_path: Path) -> None:
    """The values of a whole file, at the level of the command: nothing changes without a line."""
    args = Namespace(lr=0.1, out=Path("runs") / "a")
    torch.save({"net": WEIGHTS, "amp": APEX, "args": args, ("a", 1): {1, 2}}, tmp_path / "a.pt")
    result = convert_file(tmp_path / "a.pt", tmp_path / "b.pt", "native")
    found = torch.load(tmp_path / "b.pt")
    assert (found["args"], found["a", 1]) == ({"lr": 0.1, "out": "runs/a"}, {1, 2})
    assert result.changed[-2:] == [
        "args.out: pathlib.PosixPath as text",
        "args: argparse.Namespace as a dict",
    ]
